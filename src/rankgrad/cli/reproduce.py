"""The sub-commands of `rankgrad reproduce`.

Whatever is slow to import is imported inside the command that needs it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankgrad.cli.options import Json, Quiet, examples, show

if TYPE_CHECKING:
    from rankgrad.reproduce.tables import Table

app = typer.Typer(name="reproduce", rich_markup_mode=None, add_completion=False)

Dataset = Annotated[
    str | None, typer.Option(help="web30k, istella, mq2008, ... or synthetic[:SIZE]; recognised if not given.")
]
DataFolder = Annotated[
    str | None, typer.Option("--data", metavar="FOLDER", help="Where the lists are; nothing is downloaded.")
]
Seeds = Annotated[int, typer.Option(help="Trainings of each row on each fold.")]
Folds = Annotated[str, typer.Option(help="all, or numbers such as 1,2.")]
Recipe = Annotated[str, typer.Option(help="paper: its model and schedule; small: for a few hundred lists.")]
Epochs = Annotated[int | None, typer.Option(help="At most so many, instead of the recipe's number.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Jobs = Annotated[int, typer.Option(help="Trainings at a time, one CPU thread each.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")]


@app.callback(
    epilog=examples("rankgrad reproduce table1", "rankgrad reproduce table2 --data mq2008/ --recipe small --folds all")
)
def _subcommands() -> None:
    """Make the paper's tables and figures again.

    Ours stand beside the numbers of arXiv 2102.07831.
    """


@app.command(epilog=examples("rankgrad reproduce table1"))
def table1(as_json: Json = False) -> None:
    """Sort one list at three temperatures; find the misprints.

    NeuralSort without Sinkhorn scaling, ours beside the entries and sums that the paper prints. Needs no data.
    """
    from rankgrad.reproduce.paper import describe_table1, sort_labels

    show(sort_labels(), describe_table1, as_json=as_json)


@app.command(epilog=examples("rankgrad reproduce figure1", "rankgrad reproduce figure1 --out figure1.png"))
def figure1(
    out: Annotated[Path, typer.Option(metavar="FILE", help="An svg, png or pdf file.")] = Path("figure1.svg"),
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Draw NDCG and NeuralNDCG with and without Sinkhorn.

    One score moves past the others. Prints where NDCG jumps and how large the bumps of its relaxations are. Needs no data;
    needs matplotlib.
    """
    _figure("figure1", out, overwrite, as_json)


