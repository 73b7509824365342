"""Options and arguments that commands share, the examples of a help text, how a result is printed.

Whatever is slow to import (torch, numba, the data readers) is imported inside the command that needs it, so that
`rankgrad --help` answers at once.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rankgrad.checks import whole
from rankgrad.inert import inert, inert_values

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors (and what --json asks for).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")]
Split = Annotated[str, typer.Option(help="Which split, where DATA has splits; all of it where it has none.")]
Threads = Annotated[
    int | None, typer.Option(metavar="NUMBER", help="CPU threads. [as many as the work is worth, at most all cores]")
]
ReadingSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="data.KEY=VALUE",
        help="How DATA is read, where it is otherwise than in training: data.missing=nan.",
    ),
]
RunFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="Finished runs of `rankgrad train`, or files that NeuralRanker.save wrote: one, or several that score together.",
        default_factory=list,  # one argument alone is then DATA, and `expect_runs_and_data` says that RUN is missing
        show_default=False,
    ),
]
Networks = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODULE:CLASS",
        help="A network of your own that RUN was trained with. It is imported: runs hold no code.",
    ),
]
SOURCES = (
    "A LETOR/SVMLight file or folder, a Parquet or CSV file with the columns label and qid, what `rankgrad prepare` "
    "wrote, or synthetic[:SIZE]"
)
DataSource = Annotated[str, typer.Argument(metavar="DATA", help=f"{SOURCES}.")]


def examples(*lines: str) -> str:
    """The end of a help text."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])  # \b: the lines stay as they are


def as_typed() -> str:
    """`rankgrad` as it must be typed to call this program again: its name if the shell finds it, else as it was called."""
    called = sys.argv[0]
    if os.path.basename(called) == "__main__.py":
        return f"{sys.orig_argv[0]} -m rankgrad"
    found = shutil.which("rankgrad")
    return "rankgrad" if found and os.path.exists(called) and os.path.samefile(found, called) else called


def show(result: dict[str, Any], describe: Callable[[Any], str], *, as_json: bool, quiet: bool = False) -> None:
    """Print what a command found, for a machine or a person; names in it are inert."""
    from rankgrad.runs.text import as_json as to_json

    if as_json:
        print(to_json(result))
    elif not quiet:
        print("\n".join(map(inert, describe(inert_values(result)).split("\n"))))


def limit_threads(threads: int | None) -> None:
    """Let torch take at most so many; nothing changes without a number."""
    if threads is not None:
        import torch

        torch.set_num_threads(whole("--threads", threads, 1))


def expect_runs_and_data(runs: list[Path], data: str, what: str) -> None:
    """Refuse a lone argument: it was taken for DATA, and the runs are missing."""
    if not runs:
        raise ValueError(
            f"RUN is missing before {data}; expected RUN and DATA: finished runs, then the lists to {what}"
        )
