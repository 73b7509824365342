"""What commands print about runs: reports, evaluations, comparisons, rankings. Text without escape codes, 80 columns at most."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rankgrad.data.dataset import RankingDataset
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


def as_scores(lists: RankingDataset, scores: np.ndarray, tag: str) -> list[str]:  # noqa: ARG001 (as every format)
    """A score per line in the order of the input's rows; nine digits hold a float32 exactly."""
    return [f"{score:.9g}\n" for score in lists.in_source_order(scores).tolist()]


def as_trec(lists: RankingDataset, scores: np.ndarray, tag: str) -> list[str]:
    """A TREC run: `QUERY Q0 DOCUMENT RANK SCORE TAG`, the document being its row in the input, counted from 1."""
    rows = np.arange(len(scores)) if lists.rows is None else lists.rows
    tag = "_".join(tag.split()) or "rankgrad"
    lines = []
    for query, start, stop in zip(lists.query_ids.tolist(), lists.offsets[:-1].tolist(), lists.offsets[1:].tolist()):
        if len(str(query).split()) != 1:
            raise ValueError(
                f"the query id {query!r} cannot be written to a TREC run file; expected text without spaces; use --format scores"
            )
        best_first = start + np.argsort(-scores[start:stop], kind="stable")
        ranked = zip(rows[best_first].tolist(), scores[best_first].tolist())
        lines += [f"{query} Q0 {row + 1} {place} {score:.9g} {tag}\n" for place, (row, score) in enumerate(ranked, 1)]
    return lines


FORMATS = {"scores": as_scores, "trec": as_trec}


def _count_queries(number: int) -> str:
    return f"{number:,} {'query' if number == 1 else 'queries'}"


def _format_interval(found: Mapping[str, float]) -> tuple[str, str]:
    if math.isnan(found["mean"]):
        return format_mean(None), ""
    return f"{found['mean']:.4f}", f"[{found['low']:.4f}, {found['high']:.4f}]"
