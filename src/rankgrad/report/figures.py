"""Figures as SVG text that takes its colours and its typeface from the page around it.

Colours are drawn as numbers that stand for CSS variables (--ink, --muted, --grid, --c0 ... --c7) and replaced in the
text, so that a figure is right on a light and on a dark background. No name of a run is drawn: the page's key, in HTML,
says which line belongs to which run, and a name of any length or alphabet cannot break a figure.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankgrad.inert import inert
from rankgrad.report.gather import Training
from rankgrad.report.numbers import Bin, Contest
from rankgrad.runs.significance import ROUNDING

LABEL = 80  # characters beside an axis
SIZE = (4.7, 3.0)  # inches of 72 units: on a phone drawn a little smaller than it is, on a desktop a little larger
INK, MUTED, GRID = "#000001", "#000002", "#000003"
VARIABLES = {"01": "ink", "02": "muted", "03": "grid", **{f"1{n}": f"c{n}" for n in range(8)}}
DASHES = ("none", "5 2", "1.5 1.5", "6 1.5 1.5 1.5")
MARKERS = "osD^v"
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "rankgrad",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}


class Style(NamedTuple):
    """How an entry is drawn: a colour of the page, and a dash and a marker for those who cannot tell colours apart."""

    variable: str
    dash: str
    marker: str
    colour: str


def style_of(index: int) -> Style:
    """The style of the index-th entry; colours repeat after eight, with other dashes."""
    return Style(f"c{index % 8}", DASHES[index // 8 % 4], MARKERS[index % 5], f"#00001{index % 8}")


def training(runs: Sequence[tuple[int, Training]], which: str, axis: str) -> str:
    """The `losses` or the validation `metrics` of runs (each with its entry's number) by epoch, the best one marked."""

    def paint(axes: Any) -> None:
        for index, run in runs:
            heights = getattr(run, which)
            axes.plot(run.epochs, heights, **_line(index))
            if run.best_epoch in run.epochs:
                best = [run.best_epoch], [heights[run.epochs.index(run.best_epoch)]]
                axes.plot(*best, marker="o", markersize=6, color=style_of(index).colour)
        axes.xaxis.set_major_locator(_whole_numbers())

    return _draw("epoch", axis, paint)


def members(points: Sequence[tuple[int, float, float, bool]], xlabel: str, ylabel: str, *, log: bool) -> str:
    """Members as points (number of their loss, hyper-parameter, validation, kept): full if they were kept, else hollow."""

    def paint(axes: Any) -> None:
        for index, x, y, kept in points:
            style = style_of(index)
            face = style.colour if kept else "none"
            axes.plot([x], [y], marker=style.marker, color=style.colour, markerfacecolor=face, linestyle="none")
        if log:
            _log_axis(axes, [x for _, x, _, _ in points])

    return _draw(xlabel, ylabel, paint)


def _log_axis(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis with ticks at 1 and 3 times powers of ten, or at the ends of a short one, labelled as plain numbers."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 3) if low <= factor * 10.0**power <= high]
    ticks = ticks[:: -(-len(ticks) // 5)] if len(ticks) > 1 else sorted({low, high})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    axes.minorticks_off()


def by_cutoff(curves: Sequence[tuple[int, dict[int, float]]], axis: str) -> str:
    """Curves over cut-offs k, each with its entry's number, on a logarithmic axis."""

    def paint(axes: Any) -> None:
        for index, curve in curves:
            axes.plot(curve.keys(), curve.values(), **_line(index), marker=".", markersize=3)
        if min(min(curve.values()) for _, curve in curves) < 0:
            axes.axhline(0, color=MUTED, linewidth=1)
        axes.set_xscale("log")
        ticks = [k for k in (1, 2, 5, 10, 20, 50, 100) if k <= max(max(curve) for _, curve in curves)]
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()

    return _draw("cut-off k", axis, paint)


def by_count(bins: Sequence[Bin], what: str, metric: str) -> str:
    """Means over groups of queries; with their intervals where there are few enough entries."""
    entries, places = len(bins[0].means), np.arange(len(bins))

    def paint(axes: Any) -> None:
        for index in range(entries):
            own = [found.means[index] for found in bins]
            x = places + (0.0 if entries == 1 else (index / (entries - 1) - 0.5) * min(0.5, 0.12 * entries))
            style = _line(index) | {"linewidth": 0.8, "marker": style_of(index).marker}
            axes.plot(x, [interval.mean for interval in own], **style)
            if entries <= 4:
                lows, highs = ([getattr(interval, end) for interval in own] for end in ("low", "high"))
                axes.vlines(x, lows, highs, color=style_of(index).colour, linewidth=1.4)
        axes.set_xticks(places, [found.label for found in bins])
        axes.set_xlim(-0.5, len(bins) - 0.5)
        axes.grid(False, axis="x")

    return _draw(what, metric, paint)


def differences(contest: Contest, metric: str) -> str:
    """How much a query gains or loses, ties left out; each side has the colour of the entry that is better there."""
    values = contest.differences[np.abs(contest.differences) > ROUNDING]
    reach = float(np.abs(values).max(initial=ROUNDING))

    def paint(axes: Any) -> None:
        for side, index in ((-1, 0), (1, contest.index)):
            _bars(axes, values[values * side > 0], np.linspace(0, side * reach, 16)[::side], index)
        axes.axvline(0, color=MUTED, linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(6, symmetric=True))

    return _draw(f"difference in {metric}", "queries", paint)


def distribution(values: np.ndarray, metric: str) -> str:
    """How many queries reach how much."""
    return _draw(metric, "queries", lambda axes: _bars(axes, values[np.isfinite(values)], np.linspace(0, 1, 21), 0))


def _bars(axes: Any, values: np.ndarray, edges: np.ndarray, index: int) -> None:
    counts, _ = np.histogram(values, edges)
    axes.bar((edges[:-1] + edges[1:]) / 2, counts, (edges[1] - edges[0]) * 0.88, color=style_of(index).colour)
    axes.grid(False, axis="x")
    axes.yaxis.set_major_locator(_whole_numbers())


def _line(index: int) -> dict[str, Any]:
    style = style_of(index)
    pattern = "solid" if style.dash == "none" else (0, tuple(float(part) for part in style.dash.split()))
    return {"color": style.colour, "linestyle": pattern}


def _whole_numbers() -> MaxNLocator:
    return MaxNLocator(integer=True, nbins=6, min_n_ticks=1)


def _draw(xlabel: str, ylabel: str, paint: Callable[[Any], None]) -> str:
    """The SVG of one pair of axes."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc says
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=SIZE, layout="constrained")
        paint(figure.add_subplot(xlabel=inert(xlabel, LABEL), ylabel=inert(ylabel, LABEL)))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _embedded(file.getvalue())


def _embedded(svg: str) -> str:
    """An SVG file as a part of a page: no header, no size of its own, the page's colours and typeface, fewer digits."""
    svg = svg[svg.index("<svg") :]
    for needless in (
        r"<defs>\s*<style.*?</style>\s*</defs>",
        r"<metadata>.*?</metadata>",
        r"<!--.*?-->",
        r' width="[\d.]+pt" height="[\d.]+pt"',
        r'(?<=<g) id="[^"]*"',
        r" font-family: [^;\"]*;",
        r' transform="rotate\(-0 [^"]*"',
    ):
        svg = re.sub(needless, "", svg, flags=re.S)
    svg = re.sub(
        r"#0000([01]\d)", lambda found: f"var(--{VARIABLES[found[1]]})" if found[1] in VARIABLES else found[0], svg
    )
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"\d+\.\d{3,}", _rounded, found[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}"
