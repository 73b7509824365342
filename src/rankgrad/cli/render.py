"""What commands print about runs: reports, evaluations, comparisons, rankings. Text without escape codes, 80 columns at most."""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from rankgrad.data.dataset import RankingDataset
from rankgrad.inert import inert, inert_cell
from rankgrad.runs.compare import ENSEMBLE
from rankgrad.runs.significance import LEVEL
from rankgrad.runs.text import RULES, by_rule, format_mean, table
from rankgrad.training.members import ALL_KEPT, KEPT
from rankgrad.training.state import FIRST_EPOCH, LAST_EPOCH


def describe_report(report: Mapping[str, Any]) -> str:
    """The end of a training run: its metrics, and where it is."""
    test = report["splits"].get("test")
    empty = test is not None and test["empty_queries"] == test["queries"]
    split = "vali" if test is None or empty else "test"
    why = {
        LAST_EPOCH: "was kept, as the last",
        FIRST_EPOCH: "was kept, as the first: no validation query has a relevant document to choose by",
        KEPT: "was the median of the members' best",
        ALL_KEPT: "was kept of every member, as the last",
    }.get(report["selection"], "was best on validation")
    return (
        f"{by_rule(report['metrics'][split])}\n"
        f"{split} split, {_count_queries(report['splits'][split]['queries'])}; "
        f"{'round' if 'trees' in report else 'epoch'} {report['best_epoch']} of {report['epochs']} {why}\n"
        + _describe_members(report)
        + ("the test split has no relevant document, so its metrics say nothing about the model\n" if empty else "")
        + f"{report['convention'].partition(';')[0]}\n"
        f"{report['seconds']:.1f} s; the run is in {report['run']}"
    )


def _describe_members(report: Mapping[str, Any]) -> str:
    """A line about networks trained at once; nothing where there were none."""
    if "members" not in report:
        return ""
    return (
        f"{report['kept']} of {len(report['members'])} members kept; validation of their average "
        f"{report['validation_of_average']:.4f}, of the best {report['validation_of_best']:.4f}\n"
    )


def describe_evaluation(result: Mapping[str, Any]) -> str:
    """What `evaluate_runs` found, as a table and the conventions behind it."""
    rows = [("metric", "empty queries", "mean", f"{LEVEL:.0%} interval")]
    for name, rules in result["metrics"].items():
        rows += [
            (name if rule == "empty=1" else "", words, *_format_interval(rules[rule])) for rule, words in RULES.items()
        ]
    together = f"{len(result['runs'])} runs together: {ENSEMBLE}\n" if "runs" in result else ""
    return (
        f"{table(rows)}\n{together}"
        f"{_count_queries(result['queries'])}, {result['empty_queries']:,} of them empty (no relevant document)\n{result['convention']}"
        + (
            "\nthe model was trained on some of these lists: expect lower metrics on others"
            if result["trained_on"]
            else ""
        )
        + (f"\nkept as {result['name']} in {result['folder']}" if "folder" in result else "")
    )


def describe_comparison(found: Mapping[str, Any]) -> str:
    """What `compare_runs` found, in a few lines."""
    return (
        f"{found['metric']} on the {found['split']} split, {_count_queries(found['queries'])} "
        f"({found['empty_queries']:,} empty one{'s' * (found['empty_queries'] != 1)} left out)\n"
        f"A  {found['mean_a']:.4f}  {found['a']}\n"
        f"B  {found['mean_b']:.4f}  {found['b']}\n"
        f"A - B  {found['difference']:+.4f}, {LEVEL:.0%} interval [{found['low']:+.4f}, {found['high']:+.4f}], "
        f"p = {found['p_value']:.3g}\n"
        f"A wins {found['wins']:,}, ties {found['ties']:,}, loses {found['losses']:,}\n"
        "paired over queries: bootstrap interval, two-sided permutation test"
    )


def as_scores(lists: RankingDataset, scores: np.ndarray, tag: str) -> Iterator[str]:  # noqa: ARG001 (as every format)
    """A score per line in the order of the input's rows; nine digits hold a float32 exactly."""
    ordered = lists.in_source_order(scores)
    for first in range(0, len(ordered), LINES):
        yield "".join(f"{score:.9g}\n" for score in ordered[first : first + LINES].tolist())


def as_trec(lists: RankingDataset, scores: np.ndarray, tag: str) -> Iterator[str]:
    """A TREC run: `QUERY Q0 DOCUMENT RANK SCORE TAG`, the document being its id or its row in the input, counted from 1.

    An id that would not be one visible word is refused: as another word it would be another document.
    """
    _expect_words("query", lists.query_ids)
    if lists.document_ids is not None:
        _expect_words("document", lists.document_ids)
    tag = inert("_".join(tag.split())) or "rankgrad"
    for query, names, values, _ in _ranked(lists, scores):
        lines = enumerate(zip(names, values), 1)
        yield "".join(f"{query} Q0 {name} {place} {score:.9g} {tag}\n" for place, (name, score) in lines)


def as_csv(lists: RankingDataset, scores: np.ndarray, tag: str) -> Iterator[str]:  # noqa: ARG001 (as every format)
    """A table of the ranked documents with their ids, and the row of the input each was in, counted from 1.

    Ids are written so that a spreadsheet takes none for a formula and each stands on one line; the row says which document it is.
    """
    yield "qid,document,rank,score,row\n"
    for query, names, values, rows in _ranked(lists, scores):
        text = io.StringIO()
        lines = zip(names, range(1, len(names) + 1), values, rows)
        csv.writer(text, lineterminator="\n").writerows(
            (inert_cell(query), inert_cell(name), place, f"{score:.9g}", row) for name, place, score, row in lines
        )
        yield text.getvalue()


def _ranked(lists: RankingDataset, scores: np.ndarray) -> Iterator[tuple[Any, list[Any], list[float], list[int]]]:
    """For each query its id, and of its documents, best first, names, scores and rows of the input counted from 1."""
    names, rows = lists.document_names(), np.arange(len(scores)) if lists.rows is None else lists.rows
    for number, (start, stop) in enumerate(pairwise(lists.offsets.tolist())):
        best_first = start + np.argsort(-scores[start:stop], kind="stable")
        found = names[best_first].tolist(), scores[best_first].tolist(), (rows[best_first] + 1).tolist()
        yield lists.query_ids[number].item(), *found


def _expect_words(what: str, ids: np.ndarray) -> None:
    """Refuse ids that would not be one word of a line."""
    if ids.dtype.kind != "U":
        return
    for first in range(0, len(ids), LINES):
        for name in ids[first : first + LINES].tolist():
            if len(name.split()) != 1 or name != name.strip() or name != inert(name):
                raise ValueError(
                    f"the {what} id {name!r} cannot be written to a TREC run file; expected text without spaces and control characters; "
                    "use --format csv or --format scores"
                )


LINES = 4096  # written at once
FORMATS = {"scores": as_scores, "trec": as_trec, "csv": as_csv}


def _count_queries(number: int) -> str:
    return f"{number:,} {'query' if number == 1 else 'queries'}"


def _format_interval(found: Mapping[str, float]) -> tuple[str, str]:
    if math.isnan(found["mean"]):
        return format_mean(None), ""
    return f"{found['mean']:.4f}", f"[{found['low']:.4f}, {found['high']:.4f}]"
