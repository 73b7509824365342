"""The `rankgrad` command: reads its arguments, calls the library, prints. Everything else is done elsewhere.

Whatever is slow to import (torch, numba, the data readers) is imported inside the command that needs it, so that
`rankgrad --help` answers at once. A mistake of the user is one sentence on stderr and exit code 2.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="rankgrad",
    help="Train ranking models on the metric itself.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich help takes 0.1 s to import; progress bars use rich all the same
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _subcommands() -> None:
    """Train ranking models on the metric itself."""  # a callback keeps `rankgrad prepare` a subcommand


@app.command()
def prepare(
    folder: Annotated[Path, typer.Argument(help="Folder of an unpacked ranking dataset.")],
    dataset: Annotated[str | None, typer.Option(help="Name in the catalogue; recognised if not given.")] = None,
    fold: Annotated[int, typer.Option(help="Fold, where the dataset has folds.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where to write; FOLDER/prepared if not given.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace data prepared earlier.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Read a dataset's text files once, check them against the catalogue, and write them memory-mapped."""
    import json

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from rankgrad.data.catalogue import prepare as prepare_folder

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    )
    with bar:
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


def main() -> None:
    """Run the command; a mistake of the user or of the file system ends it with one sentence and code 2."""
    try:
        app()
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        _refuse(str(error))


def _refuse(sentence: str) -> None:
    print(f"rankgrad: {sentence}", file=sys.stderr)
    sys.exit(2)
