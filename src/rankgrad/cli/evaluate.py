"""`rankgrad evaluate`: metrics of runs on data."""

from pathlib import Path
from typing import Annotated

import typer

from rankgrad.cli.options import (
    DataSource,
    Json,
    Networks,
    ReadingSettings,
    RunFolders,
    Split,
    Threads,
    examples,
    expect_runs_and_data,
    limit_threads,
    show,
)

EXAMPLES = examples(
    "rankgrad evaluate runs/first data/",
    "rankgrad evaluate runs/first new.csv --metric ndcg@5 --metric precision@1",
    "rankgrad evaluate runs/first runs/second data/",
    "rankgrad evaluate --scores predictions.txt data/ --name lightgbm",
)


def evaluate(
    runs: RunFolders,
    data: DataSource,
    split: Split = "test",
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="Such as ndcg@10 or map; may be given many times. [those of the run]"),
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure these scores of DATA, from elsewhere, in place of a run's."),
    ] = None,
    name: Annotated[str, typer.Option(help="Who gave them. [the name of FILE]")] = "",
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where they are kept. [runs/NAME]")] = None,
    settings: ReadingSettings = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace scores that FOLDER holds.")] = False,
    model: Networks = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure runs on DATA: metrics and bootstrap intervals.

    Every metric is given under three rules for empty queries, with a 95 % interval. An empty query has no relevant
    document, so that no ranking of it is right or wrong. Some count it as 1, some as 0, some leave it out, and the choice
    can move a metric by more than a better model would.

    Several runs count as one ranker: the mean of their scores, standardised within each list.

    With --scores FILE, the scores of another program are measured and kept in FOLDER, which `compare` and `report` take beside
    runs. FILE holds a number per row of DATA; or a TREC run, QUERY Q0 DOCUMENT RANK SCORE TAG, where DOCUMENT is the
    document's id, or its row counted from 1; or a Parquet or CSV table with the column score and, where it is in another
    order than DATA, qid and document.
    """
    from rankgrad.cli.render import describe_evaluation
    from rankgrad.runs.compare import evaluate_runs, evaluate_scores
    from rankgrad.training.network import import_network

    if scores is not None:
        if runs:
            raise ValueError(f"--scores and the run {runs[0]} were given; expected one of them; leave the other out")
        found = evaluate_scores(
            scores, data, split, metric or (), name=name, out=out, settings=settings or (), overwrite=overwrite
        )
        show(found, describe_evaluation, as_json=as_json)
        return
    if name or out or overwrite:
        raise ValueError("--name, --out and --overwrite are for scores from elsewhere; expected --scores FILE too")
    expect_runs_and_data(runs, data, "measure them on")
    limit_threads(threads)
    networks = [import_network(of) for of in model or ()]
    found = evaluate_runs(runs, data, split, metric or (), networks, settings or ())
    show(found, describe_evaluation, as_json=as_json)
