"""`rankgrad prepare`: text files or tables into a dataset that opens at once."""

from pathlib import Path
from typing import Annotated

import typer

from rankgrad.cli.options import Json, Quiet, examples, show

EXAMPLES = examples(
    "rankgrad prepare MSLR-WEB30K/ --fold 1",
    "rankgrad prepare clicks.parquet --out clicks/ --set data.qid=query_id",
)


def prepare(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder or file of ranking data.")],
    dataset: Annotated[str | None, typer.Option(help="Name in the catalogue; recognised if not given.")] = None,
    fold: Annotated[int, typer.Option(help="Fold, where the dataset has folds.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where to write; FOLDER/prepared if not given.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace data prepared earlier.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="data.KEY=VALUE", help="What `train` would be told of the files: data.qid, ..."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn text files or tables into a dataset that opens at once.

    Reads LETOR/SVMLight text, Parquet, CSV or Arrow files once, in little memory however large they are, and writes them
    memory-mapped; `train`, `evaluate` and `rank` then read them batch by batch where they are larger than memory. Public
    datasets are compared with their published counts. In FOLDER the files are called train, vali and test, or lie as parts
    in folders of these names; a single file is all for training. The rows of a query need not be together.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    from rankgrad.data.prepare import prepare as prepare_folder
    from rankgrad.training.config import configure
    from rankgrad.training.data import columns_of
    from rankgrad.training.progress import make_bar

    for setting in settings or ():
        if not setting.strip().startswith("data."):
            raise ValueError(
                f"--set {setting} is not about the files; expected data.KEY=VALUE, such as data.qid=query_id"
            )
    wanted = columns_of(configure("synthetic", {}, settings or ()).data)
    columns = TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with make_bar(*columns, quiet=quiet, transient=True) as bar:
        task = bar.add_task("reading")
        summary = prepare_folder(
            folder,
            dataset=dataset,
            fold=fold,
            out=out,
            overwrite=overwrite,
            columns=wanted,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    show(
        summary.as_dict(),
        lambda found: f"{summary}\nwritten to {found['folder']}",
        as_json=as_json,
        quiet=quiet,
    )
