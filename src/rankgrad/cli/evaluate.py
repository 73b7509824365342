"""`rankgrad evaluate`: metrics of runs on data."""

from typing import Annotated

import typer

from rankgrad.cli.options import DataSource, Json, RunFolders, Split, examples, expect_runs_and_data, show

EXAMPLES = examples(
    "rankgrad evaluate runs/first data/",
    "rankgrad evaluate runs/first new.csv --metric ndcg@5 --metric precision@1",
    "rankgrad evaluate runs/first runs/second data/",
)


def evaluate(
    runs: RunFolders,
    data: DataSource,
    split: Split = "test",
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="Such as ndcg@10 or map; may be given many times. [those of the run]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure runs on DATA: metrics and bootstrap intervals.

    Every metric is given under three rules for empty queries, with a 95 % interval. An empty query has no relevant
    document, so that no ranking of it is right or wrong. Some count it as 1, some as 0, some leave it out, and the choice
    can move a metric by more than a better model would.

    Several runs count as one ranker: the mean of their scores, standardised within each list.
    """
    from rankgrad.cli.render import describe_evaluation
    from rankgrad.runs.compare import evaluate_runs

    expect_runs_and_data(runs, data, "measure them on")
    show(evaluate_runs(runs, data, split, metric or ()), describe_evaluation, as_json=as_json)
