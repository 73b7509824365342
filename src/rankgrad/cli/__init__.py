"""The `rankgrad` command: reads its arguments, calls the library, prints. Everything else is done elsewhere.

Whatever is slow to import (torch, numba, the data readers) is imported inside the command that needs it, so that
`rankgrad --help` answers at once. A mistake of the user is one sentence on stderr and exit code 2.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from rankgrad import __version__
from rankgrad.cli.options import Json, Quiet, examples, show
from rankgrad.cli.reproduce import app as reproduce
from rankgrad.training.config import Config

app = typer.Typer(
    name="rankgrad",
    rich_markup_mode=None,  # rich help takes 0.1 s to import; progress bars use rich all the same
    add_completion=False,
    pretty_exceptions_enable=False,
)
DEFAULT = Config()

Split = Annotated[str, typer.Option(help="Which split, where DATA has splits; all of it where it has none.")]
RunFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="Finished runs, made by `rankgrad train`: one, or several that score together.",
        default_factory=list,  # else one argument alone would be DATA, and the sentence that RUN is missing
        show_default=False,
    ),
]
SOURCES = (
    "A LETOR/SVMLight file or folder, a Parquet or CSV file with the columns label and qid, what `rankgrad prepare` "
    "wrote, or synthetic[:SIZE]"
)
DataSource = Annotated[str, typer.Argument(metavar="DATA", help=f"{SOURCES}.")]


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"rankgrad {__version__}")
        raise typer.Exit


@app.callback(epilog=examples("rankgrad demo", "rankgrad train data/ --loss neural_ndcg@10 --out runs/first"))
def _subcommands(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train ranking models on the metric itself; judge them, compare them, rank with them."""


