"""The sub-commands of `rankgrad reproduce`: each reads its arguments, calls a module of this folder, prints.

Whatever is slow to import is imported inside the command that needs it, as in cli.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from rankgrad.console import Json, examples, show

app = typer.Typer(name="reproduce", rich_markup_mode=None, add_completion=False)

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")]


@app.callback(
    epilog=examples("rankgrad reproduce table2 --dataset synthetic --recipe small --rows approx_ndcg,listnet")
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
    from rankgrad.reproduce.figures import FIGURES, describe, draw, measure

    curves = FIGURES[name]()
    draw(curves, out, overwrite=overwrite)
    show({"figure": str(out), **measure(curves)}, lambda found: f"{describe(found)}\ndrawn to {out}", as_json=as_json)
