"""The `rankgrad` command: a file for each sub-command, put together here; render turns results into text.

Importing it imports neither torch nor numpy, so that `rankgrad --help` answers at once. A mistake of the user is one sentence
on stderr and exit code 2.
"""

import os
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from rankgrad import __version__
from rankgrad.cli import (
    compare,
    demo,
    distil,
    evaluate,
    explain,
    export,
    info,
    prepare,
    rank,
    report,
    reproduce,
    synthetic,
    train,
)
from rankgrad.cli.options import examples
from rankgrad.errors import InterruptedRunError, OtherProcessError
from rankgrad.inert import inert_line
from rankgrad.training.openmp import spin_shortly

app = typer.Typer(
    name="rankgrad",
    rich_markup_mode=None,  # rich help takes 0.1 s to import; progress bars use rich all the same
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"rankgrad {__version__}")
        raise typer.Exit


@app.callback(epilog=examples("rankgrad demo", "rankgrad train data/ --loss neural_ndcg@10 --out runs/first"))
def _subcommands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train ranking models on the metric itself; measure them, compare them, rank with them."""


app.command(epilog=demo.EXAMPLES)(demo.demo)
app.command(epilog=synthetic.EXAMPLES)(synthetic.synthetic)
app.command(epilog=train.EXAMPLES)(train.train)
app.command(epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command(epilog=rank.EXAMPLES)(rank.rank)
app.command(epilog=compare.EXAMPLES)(compare.compare)
app.command(epilog=report.EXAMPLES)(report.report)
app.command(epilog=export.EXAMPLES)(export.export)
app.command(epilog=distil.EXAMPLES)(distil.distil)
app.command(epilog=explain.EXAMPLES)(explain.explain)
app.command(epilog=prepare.EXAMPLES)(prepare.prepare)
app.command(epilog=info.EXAMPLES)(info.info)
app.add_typer(reproduce.app)

# Some releases of typer bring a click of their own; this finds the one in use.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command; a mistake of the user or of the file system ends it with one sentence and code 2."""
    warnings.showwarning = _print_warning
    spin_shortly()
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
    except (
        BrokenPipeError
    ):  # the reader of our output has closed it; without this the interpreter complains at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    except OSError as error:
        _end(2, f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except ValueError as error:
        _end(2, str(error))
    except (Exception, InterruptedRunError) as error:
        _end(*_explain(error))
    if code == 130:
        _end(code, "" if _process() else "interrupted")
    sys.exit(code or 0)


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as a sentence, without the line of code that gave it."""
    if _process() == 0:
        print(f"rankgrad: warning: {inert_line(str(message))}", file=sys.stderr)


def _explain(error: Exception | InterruptedRunError) -> tuple[int, str]:
    """The exit code and the sentence of a failure that is neither a ValueError nor a defect; a defect is raised again."""
    if isinstance(error, OtherProcessError):
        return 2, ""
    if isinstance(error, InterruptedRunError):
        return error.status, str(error)
    no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's has that name
    if no_memory or "can't allocate memory" in str(error):
        remedy = "lower --batch-size or --list-size, or choose a smaller model"
        if sys.argv[1:2] == ["prepare"]:
            remedy = "end other programs, or prepare the data on a larger machine"
        return 2, f"there is not enough memory; {remedy}"
    if isinstance(error, ImportError) and "pip install" in str(error):
        return 2, str(error)
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error):  # of Path.resolve, before Python 3.13
        return 2, f"{error}; expected a file or folder; choose another path"
    raise error


def _end(code: int, sentence: str) -> NoReturn:
    """Exit with at most one line on stderr; under torchrun it says which process wrote it."""
    sender = f"rankgrad (process {_process()})" if _process() else "rankgrad"
    if sentence:
        print(f"{sender}: {inert_line(sentence)}", file=sys.stderr)
    sys.exit(code)


def _process() -> int:
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else 0
