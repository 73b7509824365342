"""The page of a report: texts, tables and figures, given to the template."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from rankgrad.inert import inert
from rankgrad.report import numbers
from rankgrad.report.explained import explained_parts
from rankgrad.report.figures import Style, style_of
from rankgrad.report.gather import Entry, read_entries
from rankgrad.report.numbers import SIGNIFICANT, Interval, Row
from rankgrad.report.sections import Panel, Section, format_difference, format_mean, make_sections
from rankgrad.runs.folder import CONVENTION
from rankgrad.runs.significance import LEVEL
from rankgrad.runs.text import RULES

LONGEST = 120  # characters of a query id or a name that are shown
LONGEST_TEXT = 4_000  # of anything else
FEW = 6  # runs that the summary names


def render(
    folders: Sequence[Path], *, title: str = "", only: Collection[Path] | None = None, baseline: str | None = None
) -> str:
    """The whole page as HTML."""
    entries = [replace(entry, name=shortened(entry.name)) for entry in read_entries(folders, only, baseline)]
    names = [entry.name for entry in entries]
    headline = numbers.headline(list(entries[0].per_query.metrics))
    metrics = [headline, *(name for name in entries[0].per_query.metrics if name != headline)]
    tables = {metric: numbers.metric_table(entries, metric) for metric in metrics}
    contests = numbers.contests(entries, headline, tables[headline])
    common, different = _provenance(entries)
    return _template().render(
        title=title or (names[0] if len(names) == 1 else f"{len(names)} runs compared"),
        summary=_summary(tables[headline], headline, _countable(entries, headline)),
        population=_population(entries, headline),
        key=styled(names),
        headline=headline,
        level=f"{LEVEL:.0%}".replace("%", " %"),
        rules=RULES,
        tables=[(metric, rows, _best(rows), _bars(rows)) for metric, rows in tables.items()],
        sections=_framed(make_sections(entries, headline, contests)),
        explained=explained_parts(entries),
        contests=contests,
        places=numbers.PLACES,
        without_scores=[entry.name for entry in entries if entry.per_document is None],
        names=names,
        hardest=numbers.hardest(entries[0], entries[0].per_query.metrics[headline]) if len(entries) == 1 else [],
        conventions=list(dict.fromkeys(entry.facts["convention"] or CONVENTION for entry in entries)),
        split=entries[0].per_query.split,
        common=common,
        different=different,
    )


def _template() -> Any:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=shown
    )
    environment.filters |= {
        "mean": format_mean,
        "difference": format_difference,
        "interval": format_interval,
        "p_value": format_p_value,
        "shortened": shortened,
        "moved": format_moved,
        "styled": styled,
        "breakable": breakable,
    }
    return environment.from_string((files("rankgrad.report") / "page.html.jinja").read_text(encoding="utf-8"))


def _framed(sections: Sequence[Section]) -> list[tuple[Section, list[tuple[Panel, Markup]]]]:
    """Every figure with ids of its own in the page, and its description for those who do not see it."""
    framed, number = [], 0
    for section in sections:
        panels = []
        for panel in section.panels:
            number += 1
            svg = re.sub(r'( id="| xlink:href="#|url\(#)', rf"\1f{number}-", panel.svg)
            panels.append(
                (panel, Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(shown(panel.label))}" ', 1)))
            )
        framed.append((section, panels))
    return framed


# --- text -------------------------------------------------------------------------------------------------------------


def _population(entries: Sequence[Entry], headline: str) -> str:
    total, countable = len(entries[0].per_query.query_ids), _countable(entries, headline)
    sources = {source for entry in entries for source in entry.facts["data"].split("; ")}
    of = ""
    if "" not in sources:  # more than one are named in the footer
        of = f" of {next(iter(sources))}" if len(sources) == 1 else " of several sets of lists"
    return f"{_count(total, entries[0].per_query.split + ' query')}{of}, {total - countable:,} without a relevant document."


def _countable(entries: Sequence[Entry], headline: str) -> int:
    return int(np.isfinite(entries[0].per_query.metrics[headline]).sum())


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what.removesuffix('y')}ies"


def _summary(rows: Sequence[Row], headline: str, countable: int) -> list[str]:
    """The result in one or two sentences."""
    if not countable:
        return [
            "No query has a relevant document: every ranking is as good as any other, and there is nothing to tell."
        ]
    best = max(rows, key=lambda row: row.rules["skipped"].mean)
    mean, low, high = best.rules["skipped"]
    value = f"{format_mean(mean)} (95 % interval {format_mean(low)} to {format_mean(high)})"
    over = f"over the {_count(countable, 'query')} with a relevant document"
    if len(rows) == 1:
        return [f"{headline} is {value} {over}."]
    groups: dict[str, list[str]] = {"better": [], "worse": [], "no difference shown": []}
    for row in rows[1:]:
        assert row.against is not None
        side = "better" if row.against.difference > 0 else "worse"
        groups[side if row.p < SIGNIFICANT else "no difference shown"].append(row.name)
    verdict = "; ".join(f"{group}: {_few(names)}" for group, names in groups.items() if names)
    return [
        f"{best.name} has the highest {headline}, {value}, {over}.",
        f"Against {rows[0].name} (p < {SIGNIFICANT} after Holm's correction) {verdict}.",
    ]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= FEW else f"{len(names)} runs, see the table"


def format_interval(found: Any, sign: str = "") -> str:
    """The ends of an interval, in as many decimals as the bootstrap makes sure of."""
    if np.isnan(found.low):
        return ""
    low, high = (f"{end:{sign}.3f}".replace("-", "−") for end in (found.low, found.high))
    return f"{low} to {high}" if sign else f"{low}–{high}"


def format_p_value(p: float) -> str:
    """Three decimals; a dash for NaN."""
    return "–" if np.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def format_moved(document: numbers.Moved) -> str:
    """How many places a document rose or fell."""
    places = document.before - document.after
    return "=" if not places else f"▲ {places}" if places > 0 else f"▼ {-places}"


def styled(names: Sequence[str]) -> list[tuple[str, Style]]:
    """Names of runs or losses, each with how it is drawn."""
    return [(name, style_of(index)) for index, name in enumerate(names)]


def breakable(text: str) -> Markup:
    """A name that a browser may break after a separator, where it does not fit a line."""
    return Markup("<wbr>").join(re.split(r"(?<=[_/=.-])|(?=@)", shown(text)))


def shown(value: Any) -> Any:
    """What a page may show of a text: no control character, nothing that turns the text around it, and not without end.

    A path may hold bytes that are not valid text; they are question marks.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return inert(value[: LONGEST_TEXT + 1].encode("utf-8", "replace").decode(), LONGEST_TEXT)


