"""The sub-commands of `rankgrad reproduce`: each reads its arguments, calls a module of this folder, prints.

Whatever is slow to import is imported inside the command that needs it, as in cli.py.
"""

import typer

from rankgrad.console import examples

app = typer.Typer(name="reproduce", rich_markup_mode=None, add_completion=False)


@app.callback(
    epilog=examples("rankgrad reproduce table2 --dataset synthetic --recipe small --rows approx_ndcg,listnet")
)
def _subcommands() -> None:
    """Make the paper's tables and figures again.

    Ours stand beside the numbers of arXiv 2102.07831.
    """
