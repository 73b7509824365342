"""Table 1 and Figures 1 and 2 of the paper, which need no data.

Table 1 is one list sorted by NeuralSort at three temperatures, ours beside what is printed. The figures show NDCG and
NeuralNDCG while one document's score x moves past the others'; curves are computed first, in float64, then measured and
drawn. Only drawing needs matplotlib.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankgrad.files import write_atomically
from rankgrad.losses.neural import neural_ndcg
from rankgrad.metrics import ndcg
from rankgrad.runs.folder import CONVENTION
from rankgrad.runs.text import table
from rankgrad.sorting import neural_sort

# --- table 1 -----------------------------------------------------------------------------------------------------------

LABELS = (4, 2, 1, 0, 4, 3)
SCORES = (0.5, 0.2, 0.1, 0.01, 0.65, 0.3)
# By temperature: the entries and the sum, as the paper prints them.
PAPER = {
    0.01: (("4", "4", "3", "2", "0.99992", "0.00012339"), "14.00004339"),
    0.1: (("3.9995", "3.8909", "2.8239", "1.9730", "0.9989", "0.3136"), "13.9998"),
    1.0: (("3.3893", "2.9820", "2.4965", "2.0191", "1.6097", "1.2815"), "10.388"),
}


def sort_labels() -> dict[str, Any]:
    """P(s) y in float64 for each temperature, P from NeuralSort without Sinkhorn scaling, beside the paper's.

    >>> [round(row["sum"], 4) for row in sort_labels()["rows"]]
    [14.0, 13.9997, 13.7781]
    """
    scores, labels = (torch.tensor(values, dtype=torch.float64) for values in (SCORES, LABELS))
    rows = []
    for tau, (entries, printed) in PAPER.items():
        sorted_labels = neural_sort(scores, tau=tau) @ labels
        rows.append(
            {
                "tau": tau,
                "entries": sorted_labels.tolist(),
                "sum": sorted_labels.sum().item(),
                "paper_entries": list(entries),
                "paper_sum": printed,
                "sum_of_paper_entries": round(sum(map(float, entries)), 8),
            }
        )
    return {"labels": LABELS, "scores": SCORES, "sinkhorn_iters": 0, "rows": rows}


def describe_table1(found: Mapping[str, Any]) -> str:
    """The table, and where the paper misprints."""
    rows = [("tau", "", *(f"rank {i}" for i in range(1, len(LABELS) + 1)), "sum")]
    notes = []
    for row in found["rows"]:
        rows.append((f"{row['tau']:g}", "ours", *_rounded(row), f"{row['sum']:.4f}"))
        rows.append(("", "paper", *row["paper_entries"], row["paper_sum"]))
        own, printed = row["sum_of_paper_entries"], float(row["paper_sum"])
        if abs(own - printed) > 1e-6:
            notes.append(f"tau {row['tau']:g}: {printed:g} is a misprint; the paper's own entries sum to {own:.4f}")
        elif f"{printed:.4f}" != f"{row['sum']:.4f}" or len(row["paper_sum"]) > len("14.0000"):
            notes.append(
                f"tau {row['tau']:g}: {row['paper_sum']} is the sum of rounded entries; unrounded {row['sum']:.4f}"
            )
    return "\n".join(
        [
            "Table 1: labels sorted by NeuralSort, without Sinkhorn scaling (0 rounds)",
            f"y = {list(LABELS)}, s = {list(SCORES)}",
            "a hard sort gives 4 4 3 2 1 0, sum 14",
            "",
            table(rows),
            "",
            "where the paper misprints",
            *(f"- {note}" for note in notes),
            '- the text says "N_k^-1 is the maxDCG": its inverse is meant',
            "entries agree to the digits printed: " + ("yes" if agrees(found) else "no"),
        ]
    )


def agrees(found: Mapping[str, Any]) -> bool:
    """Whether every entry of ours, rounded as the paper rounds it, is the paper's."""
    return all(_rounded(row) == row["paper_entries"] for row in found["rows"])


def _rounded(row: Mapping[str, Any]) -> list[str]:
    """Our entries with as many decimals as the paper's."""
    decimals = [len(printed.partition(".")[2]) for printed in row["paper_entries"]]
    return [f"{entry:.{places}f}" for entry, places in zip(row["entries"], decimals)]


# --- the figures -------------------------------------------------------------------------------------------------------

FROM, TO, POINTS = -2.0, 7.0, 901  # x, in steps of 0.01
FORMATS = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}  # without a date: the same bytes again


@dataclass(frozen=True)
class Curves:
    """Values [POINTS] against x; the first is NDCG itself, the others are relaxations of it, by name."""

    title: str
    x: Tensor
    ndcg: Tensor
    relaxed: Mapping[str, Tensor]