def shortened(query: Any) -> str:
    """A query id, cut where it is very long."""
    text = str(query)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


# --- tables -----------------------------------------------------------------------------------------------------------


def _best(rows: Sequence[Row]) -> dict[str, float]:
    """The largest mean under each rule; none where there is nothing to choose from."""
    means = {rule: [row.rules[rule].mean for row in rows] for rule in RULES}
    return {rule: max(of) for rule, of in means.items() if len(rows) > 1 and not np.isnan(of).any()}


def _bars(rows: Sequence[Row]) -> list[Interval]:
    """Means and intervals of a table on a common scale from 0 to 100, empty queries left out."""
    own = np.array([row.rules["skipped"] for row in rows])
    if np.isnan(own).any():
        return []
    low, high = own.min(), own.max()
    scaled = 4 + 92 * (own - low) / (high - low) if high > low else np.full_like(own, 50)
    return [Interval(*row) for row in scaled.tolist()]


def _provenance(entries: Sequence[Entry]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Facts that all entries share, and those in which they differ, by heading; what no folder says is left out."""
    columns: Mapping[str, list[str]] = {
        key: [entry.facts[key] for entry in entries] for key in entries[0].facts if key != "convention"
    }
    common = {key: values[0] for key, values in columns.items() if values[0] and len(set(values)) == 1}
    return common, {key: values for key, values in columns.items() if len(set(values)) > 1}
