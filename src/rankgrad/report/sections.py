"""The sections of a report: each figure with its caption and its numbers, or a sentence that says what is missing."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rankgrad.report import figures, numbers
from rankgrad.report.gather import Entry, Training
from rankgrad.report.numbers import Contest, Interval

OLD = "written by an older rankgrad or by another program; train again to see more here"
NOTHING = "No query has a relevant document, so there is nothing to draw."
QUANTILES = (5, 25, 50, 75, 95)
HYPER_PARAMETERS = (
    ("lr", "learning rate", True),
    ("dropout", "dropout", False),
    ("weight_decay", "weight decay", True),
)


class Panel(NamedTuple):
    """A figure: its caption, a description for those who do not see it, and its numbers as a table."""

    title: str
    svg: str
    caption: str
    label: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Table(NamedTuple):
    """A table of its own."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    """Panels under a heading; `note` says what is missing."""

    title: str
    intro: str
    panels: list[Panel]
    note: str = ""
    key: Sequence[str] = ()  # what colours mean here, where they are not the runs'
    table: Table | None = None  # below the figures


def make_sections(entries: Sequence[Entry], metric: str, contests: Sequence[Contest]) -> list[Section]:
    """All sections, in the order of the page."""
    values = [entry.per_query.metrics[metric] for entry in entries]
    last = _distribution(values[0], metric) if len(entries) == 1 else _differences(entries, contests, metric)
    members = [_members(entries)] if any(entry.members for entry in entries) else []
    return [_training(entries), *members, _by_cutoff(entries), _by_count(entries, values, metric), last]


def _training(entries: Sequence[Entry]) -> Section:
    runs = [(index, run) for index, entry in enumerate(entries) for run in entry.trainings if run.epochs]
    panels = []
    for metric in dict.fromkeys(run.metric for _, run in runs):
        own = [(index, run) for index, run in runs if run.metric == metric and np.isfinite(run.metrics).any()]
        if own:
            svg = figures.training(own, "metrics", f"validation {metric}")
            panels.append(_curves(entries, own, "metrics", f"Validation {metric}", svg))
    for loss in dict.fromkeys(run.loss for _, run in runs):
        own = [(index, run) for index, run in runs if run.loss == loss and np.isfinite(run.losses).any()]
        if own:
            svg = figures.training(own, "losses", "training loss")
            panels.append(_curves(entries, own, "losses", f"Loss: {loss}", svg))
    without = [entry.name for entry in entries if not any(run.epochs for run in entry.trainings)]
    intro = (
        "A line per run. The dot is the epoch whose weights were kept. "
        "Different losses are measured in different units and have a figure each."
    )
    note = f"No training history was kept by: {', '.join(without)}." if without else ""
    return Section("Training", intro if panels else "", panels, note)


def _curves(entries: Sequence[Entry], runs: Sequence[tuple[int, Training]], which: str, title: str, svg: str) -> Panel:
    rows = []
    for index, run in runs:
        heights: list[float] = getattr(run, which)
        best = dict(zip(run.epochs, heights)).get(run.best_epoch or 0, np.nan)
        kept = "–" if run.best_epoch is None else str(run.best_epoch)
        rows.append((entries[index].name, format_mean(heights[0]), kept, format_mean(best), format_mean(heights[-1])))
    description = "; ".join(f"{row[0]} {row[3]} at epoch {row[2]}, which was kept" for row in rows)
    head = ("run", "first epoch", "epoch kept", "value there", "last epoch")
    return Panel(title, svg, "", f"{title} by epoch: {description}.", head, rows)


def _members(entries: Sequence[Entry]) -> Section:
    """What was kept of the networks trained at once, and why: each hyper-parameter against validation."""
    having = [entry for entry in entries if entry.members]
    losses = list(dict.fromkeys(own.loss for entry in having for run in entry.members for own in run.members))
    panels, notes = [], []
    for entry in having:
        of = f" of {entry.name}" if len(entries) > 1 else ""
        for run in entry.members:
            kept, dropped = (sum(getattr(own, name) for own in run.members) for name in ("kept", "dropped"))
            notes.append(
                f"{kept} of {len(run.members)} members{of} were kept{f', {dropped} diverged' if dropped else ''}; validation "
                f"{run.metric} of the average {format_mean(run.average)}, best member {format_mean(run.best)}."
            )
        panels += [_hyper_parameter(entry, losses, *what, of) for what in HYPER_PARAMETERS]
    intro = (
        "Networks trained at once, a point for each: full if it was kept, hollow if not. Colours and shapes are losses."
    )
    return Section(
        "Members", intro, [panel for panel in panels if panel.rows], " ".join(notes), losses, _kept_members(having)
    )


def _hyper_parameter(entry: Entry, losses: Sequence[str], name: str, words: str, log: bool, of: str) -> Panel:
    metric = entry.members[0].metric
    members = [own for run in entry.members for own in run.members if not own.dropped]
    members = [own for own in members if np.isfinite([getattr(own, name), own.validation]).all()]
    members = [own for own in members if not log or getattr(own, name) > 0]
    points = [(losses.index(own.loss), getattr(own, name), own.validation, own.kept) for own in members]
    rows = [
        (own.number, own.loss, f"{getattr(own, name):.3g}", format_mean(own.validation), "kept" if own.kept else "")
        for own in members
    ]
    kept = [getattr(own, name) for own in members if own.kept]
    span = f"those kept from {min(kept):.2g} to {max(kept):.2g}" if kept else "none was kept"
    title = f"Validation {metric} by {words}{of}"
    svg = figures.members(points, words, f"validation {metric}", log=log)
    head = ("member", "loss", words, f"validation {metric}", "kept")
    return Panel(title, svg, "", f"{title}: {len(members)} members, {span}.", head, rows)


def _kept_members(entries: Sequence[Entry]) -> Table:
    """The members that are averaged, the best first."""
    metric = entries[0].members[0].metric
    rows = [
        (
            f"{own.number} of {entry.name}" if len(entries) > 1 else own.number,
            own.loss,
            f"{own.lr:.2g}",
            f"{own.dropout:.2f}",
            f"{own.weight_decay:.2g}",
            own.epoch,
            format_mean(own.validation),
        )
        for entry in entries
        for run in entry.members
        for own in sorted(run.members, key=lambda member: -np.nan_to_num(member.validation))
        if own.kept
    ]
    head = ("member", "loss", "learning rate", "dropout", "weight decay", "epoch", f"validation {metric}")
    return Table("Members kept", head, rows)


def _by_cutoff(entries: Sequence[Entry]) -> Section:
    curves = [(index, curve) for index, entry in enumerate(entries) if (curve := numbers.curve(entry))]
    without = [entry.name for entry in entries if not entry.per_query.curve]
    note = _missing(without, "no NDCG by cut-off") if curves or len(without) == len(entries) else NOTHING
    panels = []
    if curves:
        panels.append(_cutoffs(entries, curves, "NDCG@k", format_mean))
        first = curves[0][1]
        apart = [(index, {k: curve[k] - first[k] for k in curve if k in first}) for index, curve in curves[1:]]
        if apart:
            name = entries[curves[0][0]].name
            panels.append(
                _cutoffs(entries, apart, f"NDCG@k minus that of {name}", format_difference, "difference in NDCG@k")
            )
    intro = "The mean over queries with a relevant document, by how far down the ranking is evaluated."
    return Section("NDCG@k against k", intro if panels else "", panels, note)


def _cutoffs(
    entries: Sequence[Entry],
    curves: Sequence[tuple[int, dict[int, float]]],
    title: str,
    form: Callable[[float], str],
    axis: str = "",
) -> Panel:
    names = [entries[index].name for index, _ in curves]
    ks = list(curves[0][1])
    rows = [(str(k), *(form(curve.get(k, np.nan)) for _, curve in curves)) for k in ks]
    description = "; ".join(
        f"{name} {form(curve[ks[0]])} at {ks[0]} and {form(curve[ks[-1]])} at {ks[-1]}"
        for name, (_, curve) in zip(names, curves)
    )
    svg = figures.by_cutoff(curves, axis or title)
    return Panel(title, svg, "", f"{title}: {description}.", ("k", *names), rows)


def _by_count(entries: Sequence[Entry], values: Sequence[np.ndarray], metric: str) -> Section:
    title, queries = f"{metric} by kind of query", entries[0].per_query
    if queries.documents is None or queries.relevant is None:
        return Section(title, "", [], _missing([entry.name for entry in entries], "no list lengths"))
    panels = []
    for what, counts in (("documents in the list", queries.documents), ("relevant documents", queries.relevant)):
        bins = numbers.by_count(counts, values)
        if bins:
            rows = [(found.label, f"{found.queries:,}", *map(_mean_and_interval, found.means)) for found in bins]
            description = "; ".join(
                f"{found.label}: {', '.join(format_mean(own.mean) for own in found.means)}" for found in bins
            )
            head = (what, "queries", *(entry.name for entry in entries))
            panels.append(
                Panel(
                    f"By {what}",
                    figures.by_count(bins, what, metric),
                    "",
                    f"{metric} by {what}: {description}.",
                    head,
                    rows,
                )
            )
    intro = "Queries in groups of about equal size" + (
        ", with 95 % intervals of the means." if len(entries) <= 4 else "; intervals are in the numbers below."
    )
    return Section(title, intro, panels) if panels else Section(title, "", [], NOTHING)


def _differences(entries: Sequence[Entry], contests: Sequence[Contest], metric: str) -> Section:
    first, panels = entries[0].name, []
    for contest in contests:
        name, result = entries[contest.index].name, contest.result
        tied = f"; {result.ties:,} tied and not drawn" if result.ties else ""
        caption = f"{name} is better on {result.wins:,} queries, {first} on {result.losses:,}{tied}."
        rows = [(f"{q} %", format_difference(float(np.percentile(contest.differences, q)))) for q in QUANTILES]
        svg = figures.differences(contest, metric)
        panels.append(Panel(name, svg, caption, caption, ("percentile", "difference"), rows))
    intro = (
        f"{metric} of each run minus that of {first}, query by query; a bar has the colour of the run that is better."
    )
    return Section("Differences per query", intro if panels else "", panels, "" if panels else NOTHING)


def _distribution(values: np.ndarray, metric: str) -> Section:
    known = values[np.isfinite(values)]
    title = f"{metric} per query"
    if not len(known):
        return Section(title, "", [], NOTHING)
    rows = [(f"{q} %", format_mean(float(np.percentile(known, q)))) for q in QUANTILES]
    description = "; ".join(f"{q} of the queries are at or below {value}" for q, value in rows)
    svg = figures.distribution(values, metric)
    return Section(
        title, "", [Panel("How many queries reach how much", svg, "", f"{description}.", ("percentile", metric), rows)]
    )


def _missing(names: Iterable[str], what: str) -> str:
    named = ", ".join(names)
    return f"There is {what} for: {named} ({OLD})." if named else ""


def _mean_and_interval(found: Interval) -> str:
    return f"{format_mean(found.mean)} [{format_mean(found.low)}, {format_mean(found.high)}]"


def format_mean(value: float, sign: str = "") -> str:
    """Four decimals, as everywhere in rankgrad; a dash for NaN."""
    return "–" if np.isnan(value) else f"{value:{sign}.4f}".replace("-", "−")


def format_difference(value: float) -> str:
    """The same with its sign."""
    return format_mean(value, "+")
