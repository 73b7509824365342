"""`rankgrad rank`: scores of documents."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rankgrad.cli.options import (
    DataSource,
    Networks,
    Overwrite,
    ReadingSettings,
    RunFolders,
    Split,
    Threads,
    examples,
    expect_runs_and_data,
    limit_threads,
)

EXAMPLES = examples(
    "rankgrad rank runs/first data/test.txt --out scores.txt",
    "rankgrad rank runs/first data/ --split vali --format trec --out first.run",
    "rankgrad rank runs/first runs/second data/test.txt --out together.txt",
    "rankgrad rank runs/first new.parquet --document url --format csv",
    "rankgrad rank runs/first new.txt --set data.missing=nan",
)


def rank(
    runs: RunFolders,
    data: DataSource,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write; - is stdout.")] = "-",
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="scores, trec or csv.")] = "scores",
    document: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="A table's column of document ids; that of the run if not given."),
    ] = None,
    split: Split = "test",
    threads: Threads = None,
    overwrite: Overwrite = False,
    model: Networks = None,
    settings: ReadingSettings = None,
) -> None:
    """Score every document of DATA with a run, or several.

    Gives a number per row, in the order of the input; or a TREC run file, or a table, of the ranked documents. A table needs no
    column label here. A line of the run file is QUERY Q0 DOCUMENT RANK SCORE TAG. DOCUMENT is the document's id (LETOR's
    #docid, or a table's column --document) or else its row in the input, counted from 1; TAG is the name of the run's folder.
    Equal scores are ranked in input order.

    Several runs give the mean of their scores, standardised within each list; TAG is then ensemble-of-NUMBER.
    """
    from rankgrad.cli.render import FORMATS
    from rankgrad.files import write_atomically
    from rankgrad.runs.ensemble import Ensemble
    from rankgrad.training.network import import_network

    expect_runs_and_data(runs, data, "rank")
    limit_threads(threads)
    if form not in FORMATS:
        raise ValueError(f"there is no format {form!r}; expected one of {', '.join(FORMATS)}")
    file = None if out == "-" else Path(out)
    if file is not None and file.exists() and not overwrite:
        raise ValueError(f"{file} exists already; expected a new file; choose another --out, or --overwrite")
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a folder; expected one to write {file.name} into; make it first")
    ensemble = Ensemble.open(runs, [import_network(name) for name in model or ()])
    ranker = ensemble if len(runs) > 1 else ensemble.runs[0]
    lists = ranker.read(data, split=split, labelled=False, document=document, settings=settings or ())
    tag = f"ensemble-of-{len(runs)}" if len(runs) > 1 else runs[0].resolve().name
    lines = FORMATS[form](lists, ranker.score(lists), tag)
    if file is None:
        sys.stdout.writelines(lines)
    else:
        write_atomically(file, (part.encode() for part in lines))
