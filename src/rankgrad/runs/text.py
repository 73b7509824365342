"""Tables and numbers as text, the same for commands, reports and reproductions. Aligned, without escape codes."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

RULES = {"empty=1": "count 1", "empty=0": "count 0", "skipped": "left out"}  # a report's names, as a person reads them


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under a header as aligned text: the first column to the left, the others to the right.

    >>> print(table([("metric", "mean"), ("ndcg@10", "0.5000"), ("map", "0.25")]))
    metric     mean
    ndcg@10  0.5000
    map        0.25
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def by_rule(metrics: Mapping[str, Mapping[str, float | None]]) -> str:
    """Means of metrics under the three rules for empty queries, as a report holds them.

    >>> print(by_rule({"map": {"empty=1": 0.75, "empty=0": 0.25, "skipped": 0.5}}))
    empty queries  count 1  count 0  left out
    map             0.7500   0.2500    0.5000
    """
    header = ("empty queries", *RULES.values())
    return table([header, *((name, *(format_mean(means[rule]) for rule in RULES)) for name, means in metrics.items())])


def format_mean(mean: float | None) -> str:
    """Four digits; JSON has no NaN, None says that there was nothing to take the mean of."""
    return "none" if mean is None else f"{mean:.4f}"


def as_json(value: Any) -> str:
    """JSON that every parser takes: what is not a number is null. Nothing in it steers a terminal.

    >>> print(as_json([math.nan, 0.5]))
    [
      null,
      0.5
    ]
    """
    return json.dumps(nullable(value), indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def nullable(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: nullable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nullable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
