"""Small ranking data as text, and the command in a process of its own."""

import sys

import numpy as np

COMMAND = [sys.executable, "-m", "rankgrad"]
COMMANDS = [
    "demo",
    "synthetic",
    "train",
    "evaluate",
    "rank",
    "compare",
    "report",
    "export",
    "distil",
    "explain",
    "prepare",
    "info",
    "reproduce",
]


def lists(first, count, features=3):
    """Queries first, first + 1, ...: the label is the sign of a sum of features; every fifth query is empty."""
    rng = np.random.default_rng(first)
    for query in range(first, first + count):
        x = rng.normal(size=(4, features)).round(3)
        labels = np.zeros(4, int) if query % 5 == 0 else (x.sum(1) > 0) + (x.sum(1) > 1)
        yield from ((int(label), query, row.tolist()) for label, row in zip(labels, x))


def letor(rows):
    return "".join(f"{y} qid:{q} {' '.join(f'{i}:{v}' for i, v in enumerate(x, 1))}\n" for y, q, x in rows)


def csv(rows):
    return "label,qid,a,b,c\n" + "".join(f"{y},{q},{','.join(map(str, x))}\n" for y, q, x in rows)