@app.command(epilog=examples("rankgrad demo", "rankgrad demo --out runs/my-demo --json"))
def demo(
    out: Annotated[Path | None, typer.Option(help="New folder for the runs; runs/demo-TIME if not given.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train four small models on made-up data in about a minute.

    NeuralNDCG@10, LambdaRank@10 and ListNet each train a small Transformer that sees whole lists; the linear model shows
    how much of the ranking a weighted sum of features can explain.
    """
    from rankgrad.cli.demo import compete, describe, recipes
    from rankgrad.cli.train import new_folder

    results = compete(new_folder("demo") if out is None else out, recipes(), quiet=quiet)
    show(results, describe, quiet=quiet, as_json=as_json)


@app.command(
    epilog=examples(
        "rankgrad train synthetic --loss neural_ndcg@10 --epochs 8 --out runs/first",
        "rankgrad train data/ --loss lambdarank@10 --model mlp --patience 10",
        "rankgrad train data/ --recipe dasalc --seed 1",
        "rankgrad train config.toml --seed 4 --set loss.options.tau=0.5",
        "rankgrad train --resume runs/first",
        "torchrun --nproc-per-node 4 -m rankgrad train data/ --out runs/wide",
    )
)
def train(
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help=f"{SOURCES}; or a configuration, FILE.toml.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="What is not given follows it: paper, small, dasalc. [paper]")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help=f"Such as lambdarank, or neural_ndcg@10 for a cut-off. [{DEFAULT.loss.name}]")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"transformer, mlp or linear. [{DEFAULT.model.kind}]")] = None,
    epochs: Annotated[int | None, typer.Option(help=f"Times through the data. [{DEFAULT.train.epochs}]")] = None,
    seed: Annotated[int | None, typer.Option(help=f"Everything random follows from it. [{DEFAULT.train.seed}]")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="New folder for the run; runs/LOSS-TIME if not given.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help=f"Learning rate. [{DEFAULT.optimiser.lr}]")] = None,
    batch_size: Annotated[int | None, typer.Option(help=f"Lists per step. [{DEFAULT.train.batch_size}]")] = None,
    list_size: Annotated[
        int | None, typer.Option(help=f"Longer lists are sampled down in training. [{DEFAULT.data.list_size}]")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help=f"auto, web30k, symlog, standard, quantile, none. [{DEFAULT.data.scaling}]")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many epochs without a better metric. [never]")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help=f"Validation metric that picks the best epoch. [{DEFAULT.train.metric}]")
    ] = None,
    device: Annotated[str | None, typer.Option(help=f"auto, cpu, cuda, cuda:1, ... [{DEFAULT.train.device}]")] = None,
    precision: Annotated[str | None, typer.Option(help=f"float32, tf32, bf16. [{DEFAULT.train.precision}]")] = None,
    fold: Annotated[int | None, typer.Option(help=f"Fold, where DATA has folds. [{DEFAULT.data.fold}]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any key of config.toml; may be given many times."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that was interrupted; nothing else is needed.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a model on DATA and judge it.

    Everything about it is kept in the folder RUN. The train split teaches, the validation split picks the best epoch (a fifth of the train queries is held out if there
    is none), the test split is judged once, at the end. Ctrl-C saves and stops; --resume goes on from there, exactly.
    """
    from rankgrad.cli.train import configure, start, train_to_the_end
    from rankgrad.runs.compare import describe_report

    options: dict[str, Any] = {
        "loss.name": loss,
        "model.kind": model,
        "train.epochs": epochs,
        "train.seed": seed,
        "optimiser.lr": lr,
        "train.batch_size": batch_size,
        "data.list_size": list_size,
        "data.scaling": scaling,
        "train.patience": patience,
        "train.metric": metric,
        "train.device": device,
        "train.precision": precision,
        "data.fold": fold,
    }
    given = {key: value for key, value in options.items() if value is not None}
    if resume is not None and (data is not None or out is not None or recipe or given or settings):
        raise ValueError(f"--resume takes everything from {resume}/config.toml; expected no DATA and no other setting")
    if resume is None and data is None:
        raise ValueError("there is nothing to train on; expected DATA, a configuration file, or --resume RUN")
    report = train_to_the_end(
        lambda: resume or start(configure(data or "", given, settings or [], recipe), out),
        fresh=resume is None,
        quiet=quiet,
    )
    if report is not None:
        show(report, describe_report, quiet=quiet, as_json=as_json)


@app.command(
    epilog=examples(
        "rankgrad evaluate runs/first data/",
        "rankgrad evaluate runs/first new.csv --metric ndcg@5 --metric precision@1",
        "rankgrad evaluate runs/first runs/second data/",
    )
)
def evaluate(
    runs: RunFolders,
    data: DataSource,
    split: Split = "test",
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="Such as ndcg@10 or map; may be given many times. [those of the run]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge runs on DATA: metrics and bootstrap intervals.

    Every metric is given under three rules for empty queries, with a 95 % interval. An empty query has no relevant document, so that no ranking of it is right or wrong. Some count it as 1, some as 0,
    some leave it out, and the choice can move a metric by more than a better model would.

    Several runs are judged as one ranker: the mean of their scores, standardised within each list.
    """
    from rankgrad.runs.compare import describe_judgement, judge_runs

    _expect_both(runs, data, "judge")
    show(judge_runs(runs, data, split, metric or ()), describe_judgement, as_json=as_json)


@app.command(
    epilog=examples(
        "rankgrad rank runs/first data/test.txt --out scores.txt",
        "rankgrad rank runs/first data/ --split vali --format trec --out first.run",
        "rankgrad rank runs/first runs/second data/test.txt --out together.txt",
    )
)
def rank(
    runs: RunFolders,
    data: DataSource,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write; - is stdout.")] = "-",
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="scores or trec.")] = "scores",
    split: Split = "test",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
) -> None:
    """Score every document of DATA with a run, or several.

    Gives a number per row, in the order of the input, or a TREC run file. A table needs no column label here. A line of the run file is QUERY Q0 DOCUMENT RANK SCORE TAG. DOCUMENT is the document's row in the input, counted from
    1; TAG is the name of the run's folder. Equal scores are ranked in input order.

    Several runs give the mean of their scores, standardised within each list; TAG is then ensemble-of-NUMBER.
    """
    from rankgrad.files import write_atomically
    from rankgrad.runs.compare import FORMATS
    from rankgrad.runs.ensemble import Ensemble

    _expect_both(runs, data, "rank")
    if form not in FORMATS:
        raise ValueError(f"there is no format {form!r}; expected one of {', '.join(FORMATS)}")
    file = None if out == "-" else Path(out)
    if file is not None and file.exists() and not overwrite:
        raise ValueError(f"{file} exists already; expected a new file; choose another --out, or --overwrite")
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a folder; expected one to write {file.name} into; make it first")
    ensemble = Ensemble.open(runs)
    ranker = ensemble if len(runs) > 1 else ensemble.runs[0]
    lists = ranker.read(data, split=split, labelled=False)
    tag = f"ensemble-of-{len(runs)}" if len(runs) > 1 else runs[0].resolve().name
    lines = FORMATS[form](lists, ranker.score(lists), tag)
    if file is None:
        sys.stdout.writelines(lines)
    else:
        write_atomically(file, "".join(lines).encode())


def _expect_both(runs: list[Path], data: str, what: str) -> None:
    if not runs:
        raise ValueError(f"{data} stands alone; expected RUN and DATA: finished runs, then the lists to {what}")


@app.command(
    epilog=examples("rankgrad compare runs/first runs/second", "rankgrad compare runs/first runs/second --metric map")
)
def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of a finished run.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Folder of another, judged on the same queries.")],
    metric: Annotated[str, typer.Option(help="One that both runs report.")] = "ndcg@10",
    as_json: Json = False,
) -> None:
    """Is one run better than another, or was it luck?

    The two are paired over the queries both were judged on. Gives the mean difference with its 95 % bootstrap interval, the p-value of a two-sided permutation test, and how many
    queries each run wins. Empty queries, where no ranking is better than another, are left out.
    """
    from rankgrad.runs.compare import compare_runs, describe_comparison

    show(compare_runs(run_a, run_b, metric), describe_comparison, as_json=as_json)


@app.command(
    epilog=examples("rankgrad report runs/first", "rankgrad report runs/first runs/second --out comparison.html")
)
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of finished runs judged on the same queries.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write.")] = Path("report.html"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write a page to look at: metrics, curves, queries.

    One HTML file that needs nothing else. The other runs are compared with the first, query by query. A RUN may also be a folder with several runs below it (seeds, folds), which
    are taken together: averaged where they were judged on the same queries, joined where not.
    """
    from rankgrad.report import tell, write

    size = write(runs, out, overwrite=overwrite)
    told = {"report": str(out), "bytes": size, **(tell(runs) if as_json else {})}
    show(told, lambda _: f"{out}, {size / 1024:.0f} KB: open it in a browser", as_json=as_json)


@app.command(epilog=examples("rankgrad prepare MSLR-WEB30K/ --fold 1"))
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


@app.command(epilog=examples("rankgrad info", "rankgrad info --json"))
def info(as_json: Json = False) -> None:
    """Say what runs here: versions, devices, code paths, extras."""
    from rankgrad.cli.info import describe, look

    show(look(), describe, as_json=as_json)


app.add_typer(reproduce)


# --- mistakes ---------------------------------------------------------------------------------------------------------

# Some releases of typer bring a click of their own; this finds the one in use.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command; a mistake of the user or of the file system ends it with one sentence and code 2."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="rankgrad", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk or a closed pipe shows itself here
    except _UsageError as error:
        help_of = error.ctx.command_path if error.ctx else "rankgrad"
        sentence = error.format_message().rstrip(".")
        _end(2, f"{sentence[:1].lower()}{sentence[1:]}; see {help_of} --help")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # whoever read our output has had enough, and the interpreter would complain as it leaves
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    except OSError as error:
        _end(2, f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except ValueError as error:
        _end(2, str(error))
    except Exception as error:
        _end(*_explain(error))
    if code == 130:
        _end(code, "" if _process() else "interrupted")
    sys.exit(code or 0)


def _explain(error: Exception) -> tuple[int, str]:
    """The exit code and the sentence of what is no ValueError and no defect; a defect goes on as it is."""
    kind = type(error).__name__  # by name: importing torch to ask would take a second
    if kind == "SilentError":
        return 2, ""
    if kind == "InterruptedRunError":  # all processes were asked to stop and the first says so, or another one was lost
        return 130, str(error) if _process() == 0 or error.__cause__ else ""
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return 2, "there is not enough memory; lower --batch-size or --list-size, or choose a smaller model"
    if isinstance(error, ImportError) and "pip install" in str(error):
        return 2, str(error)
    raise error


def _end(code: int, sentence: str) -> NoReturn:
    """Leave with at most one line on stderr; under torchrun it says which process speaks."""
    speaker = f"rankgrad (process {_process()})" if _process() else "rankgrad"
    if sentence:
        print(f"{speaker}: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)


def _process() -> int:
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else 0
