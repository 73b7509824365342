"""`rankgrad compare`: one run against another."""

from pathlib import Path
from typing import Annotated

import typer

from rankgrad.cli.options import Json, examples, show

EXAMPLES = examples("rankgrad compare runs/first runs/second", "rankgrad compare runs/first runs/second --metric map")


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of a finished run.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Folder of another, measured on the same queries.")],
    metric: Annotated[str, typer.Option(help="One that both runs report.")] = "ndcg@10",
    as_json: Json = False,
) -> None:
    """Is one run better than another, or was it luck?

    The two are paired over the queries both were measured on. Gives the mean difference with its 95 % bootstrap interval,
    the p-value of a two-sided permutation test, and how many queries each run wins. Empty queries, where no ranking is
    better than another, are left out.
    """
    from rankgrad.cli.render import describe_comparison
    from rankgrad.runs.compare import compare_runs

    show(compare_runs(run_a, run_b, metric.strip().lower()), describe_comparison, as_json=as_json)
