"""`rankgrad prepare`: text files into a dataset that opens at once."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rankgrad.cli.options import Json, Quiet, examples

EXAMPLES = examples("rankgrad prepare MSLR-WEB30K/ --fold 1")


def prepare(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of an unpacked ranking dataset.")],
    dataset: Annotated[str | None, typer.Option(help="Name in the catalogue; recognised if not given.")] = None,
    fold: Annotated[int, typer.Option(help="Fold, where the dataset has folds.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where to write; FOLDER/prepared if not given.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace data prepared earlier.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn a dataset's text files into one that opens at once.

    Reads them once, checks them against the catalogue of public datasets, and writes them memory-mapped.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    from rankgrad.data.prepare import prepare as prepare_folder
    from rankgrad.training.progress import make_bar

    columns = TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with make_bar(*columns, quiet=quiet, transient=True) as bar:
        task = bar.add_task("reading")
        summary = prepare_folder(
            folder,
            dataset=dataset,
            fold=fold,
            out=out,
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(summary.as_dict(), indent=2))
    elif not quiet:
        print(f"{summary}\nwritten to {summary.folder}")
