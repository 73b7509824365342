"""`rankgrad reproduce table2`: every row on every fold with every seed, and what it adds up to. Resumable at any point.

The folder and its cells are those of campaign.py; table2.json, table2.md and report.html join them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankgrad.files import write_atomically
from rankgrad.reproduce.cells import Cell, finished
from rankgrad.reproduce.claims import METRICS, Values, against_the_best, claims, standing
from rankgrad.reproduce.data import Fold
from rankgrad.reproduce.rows import ROWS, Setting, chosen
from rankgrad.reproduce.tables import as_markdown
from rankgrad.reproduce.trials import Campaign, Order, Results, cells_of, facts_of, fill, opened, report_on, values_of
from rankgrad.runs.compare import as_json
from rankgrad.training.config import Config
from rankgrad.trees.fit import Trees, missing


def make_table(order: Order, *, quiet: bool = False) -> dict[str, Any]:
    """Train what has not been trained, write the table down, and give it back."""
    names, skipped = _available(order.rows)
    with opened(order, "table2", quiet=quiet) as campaign:
        cells = cells_of(campaign, names, _work)
        journal, failed = fill(campaign, cells, quiet=quiet)
        cells += _joining(campaign, names, journal)
        result = {
            "table": str(campaign.out),
            **facts_of(campaign, cells, journal),
            "skipped": skipped,
            "failed": failed,
            **_judged(values_of(cells, failed), campaign.dataset, _seconds(cells, journal)),
        }
        best = result["best"]["ndcg@10"]["row"]
        rows = [best, *(row for row in result["rows"] if row != best)]
        result["report"] = report_on(campaign, rows, cells, "report.html", "Table 2")
        write_atomically(campaign.out / "table2.json", (as_json(result) + "\n").encode())
        write_atomically(campaign.out / "table2.md", as_markdown(result).encode())
    return result


def _available(rows: str | None) -> tuple[list[str], dict[str, str]]:
    """The rows to train, and those left out for want of a package; one that was asked for by name is not left out."""
    names, skipped = chosen(rows), {}
    for name in names:
        package = ROWS[name].package
        lacking = missing(package) if package else None
        if lacking and rows is not None:
            raise ValueError(f"the row {name} cannot be trained: {lacking}")
        if lacking:
            skipped[name] = lacking
    return [name for name in names if name not in skipped], skipped


def _work(row: str, setting: Setting, lists: Fold) -> tuple[Config | Trees, str]:
    return ROWS[row].recipe(setting), lists.scaled


def _joining(campaign: Campaign, names: Sequence[str], journal: Results) -> list[Cell]:
    """Cells of the rows that were trained before and not asked for now, where these seeds and folds are finished."""
    rows = [row for row in ROWS if row not in names and any(key[0] == row for key in journal.known)]
    cells = cells_of(campaign, rows, _work)
    unfinished = {cell.row for cell in cells if not finished(cell)}
    return [cell for cell in cells if cell.row not in unfinished]


def _seconds(cells: Sequence[Cell], journal: Results) -> dict[str, float]:
    """The mean time of a row's cells."""
    spent: dict[str, list[float]] = {}
    for cell in cells:
        if finished(cell):
            spent.setdefault(cell.row, []).append(journal.known[cell.row, cell.fold, cell.seed]["seconds"])
    return {row: float(np.mean(times)) for row, times in spent.items()}


def _judged(values: Values, dataset: str | None, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Means, p-values and claims of the rows all of whose cells are finished."""
    best = {metric: against_the_best(values, metric) for metric in METRICS}
    rows = {
        row: {
            "title": ROWS[row].title,
            "metrics": standing(of_row),
            "paper": ROWS[row].paper.get(dataset or ""),
            "seconds": seconds[row],
        }
        for row, of_row in values.items()
    }
    return {
        "rows": rows,
        "best": {metric: {"row": row, "p": p_values} for metric, (row, p_values) in best.items()},
        "claims": claims(values),
    }
