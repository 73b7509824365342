"""Finished runs set against lists and against each other, as plain values: metrics with intervals, paired comparisons."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.folder import MANIFEST
from rankgrad.data.load import read_lists
from rankgrad.runs.elsewhere import keep_scores, read_scores
from rankgrad.runs.ensemble import Ensemble, Network
from rankgrad.runs.folder import PerQuery, convention_of, is_run, read_per_query
from rankgrad.runs.significance import LEVEL, bootstrap_interval, compare
from rankgrad.training.config import configure
from rankgrad.training.data import columns_of
from rankgrad.training.evaluate import RULES

ENSEMBLE = "mean of scores standardised within each list"
ROUNDS = 2_000  # of the bootstrap: an interval's ends are good to a twentieth of its width


def evaluate_runs(
    folders: Sequence[Path],
    data: str,
    split: str,
    metrics: Sequence[str],
    networks: Sequence[Network] = (),
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Metrics of a run, or of several together, on data, under every rule for empty queries: mean and interval.

    `networks` are those of one's own that the runs were trained with; `settings` say how the data is read, see `ScoringRun`.
    """
    ensemble = Ensemble.open(folders, networks)
    ranker = ensemble if len(folders) > 1 else ensemble.runs[0]
    lists = ranker.read(data, split=split, settings=settings)
    whole = Path(data).is_file() or (Path(data) / MANIFEST).exists()
    values = ranker.evaluate(lists, tuple(dict.fromkeys(metrics)) or None)
    seen = any(run.config.data.path in (data, os.path.abspath(data)) for run in ensemble.runs)  # synthetic is no path
    return {
        **({"runs": [str(folder) for folder in folders], "ensemble": ENSEMBLE} if len(folders) > 1 else {}),
        **({"run": str(folders[0])} if len(folders) == 1 else {}),
        **_described(data, lists, values, ensemble.runs[0].config.data.gain),
        "trained_on": seen and (whole or split == "train"),
    }


def evaluate_scores(
    file: Path,
    data: str,
    split: str,
    metrics: Sequence[str],
    *,
    name: str = "",
    out: Path | None = None,
    settings: Sequence[str] = (),
    overwrite: bool = False,
) -> dict[str, Any]:
    """Metrics of scores from elsewhere on data, which are kept in the folder `out` (runs/NAME) like those of a run."""
    name = name or file.name.partition(".")[0]
    if not name.strip() or not name.isprintable() or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} cannot name a ranker; expected a word such as lightgbm; choose another --name")
    if is_run(data):
        raise ValueError(f"{data} is a run; expected DATA, the lists that were scored; name them last")
    others = [setting for setting in settings if not setting.strip().startswith("data.")]
    if others:
        raise ValueError(
            f"--set {others[0]} is not about the lists; expected a key of [data], such as --set data.qid=query"
        )
    config = configure(data, {}, settings).data
    columns = columns_of(config)._replace(weight=None, document_weight=None)
    lists = read_lists(data, split=split, fold=config.fold, columns=columns)
    folder = out or Path("runs") / name
    values = keep_scores(
        folder,
        name,
        read_scores(file, lists, qid=config.qid, document=config.document),
        lists,
        split=split,
        metrics=metrics,
        source=data,
        overwrite=overwrite,
        gain=config.gain,
    )
    return {"name": name, "folder": str(folder), **_described(data, lists, values, config.gain), "trained_on": False}


def _described(data: str, lists: RankingDataset, values: dict[str, np.ndarray], gain: Any) -> dict[str, Any]:
    return {
        "data": data,
        "queries": len(lists),
        "empty_queries": lists.describe().empty_queries,
        "metrics": {
            name: {rule: with_interval(of_queries, empty) for rule, empty in RULES.items()}
            for name, of_queries in values.items()
        },
        "interval": LEVEL,
        "convention": convention_of(gain),
    }


def with_interval(values: np.ndarray, empty: float) -> dict[str, float]:
    """The mean of per-query values [Q] with NaN counted as `empty`, and its bootstrap interval; NaN if nothing counts."""
    counted = np.where(np.isnan(values), empty, values)
    counted = counted[~np.isnan(counted)]
    if not len(counted):
        return dict.fromkeys(("mean", "low", "high"), math.nan)
    low, high = bootstrap_interval(counted, rounds=ROUNDS)
    return {"mean": float(counted.mean()), "low": low, "high": high}


def compare_runs(a: Path, b: Path, metric: str) -> dict[str, Any]:
    """Two runs on the queries both were judged on; empty queries are left out."""
    of_a, of_b = read_per_query(a), read_per_query(b)
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


def expect_same_queries(a: Path, of_a: PerQuery, b: Path, of_b: PerQuery) -> None:
    """Only runs judged on the same queries of the same split can be set against each other."""
    if of_a.split != of_b.split or of_a.query_ids != of_b.query_ids:
        raise ValueError(
            f"{a} was judged on {len(of_a.query_ids)} {of_a.split} queries and {b} on {len(of_b.query_ids)} {of_b.split} "
            "queries, which are not the same; expected two runs on the same data; train one of them again"
        )