@app.command(epilog=examples("rankgrad reproduce figure2", "rankgrad reproduce figure2 --out figure2.pdf --json"))
def figure2(
    out: Annotated[Path, typer.Option(metavar="FILE", help="An svg, png or pdf file.")] = Path("figure2.svg"),
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Draw NDCG and NeuralNDCG at four temperatures.

    One score moves past the others. Prints how close each temperature comes to NDCG. Needs no data; needs matplotlib.
    """
    _figure("figure2", out, overwrite, as_json)


def _figure(name: str, out: Path, overwrite: bool, as_json: bool) -> None:
    from rankgrad.reproduce.paper import FIGURES, describe_figure, draw_figure, measure_figure

    curves = FIGURES[name]()
    draw_figure(curves, out, overwrite=overwrite)
    result = {"figure": str(out), **measure_figure(curves)}
    show(result, lambda found: f"{describe_figure(found)}\ndrawn to {found['figure']}", as_json=as_json)


@app.command(
    epilog=examples(
        "rankgrad reproduce table2 --dataset synthetic:tiny --epochs 2 --seeds 1",
        "rankgrad reproduce table2 --data MSLR-WEB30K/ --recipe paper --device cuda",
        "rankgrad reproduce table2 --data mq2008/ --recipe small --folds all",
    )
)
def table2(
    dataset: Dataset = None,
    data: DataFolder = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the table; runs/table2-DATASET-RECIPE if not given.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Such as neural_ndcg@10,listnet,xgboost. [all rows]")
    ] = None,
    seeds: Seeds = 3,
    folds: Folds = "1",
    recipe: Recipe = "paper",
    epochs: Epochs = None,
    device: Device = "auto",
    paper_protocol: Annotated[
        bool, typer.Option("--paper-protocol", help="Keep the last epoch, train on the full training fold.")
    ] = False,
    jobs: Jobs = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare the losses, and trees, on ranking data.

    The paper's 16 neural rows and XGBoost, and rows it lacks. What is finished is kept in DIR: the same command again goes
    on where it was stopped, and more rows, seeds or folds join those that are there.
    """
    from rankgrad.reproduce.tables import make_table2
    from rankgrad.reproduce.trials import Request

    request = Request(dataset, data, out, rows, seeds, folds, recipe, epochs, device, paper_protocol, jobs)
    _finish(make_table2(request, quiet=quiet), as_json=as_json, quiet=quiet)


@app.command(
    epilog=examples(
        "rankgrad reproduce ablations --dataset synthetic:tiny --what tanh --epochs 2",
        "rankgrad reproduce ablations --data mq2008/ --recipe small --folds all",
    )
)
def ablations(
    dataset: Dataset = None,
    data: DataFolder = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs; runs/ablations-DATASET-RECIPE if not given.")
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Some of stochastic, tau, alpha, tanh, sinkhorn. [all]"),
    ] = None,
    seeds: Seeds = 3,
    folds: Folds = "1",
    recipe: Recipe = "paper",
    epochs: Epochs = None,
    device: Device = "auto",
    jobs: Jobs = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Test the paper's claims that have no table.

    Stochastic against deterministic, tau and alpha over [0.01, 100], tanh on and off, Sinkhorn by number of rounds. Each
    claim is held here or not. The same command again goes on where it was stopped.
    """
    from rankgrad.reproduce.tables import make_ablations
    from rankgrad.reproduce.trials import Request

    request = Request(dataset, data, out, what, seeds, folds, recipe, epochs, device, jobs=jobs)
    _finish(make_ablations(request, quiet=quiet), as_json=as_json, quiet=quiet)


@app.command(
    epilog=examples(
        "rankgrad reproduce dasalc --dataset synthetic:tiny --seeds 2 --epochs 2",
        "rankgrad reproduce dasalc --data mq2008/ --recipe small --folds all",
    )
)
def dasalc(
    dataset: Dataset = None,
    data: DataFolder = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs; runs/dasalc-DATASET-RECIPE if not given.")
    ] = None,
    seeds: Seeds = 3,
    folds: Folds = "1",
    recipe: Recipe = "paper",
    epochs: Epochs = None,
    device: Device = "auto",
    jobs: Jobs = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Say what each ingredient of DASALC gives here.

    Qin et al. 2021 add a symmetric log transform, input noise, a wider encoder and an ensemble to a ranker trained with the
    softmax loss. The same command again goes on where it was stopped.
    """
    from rankgrad.reproduce.tables import make_dasalc
    from rankgrad.reproduce.trials import Request

    request = Request(dataset, data, out, None, seeds, folds, recipe, epochs, device, jobs=jobs)
    _finish(make_dasalc(request, quiet=quiet), as_json=as_json, quiet=quiet)


@app.command(
    epilog=examples(
        "rankgrad reproduce strong --data mq2008/ --folds all",
        "rankgrad reproduce strong --dataset synthetic:tiny --rows strong,lightgbm-24 --seeds 1 --epochs 2",
    )
)
def strong(
    dataset: Dataset = None,
    data: DataFolder = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs; runs/strong-DATASET if not given.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Some of strong,lightgbm-24,xgboost-8,catboost-24,catboost-8. [all]"),
    ] = None,
    seeds: Seeds = 3,
    folds: Folds = "1",
    epochs: Epochs = None,
    device: Device = "auto",
    jobs: Jobs = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Set the recipe strong beside boosted trees after a search.

    What NeuralRanker() and `rankgrad train` do by themselves, untuned, against LightGBM, XGBoost and CatBoost with random settings
    of which the five best on validation are averaged. The same command again goes on where it was stopped.
    """
    from rankgrad.reproduce.tables import make_strong
    from rankgrad.reproduce.trials import Request

    request = Request(dataset, data, out, rows, seeds, folds, "small", epochs, device, jobs=jobs)
    _finish(make_strong(request, quiet=quiet), as_json=as_json, quiet=quiet)


def _finish(table: "Table", *, as_json: bool, quiet: bool) -> None:
    """Write the report and the table, and print it; trials that failed are an error, whatever else was reached."""
    from rankgrad.reproduce.tables import describe, write

    result = write(table, _write_report(table))
    show(result, describe, as_json=as_json, quiet=quiet)
    if result["failed"]:
        number = len(result["failed"])
        raise ValueError(f"{number} trial{'s' * (number > 1)} failed, the first: {result['failed'][0]}")


def _write_report(table: "Table") -> str:
    """Where the HTML report is, or why there is none: an extra is missing, or the runs do not fit together."""
    from rankgrad import report

    try:
        report.write(table.rows, table.report, title=table.title, overwrite=True, only=table.runs)
    except (ImportError, ValueError) as error:
        table.report.unlink(missing_ok=True)  # an older one would show other trials
        return f"none: {error}"
    return str(table.report)
