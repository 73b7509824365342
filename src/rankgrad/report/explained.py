"""Explanations of runs as tables whose rows have bars: names stand in HTML, so that none can break a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rankgrad.explain.explanation import Explained, Explanation, Missed
from rankgrad.explain.importance import Importance
from rankgrad.report.gather import Entry
from rankgrad.report.sections import format_difference, format_mean

SHOWN = 15  # rows with a bar; the others are numbers in a table that opens
LARGE = 0.05  # a remainder, as a share of the difference
LIKE = 3  # names of a group that are shown

WITHIN, ACROSS, UP, DOWN = "c0", "c1", "c2", "c1"  # colours of the page


class Line(NamedTuple):
    """One line of a picture on a scale from 0 to 100: from low to high, with a mark at the mean if it is an interval."""

    colour: str
    low: float
    high: float
    mark: float | None = None


class Row(NamedTuple):
    """A name, its lines, and its numbers by the heads of the table: each with what stands small below it."""

    name: str
    lines: Sequence[Line]
    cells: Sequence[tuple[str, str]]


class BarTable(NamedTuple):
    """A picture with its numbers."""

    title: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Row]
    zero: float  # where 0 stands from 0 to 100
    rest: Sequence[Row]  # without lines
    key: Sequence[tuple[str, str]] = ()  # what colours mean


class Part(NamedTuple):
    """What the ranking of one entry rests on."""

    title: str
    intro: str
    tables: Sequence[BarTable]
    note: str


def explained_parts(entries: Sequence[Entry]) -> list[Part]:
    """A part for every entry that was explained."""
    return [
        _part(entry.explanation, "" if len(entries) == 1 else f" of {entry.name}")
        for entry in entries
        if entry.explanation is not None
    ]


def _part(found: Explanation, of: str) -> Part:
    source = Path(found.data).name if Path(found.data).is_absolute() else found.data
    intro = (
        f"On the {found.split} lists of {source}: {found.metric} is {format_mean(found.value)} over {found.queries:,} queries "
        f"with a relevant document. What it loses where the values of a feature are dealt out anew, {found.repeats} times: among "
        "the documents of each list (within), and among all documents (across)."
    )
    tables = [_missed(f"Features{of}", "", found.features)]
    if found.groups:
        caption = (
            f"Features whose ranks within lists are correlated by {found.correlated:g} or more, permuted together: of two that "
            "say the same, neither is missed alone."
        )
        tables.append(_missed(f"Groups of features{of}", caption, found.groups))
    tables += [_attributed(example) for example in found.examples]
    return Part(f"What the ranking{of} rests on", intro, tables, found.note)


def _missed(title: str, caption: str, missed: Sequence[Missed]) -> BarTable:
    ends = [0.0, *(end for one in missed for of in (one.within, one.across) for end in (of.low, of.high))]
    scale = _Scale(ends)
    rows = []
    for one in missed:
        lines = [
            Line(colour, scale(of.low), scale(of.high), scale(of.loss))
            for colour, of in ((WITHIN, one.within), (ACROSS, one.across))
            if np.isfinite([of.low, of.high, of.loss]).all()
        ]
        cells = [(format_mean(of.loss), _interval(of)) for of in (one.within, one.across)]
        more = f" and {len(one.features) - LIKE} more" if len(one.features) > LIKE else ""
        rows.append(Row(", ".join(one.features[:LIKE]) + more, lines, cells))
    key = [("within lists", WITHIN), ("across lists", ACROSS)]
    return BarTable(title, caption, ("within", "across"), rows[:SHOWN], scale(0.0), rows[SHOWN:], key)


def _attributed(example: Explained) -> BarTable:
    own = example.attribution
    by_size = sorted(own.contributions, key=lambda one: -abs(np.nan_to_num(one.amount)))
    scale = _Scale([0.0, *(one.amount for one in by_size)])
    rows = []
    for one in by_size:
        ends = sorted((scale(0.0), scale(one.amount)))
        lines = [Line(UP if one.amount > 0 else DOWN, *ends)] if np.isfinite(one.amount) else []
        rows.append(
            Row(
                one.feature,
                lines,
                [(format_difference(one.amount), ""), *(_value(x) for x in (one.value, one.reference))],
            )
        )
    if example.against:
        title = f"Why document {example.document} stands {_side(example)} {example.against}"
        beside, other = f"that of document {example.against}, place {example.against_place},", "other's value"
    else:
        title = f"Document {example.document} against its list's mean"
        beside, other = "that of a document with the list's mean features in its place,", "list's mean"
    remainder = f"{own.remainder:+.1g}".replace("-", "−")
    caption = (
        f"Query {example.query}, place {example.place}. Its score {format_mean(own.score)} less {beside} {format_mean(own.reference)}, "
        f"is {format_difference(own.score - own.reference)}: the sum of what the features give, and a remainder of {remainder}."
    )
    if abs(own.remainder) > LARGE * abs(own.score - own.reference):
        caption += " The remainder is large: the score jumps on the way, as in lists of very few documents."
    return BarTable(title, caption, ("gives", "value", other), rows[:SHOWN], scale(0.0), rows[SHOWN:])


def _interval(of: Importance) -> str:
    return "" if np.isnan([of.low, of.high]).any() else f"{of.low:.3f} to {of.high:.3f}".replace("-", "−")


def _side(example: Explained) -> str:
    return "above" if example.place < example.against_place else "below"


def _value(number: float | str) -> tuple[str, str]:
    if isinstance(number, str):
        return number, ""
    return ("missing" if np.isnan(number) else f"{number:.4g}".replace("-", "−"), "")


class _Scale:
    """Numbers to places from 2 to 98."""

    def __init__(self, ends: Sequence[float]) -> None:
        known = [end for end in ends if np.isfinite(end)]
        self.low, self.high = min(known), max(known)

    def __call__(self, number: float) -> float:
        return 50.0 if self.high <= self.low else round(2 + 96 * (number - self.low) / (self.high - self.low), 2)
