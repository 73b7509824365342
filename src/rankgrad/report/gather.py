"""The rows of a report: what run folders say, of one run or of several taken together.

Whatever a folder holds is data: numbers are checked, texts are only ever shown.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankgrad.explain.explanation import Explanation, read_explanation
from rankgrad.runs.compare import expect_same_queries
from rankgrad.runs.folder import (
    CONFIG,
    REPORT,
    PerDocument,
    PerQuery,
    read_config_table,
    read_history,
    read_per_document,
    read_per_query,
    read_report,
)


@dataclass(frozen=True)
class Training:
    """The curves of one run, by epoch, NaN where there is no number; no epochs if the run kept none."""

    loss: str
    metric: str
    epochs: list[int]
    losses: list[float]
    metrics: list[float]  # on the validation split
    best_epoch: int | None


class Member(NamedTuple):
    """One of the networks that a run trained at once: what it was dealt, and what became of it."""

    number: str
    loss: str
    lr: float
    dropout: float
    weight_decay: float
    epoch: str
    validation: float
    kept: bool
    dropped: bool


@dataclass(frozen=True)
class RunMembers:
    """The members of one run, and the validation of their average and of the best of them."""

    metric: str
    members: list[Member]
    average: float
    best: float


@dataclass(frozen=True)
class Entry:
    """A row of the report: a run, or several (seeds, folds) whose per-query values are averaged and joined."""

    name: str
    called: str  # what scores from elsewhere are called, "" of a run
    per_query: PerQuery
    trainings: list[Training]
    facts: dict[str, str]  # provenance as text, "" where a folder does not say
    sources: list[str]  # of its lists, as its runs say
    members: list[RunMembers]  # of the runs that have any
    per_document: PerDocument | None  # where it is one run that kept its scores
    explanation: Explanation | None  # where it is one run that was explained


def read_entries(
    folders: Sequence[Path], only: Collection[Path] | None = None, baseline: str | None = None
) -> list[Entry]:
    """An entry for each folder, the baseline first; refuses unfinished runs and runs not evaluated on the same queries."""
    if not folders:
        raise ValueError("there is nothing to report; expected at least one folder of a finished run")
    entries = [_read(folder, name, only) for folder, name in zip(folders, short_names(folders))]
    for entry, folder in zip(entries[1:], folders[1:]):
        expect_same_queries(folders[0], entries[0].per_query, folder, entry.per_query)
        _expect_same_empty(folders[0], entries[0].per_query, folder, entry.per_query)
    comparable = _with_common_metrics([entry.per_query for entry in entries])
    shown = _shown_sources([source for entry in entries for source in entry.sources])
    entries = [
        replace(
            entry, name=name, per_query=own, facts=entry.facts | {"data": _listed([shown[s] for s in entry.sources])}
        )
        for entry, name, own in zip(entries, _row_names(entries), comparable)
    ]
    if baseline is not None:
        entries.insert(0, entries.pop(_place_of(baseline, entries, folders)))
    return entries


def _row_names(entries: Sequence[Entry]) -> list[str]:
    """What scores from elsewhere are called, where no other row is called so; else the end of the path."""
    names = [entry.called or entry.name for entry in entries]
    return [name if names.count(name) == 1 else entry.name for name, entry in zip(names, entries)]


def _place_of(baseline: str, entries: Sequence[Entry], folders: Sequence[Path]) -> int:
    """Which row a person means: by its name in the report, or by its folder."""
    names = [entry.name for entry in entries]
    if names.count(baseline) == 1:
        return names.index(baseline)
    meant = Path(baseline).resolve()
    found = [at for at, folder in enumerate(folders) if folder.resolve() == meant or folder.resolve().name == baseline]
    if len(found) != 1:
        wrong = "is none of the runs" if not found else f"is {len(found)} of the runs"
        raise ValueError(f"the baseline {baseline} {wrong}; expected one of {', '.join(names)}; choose with --baseline")
    return found[0]


def _shown_sources(sources: Sequence[str]) -> dict[str, str]:
    """Where lists come from, as a page says it that is sent around: of a path the shortest end that tells it from the others."""
    paths = list(dict.fromkeys(source for source in sources if Path(source).is_absolute()))
    return {source: source for source in sources} | dict(zip(paths, _distinct_ends([Path(path) for path in paths])))


def _with_common_metrics(runs: Sequence[PerQuery]) -> list[PerQuery]:
    """The same with the metrics all of them have, NDCG@10 among them if there is no other NDCG and all have it by k.

    List lengths and relevant documents belong to the queries: an older run without them takes those of another run.
    """
    common = _common_keys([run.metrics for run in runs])
    metrics = [{name: run.metrics[name] for name in common} for run in runs]
    if not any(name.startswith("ndcg") for name in common) and all(10 in run.curve for run in runs):
        metrics = [{"ndcg@10": run.curve[10].astype(np.float64), **own} for run, own in zip(runs, metrics)]
    if not metrics[0]:
        raise ValueError(
            "the runs have no metric in common; expected at least one, such as ndcg@10; train with equal train.metrics"
        )
    source = next((run for run in runs if run.documents is not None), runs[0])
    return [
        replace(run, metrics=own, documents=source.documents, relevant=source.relevant)
        for run, own in zip(runs, metrics)
    ]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are all different.

    >>> short_names([Path("/runs/a/seed1"), Path("/runs/b/seed1")])
    ['a/seed1', 'b/seed1']
    """
    places = [folder.resolve() for folder in folders]
    twice = next((folder for folder, place in zip(folders, places) if places.count(place) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; expected different runs; leave one out")
    return _distinct_ends(places)


def _distinct_ends(paths: Sequence[Path]) -> list[str]:
    ends: list[str] = []
    parts = [path.relative_to(path.anchor).parts for path in paths]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        ends = ["/".join(own[-depth:]) for own in parts]
        if len(set(ends)) == len(ends):
            break
    return ends


def _read(folder: Path, name: str, only: Collection[Path] | None) -> Entry:
    """A run, or all runs below a folder that is none itself, or those of them that `only` names."""
    below = {path.parent for name in (CONFIG, REPORT) for path in folder.rglob(name)}
    below = below if only is None else below & set(only)
    runs = [folder] if folder in below or not below else sorted(below)
    per_query = [read_per_query(run) for run in runs]  # says what is wrong with a folder that is not a finished run
    reports = [read_report(run) for run in runs]
    configs = [read_config_table(run) for run in runs]
    facts = [_facts(report, config) for report, config in zip(reports, configs)]
    for kind in ("loss", "model"):
        if len({own[kind] for own in facts}) > 1:
            raise ValueError(
                f"the runs below {folder} differ in their {kind} ({_listed([own[kind] for own in facts])}); expected seeds "
                f"or folds of one; name the folders in it instead: {folder}/*"
            )
    return Entry(
        name=name,
        called=_text(reports[0].get("name")) if len(runs) == 1 else "",
        per_query=_combined(runs, per_query),
        trainings=[_training(*of) for of in zip(runs, reports, configs)],
        facts={key: _listed([own[key] for own in facts]) for key in facts[0]},
        sources=[_text(report.get("data")) for report in reports],
        members=[found for of in zip(reports, configs) if (found := _members(*of)).members],
        per_document=read_per_document(runs[0]) if len(runs) == 1 else None,
        explanation=read_explanation(runs[0]) if len(runs) == 1 else None,
    )


def _combined(folders: Sequence[Path], runs: Sequence[PerQuery]) -> PerQuery:
    """The mean over runs on the same queries, joined over sets of queries, in an order that the paths do not decide."""
    by_queries: dict[tuple[str, ...], list[tuple[Path, PerQuery]]] = {}
    for folder, run in zip(folders, runs):
        if run.split != runs[0].split:
            raise ValueError(
                f"{folders[0]} was evaluated on its {runs[0].split} split and {folder} on its {run.split} split; "
                "expected runs with the same splits to take together"
            )
        by_queries.setdefault(tuple(map(str, run.query_ids)), []).append((folder, run))
    parts = []
    for _, same in sorted(by_queries.items()):
        for folder, run in same[1:]:
            _expect_same_empty(*same[0], folder, run)
        parts.append(_mean_of_seeds([run for _, run in same]))
    return parts[0] if len(parts) == 1 else _joined_folds(parts)


def _mean_of_seeds(runs: Sequence[PerQuery]) -> PerQuery:
    def mean(tables: Sequence[Mapping[Any, np.ndarray]]) -> dict[Any, np.ndarray]:
        return {key: np.mean([table[key] for table in tables], 0) for key in _common_keys(tables)}

    return replace(runs[0], metrics=mean([run.metrics for run in runs]), curve=mean([run.curve for run in runs]))


def _joined_folds(parts: Sequence[PerQuery]) -> PerQuery:
    def joined(tables: Sequence[Mapping[Any, np.ndarray]]) -> dict[Any, np.ndarray]:
        return {key: np.concatenate([table[key] for table in tables]) for key in _common_keys(tables)}

    def counts(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
        known = [array for array in arrays if array is not None]
        return np.concatenate(known) if len(known) == len(arrays) else None

    return PerQuery(
        split=parts[0].split,
        query_ids=[query for part in parts for query in part.query_ids],
        metrics=joined([part.metrics for part in parts]),
        documents=counts([part.documents for part in parts]),
        relevant=counts([part.relevant for part in parts]),
        curve=joined([part.curve for part in parts]),
    )


def _common_keys(tables: Sequence[Mapping[Any, Any]]) -> list[Any]:
    return [key for key in tables[0] if all(key in table for table in tables)]


def _expect_same_empty(a: Path, of_a: PerQuery, b: Path, of_b: PerQuery) -> None:
    for name in _common_keys([of_a.metrics, of_b.metrics]):
        if not np.array_equal(np.isnan(of_a.metrics[name]), np.isnan(of_b.metrics[name])):
            raise ValueError(
                f"{a} and {b} do not agree which queries have a relevant document; expected runs evaluated on the same "
                "labels; train one of them again"
            )


def _training(run: Path, report: Mapping[str, Any], config: Mapping[str, Any]) -> Training:
    history = read_history(run)
    losses, metrics = ([_number(epoch.get(key)) for epoch in history] for key in ("loss", "metric"))
    epochs = [epoch["epoch"] for epoch in history]
    return Training(_loss(report, config), _metric(config), epochs, losses, metrics, report.get("best_epoch"))


def _members(report: Mapping[str, Any], config: Mapping[str, Any]) -> RunMembers:
    given = report.get("members")
    members = [
        Member(
            number=_text(own.get("member")),
            loss=_text(own.get("loss")),
            lr=_number(own.get("lr")),
            dropout=_number(own.get("dropout")),
            weight_decay=_number(own.get("weight_decay")),
            epoch=_text(own.get("best_epoch")),
            validation=_number(own.get("validation")),
            kept=own.get("kept") is True,
            dropped=own.get("dropped") is True,
        )
        for own in (given if isinstance(given, list) else [])
        if isinstance(own, Mapping)
    ]
    average, best = (_number(report.get(f"validation_of_{name}")) for name in ("average", "best"))
    return RunMembers(_metric(config), members, average, best)


def _metric(config: Mapping[str, Any]) -> str:
    return str(config.get("train", {}).get("metric", "metric"))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _loss(report: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    options = config.get("loss", {}).get("options", {})
    name = str(report.get("loss", config.get("loss", {}).get("name", "")))
    return f"{name} ({', '.join(f'{key} = {value}' for key, value in options.items())})" if options else name


def _facts(report: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Where a run comes from, as text by heading."""
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
        "seed": _text(report.get("seed")),
        "epoch kept": "" if best is None else f"{best} of {epochs}",
        "seconds": "" if report.get("seconds") is None else f"{report['seconds']:.1f}",
        "data": _text(report.get("data")),
        "fold": _text(data.get("fold")),
        "queries": ", ".join(
            f"{split} {counts.get('queries', 0):,} ({counts.get('empty_queries', 0):,} empty)"
            for split, counts in report.get("splits", {}).items()
        ),
        "convention": _text(report.get("convention")),
        "commit": _text(report.get("commit")),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "machine": ", ".join(f"{name} {value}" for name, value in machine.items() if value not in (None, "")),
        "processes": _text(report.get("processes")),
    }


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _listed(values: Sequence[str]) -> str:
    different = list(dict.fromkeys(filter(None, values)))
    more = f" and {len(different) - 8} more" if len(different) > 8 else ""
    return "; ".join(different[:8]) + more
