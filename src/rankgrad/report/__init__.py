"""A report to look at: one HTML file without script or network, from the folders of finished runs.

    gather      what the folders say; several runs (seeds, folds) may be one row
    numbers     means, intervals, paired tests, groups of queries
    figures     SVG by matplotlib, in the page's colours
    sections    figures with their captions and numbers
    explained   what rankings rest on, as rows with bars
    page        all of it through one template (page.html.jinja) that escapes every string

matplotlib and jinja2 are the extra `report` and are imported when a report is written.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankgrad.files import write_atomically
from rankgrad.report.gather import read_entries
from rankgrad.report.numbers import metric_table
from rankgrad.runs.folder import CONVENTION
from rankgrad.runs.significance import LEVEL


def write(
    folders: Sequence[Path],
    out: Path,
    *,
    title: str = "",
    overwrite: bool = False,
    only: Collection[Path] | None = None,
    baseline: str | None = None,
) -> int:
    """Write the report of runs to a file, and return its size in bytes.

    - `folders`: each is one row of the report: a finished run, or a folder with several runs below it. Of these, runs
      evaluated on the same queries (seeds) are averaged query by query, and sets of queries (folds) are joined. All
      rows must have been evaluated on the same queries; the others are compared with the first, or with the baseline.
    - `out`: the HTML file.
    - `title`: its heading; by default the name of the run, or the number of runs.
    - `overwrite`: replace a file that exists.
    - `only`: of the runs below a folder take these alone.
    - `baseline`: the name or folder of the row that the others are compared with; it comes first.
    """
    try:
        from rankgrad.report.page import render
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("jinja2", "markupsafe", "matplotlib"):
            raise
        raise ImportError("a report needs matplotlib and jinja2; pip install 'rankgrad[report]'") from error
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists already; expected a new file; choose another --out, or --overwrite")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a folder; expected one to write {out.name} into; make it first")
    content = render(folders, title=title, only=only, baseline=baseline).encode()
    write_atomically(out, content)
    return len(content)


def summary(folders: Sequence[Path], baseline: str | None = None) -> dict[str, Any]:
    """The metric tables of the report as plain values, by run and metric; `against` is the run minus the first, the baseline."""
    entries = read_entries(folders, baseline=baseline)
    runs: dict[str, dict[str, Any]] = {entry.name: {} for entry in entries}
    for metric in entries[0].per_query.metrics:
        for row in metric_table(entries, metric):
            values: dict[str, Any] = {rule: interval._asdict() for rule, interval in row.rules.items()}
            if row.against is not None:
                values["against"] = {**asdict(row.against), "p_corrected": row.p}
            runs[row.name][metric] = values
    return {
        "split": entries[0].per_query.split,
        "queries": len(entries[0].per_query.query_ids),
        "baseline": entries[0].name,
        "runs": runs,
        "interval": LEVEL,
        "convention": (entries[0].facts["convention"] or CONVENTION).partition(";")[0],
    }
