"""Table 1 of the paper: one list sorted by NeuralSort at three temperatures, ours beside what is printed. Room 6."""

from collections.abc import Mapping
from typing import Any

import torch

from rankgrad.runs.compare import table
from rankgrad.sorting import neural_sort

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


def describe(found: Mapping[str, Any]) -> str:
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
