"""What all commands share: --json and --quiet, how examples stand in a help text, how a result is printed. Room 6.

Imports typer and, when something is printed, results.
"""

from collections.abc import Callable
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors (and what --json asks for).")]


def examples(*lines: str) -> str:
    """The end of a help text."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])  # \b: the lines stay as they are


def show(result: dict[str, Any], describe: Callable[[Any], str], *, as_json: bool, quiet: bool = False) -> None:
    """Print what a command found, for a machine or a person."""
    from rankgrad.runs.compare import as_json as to_json

    if as_json:
        print(to_json(result))
    elif not quiet:
        print(describe(result))