def figure1() -> Curves:
    """NeuralNDCG (tau 1) without and with Sinkhorn scaling, for a document of label 0 that rises past a 0, a 1 and a 2."""
    scores, labels, x = _lists([4, 1, 0, 0], [2, 1, 0, 0, 0])
    rounds = {"NeuralNDCG, no Sinkhorn": 0, "NeuralNDCG, 30 rounds": 30}
    relaxed = {
        name: -neural_ndcg(scores, labels, sinkhorn_iters=iters, reduction="none") for name, iters in rounds.items()
    }
    return Curves("y = [2, 1, 0, 0, 0], s = [4, 1, 0, 0, x], tau = 1", x, ndcg(scores, labels), relaxed)


def figure2() -> Curves:
    """NeuralNDCG (30 rounds of Sinkhorn) at four temperatures, for the best document, which rises past all others."""
    scores, labels, x = _lists([1, 2, 3, 4], [1, 2, 3, 4, 5])
    relaxed = {
        f"NeuralNDCG, tau = {tau:g}": -neural_ndcg(scores, labels, tau=tau, reduction="none")
        for tau in (0.01, 0.1, 1.0, 10.0)
    }
    return Curves("y = [1, 2, 3, 4, 5], s = [1, 2, 3, 4, x], 30 rounds", x, ndcg(scores, labels), relaxed)


FIGURES = {"figure1": figure1, "figure2": figure2}


def measure_figure(curves: Curves) -> dict[str, Any]:
    """What the eye would see: where NDCG jumps, and how far, and how far the wrong way, each relaxation goes."""
    x, steps = curves.x, curves.ndcg.diff()
    jumps = [
        {"x": round(x[i].item(), 2), "before": curves.ndcg[i].item(), "after": curves.ndcg[i + 1].item()}
        for i in steps.nonzero().flatten().tolist()
    ]
    direction = torch.sign(curves.ndcg[-1] - curves.ndcg[0])
    relaxed = {}
    for name, values in curves.relaxed.items():
        bump, start, end = _wrong_way(direction * values)
        relaxed[name] = {
            "bump": bump,
            "bump_from": x[start].item(),
            "bump_to": x[end].item(),
            "steepest": (values.diff() / x.diff()).abs().max().item(),
            "mean_distance": (values - curves.ndcg).abs().mean().item(),
        }
    return {"title": curves.title, "jumps": jumps, "relaxed": relaxed}


def describe_figure(found: Mapping[str, Any]) -> str:
    """What `measure_figure` found, as a table."""
    rows = [("", "bump", "between x", "steepest", "from NDCG")]
    for name, of in found["relaxed"].items():
        where = f"{of['bump_from']:.2f} .. {of['bump_to']:.2f}" if of["bump"] >= 5e-6 else "-"
        rows.append((name, f"{of['bump']:.5f}", where, f"{of['steepest']:.3f}", f"{of['mean_distance']:.4f}"))
    start = f"{found['jumps'][0]['before']:.4f}"
    jumps = ", ".join(f"past {jump['x']:g} {jump['after']:.4f}" for jump in found["jumps"])
    return (
        f"{found['title']}\nNDCG: {start}, x {jumps}\n{table(rows)}\n"
        "bump: the farthest a curve goes the way NDCG never goes; steepest: its slope;\n"
        f"from NDCG: mean distance, x from {FROM:g} to {TO:g}; whole lists, no cut-off\n{CONVENTION}"
    )


def draw_figure(curves: Curves, file: Path, *, overwrite: bool) -> None:
    """Write the figure in the format of the file's ending."""
    if file.suffix not in FORMATS:
        raise ValueError(f"{file} does not say what to draw; expected a name that ends in {', '.join(FORMATS)}")
    if file.exists() and not overwrite:
        raise ValueError(f"{file} exists already; expected a new file; choose another --out, or --overwrite")
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a folder; expected one to write {file.name} into; make it first")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing figures needs matplotlib; pip install 'rankgrad[report]'") from error
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "rankgrad"}):  # text stays text; the same bytes again
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes = figure.add_subplot(xlabel="x", ylabel="value", title=curves.title)
        axes.plot(curves.x, curves.ndcg, color="black", linewidth=1.2, label="NDCG")
        for (name, values), style in zip(curves.relaxed.items(), ("-", "--", "-.", ":")):
            axes.plot(curves.x, values, style, linewidth=1.6, label=name)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        content = io.BytesIO()
        figure.savefig(content, format=file.suffix[1:], metadata=FORMATS[file.suffix])
    write_atomically(file, content.getvalue())


def _lists(fixed: list[float], labels: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [POINTS, n] with x in the last place, labels of that shape, and x."""
    x = torch.linspace(FROM, TO, POINTS, dtype=torch.float64)
    scores = torch.cat([torch.tensor(fixed, dtype=torch.float64).expand(POINTS, -1), x[:, None]], dim=-1)
    return scores, torch.tensor(labels).expand(POINTS, -1), x


def _wrong_way(values: Tensor) -> tuple[float, int, int]:
    """The largest fall values[i] - values[j], i < j, of a curve that should only rise, and its two places."""
    highest, places = values.cummax(0)
    end = int((highest - values).argmax())
    return float(highest[end] - values[end]), int(places[end]), end
