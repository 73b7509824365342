"""`rankgrad report`: a page to look at."""

from pathlib import Path
from typing import Annotated

import typer

from rankgrad.cli.options import Json, Overwrite, examples, show

EXAMPLES = examples(
    "rankgrad report runs/first",
    "rankgrad report runs/first runs/second --out comparison.html",
    "rankgrad report runs/* --baseline lightgbm",
)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of finished runs measured on the same queries.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write.")] = Path("report.html"),
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="The run that the others are compared with. [the first]")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a page to look at: metrics, curves, queries.

    One HTML file that needs nothing else. The other runs are compared with the first, or with --baseline, query by query. A RUN may also be a
    folder with several runs below it (seeds, folds), which are taken together: averaged where they were measured on the same
    queries, joined where not.
    """
    from rankgrad.report import summary, write

    size = write(runs, out, overwrite=overwrite, baseline=baseline)
    result = {"report": str(out), "bytes": size, **(summary(runs, baseline) if as_json else {})}
    show(result, lambda found: f"{found['report']}, {size / 1024:.0f} KB: open it in a browser", as_json=as_json)
