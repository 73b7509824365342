"""The sub-commands of `rankgrad reproduce`: each reads its arguments, calls a module of this folder, prints.

Whatever is slow to import is imported inside the command that needs it, as in cli.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rankgrad.cli.options import Json, Quiet, examples, show

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
    from rankgrad.reproduce.table1 import describe, sort_labels

    show(sort_labels(), describe, as_json=as_json)


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
    from rankgrad.reproduce.paper import FIGURES, describe, draw, measure

    curves = FIGURES[name]()
    draw(curves, out, overwrite=overwrite)
    show({"figure": str(out), **measure(curves)}, lambda found: f"{describe(found)}\ndrawn to {out}", as_json=as_json)


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
    from rankgrad.reproduce.table2 import make_table
    from rankgrad.reproduce.tables import as_text
    from rankgrad.reproduce.trials import Order

    order = Order(dataset, data, out, rows, seeds, folds, recipe, epochs, device, paper_protocol, jobs)
    _shown(make_table(order, quiet=quiet), as_text, as_json=as_json, quiet=quiet)


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
    from rankgrad.reproduce.ablations import ablate, describe_ablations
    from rankgrad.reproduce.trials import Order

    order = Order(dataset, data, out, what, seeds, folds, recipe, epochs, device, jobs=jobs)
    _shown(ablate(order, quiet=quiet), describe_ablations, as_json=as_json, quiet=quiet)


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
    from rankgrad.reproduce.ablations import add_ingredients, describe_ingredients
    from rankgrad.reproduce.trials import Order

    order = Order(dataset, data, out, None, seeds, folds, recipe, epochs, device, jobs=jobs)
    _shown(add_ingredients(order, quiet=quiet), describe_ingredients, as_json=as_json, quiet=quiet)


def _shown(result: dict[str, Any], describe: Callable[[Any], str], *, as_json: bool, quiet: bool) -> None:
    """Print what came out; cells that failed are a mistake, whatever else was reached."""
    show(result, describe, as_json=as_json, quiet=quiet)
    if result["failed"]:
        number = len(result["failed"])
        raise ValueError(f"{number} cell{'s' * (number > 1)} failed, the first: {result['failed'][0]}")
