"""The runs of a report: what their folders say, as entries that stand for one run or for several taken together.

Reads run folders, writes nothing. Whatever a folder holds is data: numbers are checked, words are only ever shown.
"""

import json
import math
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.runs.compare import expect_same_queries, left_by
from rankgrad.runs.folder import Judged


@dataclass(frozen=True)
class Training:
    """The curves of one run, by epoch, NaN where there is no number; no epochs if the run kept none."""

    loss: str
    metric: str
    epochs: list[int]
    losses: list[float]
    metrics: list[float]  # on the validation split
    best_epoch: int | None


@dataclass(frozen=True)
class Entry:
    """A row of the report: a run, or several (seeds, folds) whose per-query values are averaged and joined."""

    name: str
    judged: Judged
    trainings: list[Training]
    facts: dict[str, str]  # provenance in words, "" where a folder does not say


def read_entries(folders: Sequence[Path], only: Collection[Path] | None = None) -> list[Entry]:
    """An entry for each folder; refuses unfinished runs and runs that were not judged on the same queries."""
    if not folders:
        raise ValueError("there is nothing to report; expected at least one folder of a finished run")
    entries = [_read(folder, name, only) for folder, name in zip(folders, names(folders))]
    for entry, folder in zip(entries[1:], folders[1:]):
        expect_same_queries(folders[0], entries[0].judged, folder, entry.judged)
        _expect_same_empty(folders[0], entries[0].judged, folder, entry.judged)
    return [replace(entry, judged=judged) for entry, judged in zip(entries, _alike([e.judged for e in entries]))]


