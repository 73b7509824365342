"""`rankgrad synthetic`: made-up lists as files, to try everything with."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rankgrad.cli.options import Json, Quiet, as_typed, examples, show

EXAMPLES = examples("rankgrad synthetic --out data/", "rankgrad synthetic --out data/ --size tiny --format parquet")


class Format(StrEnum):
    """How lists are written."""

    letor = "letor"
    parquet = "parquet"


def synthetic(
    out: Annotated[Path, typer.Option(help="New folder for the files train, vali and test.")],
    size: Annotated[
        str, typer.Option(help="tiny, small, web30k, istella or istella-full: 50 queries to 38,823.")
    ] = "small",
    file_format: Annotated[Format, typer.Option("--format", help="Text as LETOR has it, or tables.")] = Format.letor,
    seed: Annotated[int, typer.Option(help="Which sample of queries and documents.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write made-up lists as files that `rankgrad train` takes.

    The lists resemble MSLR-WEB30K: 136 features of mixed scale, labels 0 to 4, a few queries without a relevant document.
    """
    from rankgrad.data.catalogue import SPLITS
    from rankgrad.data.synthetic import synthetic as make
    from rankgrad.data.write import write_splits

    counts = write_splits(out, ((split, make(size, split, seed)) for split in SPLITS), file_format)
    show({"folder": str(out), "splits": counts}, describe, quiet=quiet, as_json=as_json)


def describe(result: dict[str, Any]) -> str:
    """What was written, and what to do with it."""
    splits = result["splits"].items()
    lines = [f"{split:5}  {facts['queries']:6,} queries  {facts['documents']:9,} documents" for split, facts in splits]
    return "\n".join([*lines, f"written to {result['folder']}", f"go on: {as_typed()} train {result['folder']}"])
