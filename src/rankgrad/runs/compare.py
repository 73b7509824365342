"""What is said of finished runs, as plain values first and text second: metrics, comparisons, scores. Room 6.

Imports run, evaluate and significance; prints nothing. Tables are aligned text without escape codes, 80 columns at most.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.folder import MANIFEST
from rankgrad.runs.ensemble import Ensemble
from rankgrad.training.evaluate import RULES as EMPTY
from rankgrad.runs.folder import Judged, kept
from rankgrad.runs.provenance import CONVENTION, FIRST_EPOCH, LAST_EPOCH
from rankgrad.runs.significance import LEVEL, bootstrap_interval, compare

RULES = {"empty=1": "count 1", "empty=0": "count 0", "skipped": "left out"}  # a report's names, as a person reads them
ENSEMBLE = "mean of scores standardised within each list"
ROUNDS = 2_000  # of the bootstrap: an interval's ends are good to a twentieth of its width


def judge_runs(folders: Sequence[Path], data: str, split: str, metrics: Sequence[str]) -> dict[str, Any]:
    """Metrics of a run, or of several together, on data, under every rule for empty queries: mean and interval."""
    ensemble = Ensemble.open(folders)
    ranker = ensemble if len(folders) > 1 else ensemble.runs[0]
    lists = ranker.read(data, split=split)
    whole = Path(data).is_file() or (Path(data) / MANIFEST).exists()
    values = ranker.evaluate(lists, tuple(dict.fromkeys(metrics)) or None)
    seen = any(run.config.data.path in (data, os.path.abspath(data)) for run in ensemble.runs)  # synthetic is no path
    return {
        **({"runs": [str(folder) for folder in folders], "ensemble": ENSEMBLE} if len(folders) > 1 else {}),
        **({"run": str(folders[0])} if len(folders) == 1 else {}),
        "data": data,
        "queries": len(lists),
        "empty_queries": lists.describe().empty_queries,
        "metrics": {
            name: {rule: with_interval(of_queries, empty) for rule, empty in EMPTY.items()}
            for name, of_queries in values.items()
        },
        "trained_on": seen and (whole or split == "train"),
        "interval": LEVEL,
        "convention": CONVENTION,
    }


def with_interval(values: np.ndarray, empty: float) -> dict[str, float]:
    """The mean of per-query values [Q] with NaN counted as `empty`, and its bootstrap interval; NaN if nothing counts."""
    counted = np.where(np.isnan(values), empty, values)
    counted = counted[~np.isnan(counted)]
    if not len(counted):
        return dict.fromkeys(("mean", "low", "high"), math.nan)
    low, high = bootstrap_interval(counted, rounds=ROUNDS)
    return {"mean": float(counted.mean()), "low": low, "high": high}


def describe_judgement(result: Mapping[str, Any]) -> str:
    """What `judge_runs` found, as a table and the conventions behind it."""
    rows = [("metric", "empty queries", "mean", f"{LEVEL:.0%} interval")]
    for name, rules in result["metrics"].items():
        rows += [(name if rule == "empty=1" else "", words, *_interval(rules[rule])) for rule, words in RULES.items()]
    together = f"{len(result['runs'])} runs together: {ENSEMBLE}\n" if "runs" in result else ""
    return (
        f"{table(rows)}\n{together}"
        f"{_queries(result['queries'])}, {result['empty_queries']:,} of them empty (no relevant document)\n{CONVENTION}"
        + ("\nthe model was trained on lists among these: expect less of it on others" if result["trained_on"] else "")
    )


def _queries(number: int) -> str:
    return f"{number:,} {'query' if number == 1 else 'queries'}"


def _interval(found: Mapping[str, float]) -> tuple[str, str]:
    if math.isnan(found["mean"]):
        return _four(None), ""
    return f"{found['mean']:.4f}", f"[{found['low']:.4f}, {found['high']:.4f}]"


def describe_report(report: Mapping[str, Any]) -> str:
    """The end of a training run: the metrics it was trained for, and where it is."""
    test = report["splits"].get("test")
    empty = test is not None and test["empty_queries"] == test["queries"]
    split = "vali" if test is None or empty else "test"
    why = {
        LAST_EPOCH: "was kept, as the last",
        FIRST_EPOCH: "was kept, as the first: no validation query has a relevant document to choose by",
    }.get(report["selection"], "was best on validation")
    return (
        f"{by_rule(report['metrics'][split])}\n"
        f"{split} split, {_queries(report['splits'][split]['queries'])}; "
        f"epoch {report['best_epoch']} of {report['epochs']} {why}\n"
        + ("the test split has no relevant document and says nothing of the model\n" if empty else "")
        + f"{CONVENTION}\n"
        f"{report['seconds']:.1f} s; the run is in {report['run']}"
    )


def by_rule(metrics: Mapping[str, Mapping[str, float | None]]) -> str:
    """Means of metrics under the three rules for empty queries, as a report holds them.

    >>> print(by_rule({"map": {"empty=1": 0.75, "empty=0": 0.25, "skipped": 0.5}}))
    empty queries  count 1  count 0  left out
    map             0.7500   0.2500    0.5000
    """
    header = ("empty queries", *RULES.values())
    return table([header, *((name, *(_four(means[rule]) for rule in RULES)) for name, means in metrics.items())])


def _four(mean: float | None) -> str:
    return "none" if mean is None else f"{mean:.4f}"  # JSON has no NaN: there was nothing to take the mean of


def compare_runs(a: Path, b: Path, metric: str) -> dict[str, Any]:
    """Two runs on the queries both were judged on; empty queries are left out."""
    of_a, of_b = left_by(a), left_by(b)
    expect_same_queries(a, of_a, b, of_b)
    values_a, values_b = of_a.metrics, of_b.metrics
    common = [name for name in values_a if name in values_b]
    if metric not in common:
        raise ValueError(
            f"the two runs do not both hold {metric!r}; expected one of {', '.join(common)}; choose with --metric"
        )
    left_out = int(np.isnan(values_a[metric]).sum())
    if left_out == len(values_a[metric]):
        raise ValueError(
            f"no {of_a.split} query of {a} and {b} has a relevant document, so that no ranking is better than another; expected "
            "queries to compare by; train on lists with labels above 0 there"
        )
    found = dataclasses.asdict(compare(values_a[metric], values_b[metric]))
    return {"a": str(a), "b": str(b), "metric": metric, "split": of_a.split, **found, "empty_queries": left_out}


def left_by(folder: Path) -> Judged:
    """What a finished run left of its queries."""
    if not (folder / "report.json").is_file():
        state = "has not finished" if (folder / "config.toml").is_file() else "is not a run"
        raise ValueError(f"{folder} {state}: it has no report.json; expected a folder that `rankgrad train` finished")
    return kept(folder)


def expect_same_queries(a: Path, of_a: Judged, b: Path, of_b: Judged) -> None:
    """Only runs judged on the same queries of the same split can be set against each other."""
    if of_a.split != of_b.split or of_a.query_ids != of_b.query_ids:
        raise ValueError(
            f"{a} was judged on {len(of_a.query_ids)} {of_a.split} queries and {b} on {len(of_b.query_ids)} {of_b.split} "
            "queries, which are not the same; expected two runs on the same data; train one of them again"
        )


def describe_comparison(found: Mapping[str, Any]) -> str:
    """What `compare_runs` found, in a few lines."""
    return (
        f"{found['metric']} on the {found['split']} split, {_queries(found['queries'])} "
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
                f"the query id {query!r} cannot stand in a TREC run file; expected text without spaces; use --format scores"
            )
        best_first = start + np.argsort(-scores[start:stop], kind="stable")
        ranked = zip(rows[best_first].tolist(), scores[best_first].tolist())
        lines += [f"{query} Q0 {row + 1} {place} {score:.9g} {tag}\n" for place, (row, score) in enumerate(ranked, 1)]
    return lines


FORMATS = {"scores": as_scores, "trec": as_trec}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under a header as aligned text: the first column to the left, the others to the right.

    >>> print(table([("metric", "mean"), ("ndcg@10", "0.5000"), ("map", "0.25")]))
    metric     mean
    ndcg@10  0.5000
    map        0.25
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def as_json(value: Any) -> str:
    """JSON that every parser takes: what is not a number is null.

    >>> print(as_json([math.nan, 0.5]))
    [
      null,
      0.5
    ]
    """
    return json.dumps(_nullable(value), indent=2, allow_nan=False)


def _nullable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _nullable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nullable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