def _alike(left: Sequence[Judged]) -> list[Judged]:
    """The same with the metrics all of them hold, NDCG@10 among them if there is no other NDCG and all kept it by k.

    Lengths and relevant documents belong to the queries: a run that kept them speaks for an older one that did not.
    """
    common = _common([judged.metrics for judged in left])
    metrics = [{name: judged.metrics[name] for name in common} for judged in left]
    if not any(name.startswith("ndcg") for name in common) and all(10 in judged.curve for judged in left):
        metrics = [{"ndcg@10": judged.curve[10].astype(np.float64), **own} for judged, own in zip(left, metrics)]
    if not metrics[0]:
        raise ValueError(
            "the runs have no metric in common; expected at least one, such as ndcg@10; train with equal train.metrics"
        )
    source = next((judged for judged in left if judged.documents is not None), left[0])
    return [
        replace(judged, metrics=own, documents=source.documents, relevant=source.relevant)
        for judged, own in zip(left, metrics)
    ]


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    >>> names([Path("/runs/a/seed1"), Path("/runs/b/seed1")])
    ['a/seed1', 'b/seed1']
    """
    parts = [folder.resolve().parts for folder in folders]
    twice = next((folder for folder, own in zip(folders, parts) if parts.count(own) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; expected different runs; leave one out")
    for depth in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(own[-depth:]) for own in parts]
        if len(set(ends)) == len(ends):
            break
    return ends


def _read(folder: Path, name: str, only: Collection[Path] | None) -> Entry:
    """A run, or all runs below a folder that is none itself, or those of them that `only` names."""
    found = {path.parent for word in ("config.toml", "report.json") for path in folder.rglob(word)}
    found = found if only is None else found & set(only)
    runs = [folder] if folder in found or not found else sorted(found)
    left = [left_by(run) for run in runs]  # says what is wrong with a folder that is no finished run
    reports = [_report(run) for run in runs]
    configs = [_config(run) for run in runs]
    told = [_facts(report, config) for report, config in zip(reports, configs)]
    for kind in ("loss", "model"):
        if len({facts[kind] for facts in told}) > 1:
            raise ValueError(
                f"the runs below {folder} differ in their {kind} ({_joined([facts[kind] for facts in told])}); expected seeds or "
                f"folds of one; name the folders in it instead: {folder}/*"
            )
    return Entry(
        name=name,
        judged=_together(runs, left),
        trainings=[_training(*of) for of in zip(runs, reports, configs)],
        facts={key: _joined([facts[key] for facts in told]) for key in told[0]},
    )


def _together(runs: Sequence[Path], left: Sequence[Judged]) -> Judged:
    """The mean over runs on the same queries, joined over sets of queries, in an order that the paths do not decide."""
    by_queries: dict[tuple[str, ...], list[tuple[Path, Judged]]] = {}
    for run, judged in zip(runs, left):
        if judged.split != left[0].split:
            raise ValueError(
                f"{runs[0]} was judged on its {left[0].split} split and {run} on its {judged.split} split; "
                "expected runs to take together that have the same splits"
            )
        by_queries.setdefault(tuple(map(str, judged.query_ids)), []).append((run, judged))
    parts = []
    for _, same in sorted(by_queries.items()):
        for run, judged in same[1:]:
            _expect_same_empty(same[0][0], same[0][1], run, judged)
        parts.append(_mean([judged for _, judged in same]))
    return parts[0] if len(parts) == 1 else _chain(parts)


def _mean(left: Sequence[Judged]) -> Judged:
    def mean(of: Callable[[Judged], Mapping[Any, np.ndarray]]) -> dict[Any, np.ndarray]:
        return {key: np.mean([of(judged)[key] for judged in left], 0) for key in _common([of(j) for j in left])}

    return replace(left[0], metrics=mean(lambda judged: judged.metrics), curve=mean(lambda judged: judged.curve))


def _chain(parts: Sequence[Judged]) -> Judged:
    def chain(of: Callable[[Judged], Mapping[Any, np.ndarray]]) -> dict[Any, np.ndarray]:
        return {key: np.concatenate([of(part)[key] for part in parts]) for key in _common([of(p) for p in parts])}

    def counts(of: Callable[[Judged], np.ndarray | None]) -> np.ndarray | None:
        known = [array for part in parts if (array := of(part)) is not None]
        return np.concatenate(known) if len(known) == len(parts) else None

    return Judged(
        split=parts[0].split,
        query_ids=[query for part in parts for query in part.query_ids],
        metrics=chain(lambda part: part.metrics),
        documents=counts(lambda part: part.documents),
        relevant=counts(lambda part: part.relevant),
        curve=chain(lambda part: part.curve),
    )


def _common(tables: Sequence[Mapping[Any, Any]]) -> list[Any]:
    return [key for key in tables[0] if all(key in table for table in tables)]


def _expect_same_empty(a: Path, of_a: Judged, b: Path, of_b: Judged) -> None:
    for name in _common([of_a.metrics, of_b.metrics]):
        if not np.array_equal(np.isnan(of_a.metrics[name]), np.isnan(of_b.metrics[name])):
            raise ValueError(
                f"{a} and {b} do not agree which queries have a relevant document; expected runs judged on the same labels; "
                "train one of them again"
            )


# --- what the files say -----------------------------------------------------------------------------------------------


def _report(run: Path) -> dict[str, Any]:
    try:
        report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    except ValueError:
        report = None
    if not isinstance(report, dict):
        raise ValueError(f"{run / 'report.json'} is damaged; expected what `rankgrad train` wrote; train the run again")
    return report


def _config(run: Path) -> dict[str, Any]:
    """The configuration as it stands: keys of other versions are no reason to refuse a report."""
    file = run / "config.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is not TOML ({error}); expected it as training wrote it; was it changed?") from None


def _training(run: Path, report: Mapping[str, Any], config: Mapping[str, Any]) -> Training:
    file = run / "history.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        told = [json.loads(line) for line in lines]
        epochs = [int(line["epoch"]) for line in told]
        losses, metrics = ([_number(line.get(key)) for line in told] for key in ("loss", "metric"))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{file} is damaged; expected a JSON object per epoch; remove it to do without") from None
    metric = str(config.get("train", {}).get("metric", "metric"))
    return Training(_loss(report, config), metric, epochs, losses, metrics, report.get("best_epoch"))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _loss(report: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    options = config.get("loss", {}).get("options", {})
    name = str(report.get("loss", config.get("loss", {}).get("name", "")))
    return f"{name} ({', '.join(f'{key} = {value}' for key, value in options.items())})" if options else name


def _facts(report: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Where a run comes from, in words; keys are headings."""
    model, data = config.get("model", {}), config.get("data", {})
    sizes = {
        "transformer": ("width", "layers", "heads", "feedforward", "dropout"),
        "mlp": ("hidden", "dropout"),
    }.get(str(model.get("kind")), ())
    best, epochs = report.get("best_epoch"), report.get("epochs")
    machine, versions = report.get("machine", {}), report.get("versions", {})
    return {
        "loss": _loss(report, config),
        "model": ", ".join([str(model.get("kind", "")), *(f"{key} {model[key]}" for key in sizes if key in model)]),
        "seed": _word(report.get("seed")),
        "epoch kept": "" if best is None else f"{best} of {epochs}",
        "seconds": "" if report.get("seconds") is None else f"{report['seconds']:.1f}",
        "data": _word(report.get("data")),
        "fold": _word(data.get("fold")),
        "queries": ", ".join(
            f"{split} {counts.get('queries', 0):,} ({counts.get('empty_queries', 0):,} empty)"
            for split, counts in report.get("splits", {}).items()
        ),
        "convention": _word(report.get("convention")),
        "commit": _word(report.get("commit")),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "machine": ", ".join(f"{name} {value}" for name, value in machine.items() if value not in (None, "")),
        "processes": _word(report.get("processes")),
    }


def _word(value: Any) -> str:
    return "" if value is None else str(value)


def _joined(values: Sequence[str]) -> str:
    different = list(dict.fromkeys(filter(None, values)))
    more = f" and {len(different) - 8} more" if len(different) > 8 else ""
    return "; ".join(different[:8]) + more
