"""`rankgrad train`: from what a person typed to a run that trains."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankgrad.cli.options import SOURCES, Json, Quiet, examples, show
from rankgrad.training.config import Config

if TYPE_CHECKING:
    from rankgrad.runs.run import Event

DEFAULT = Config()
EXAMPLES = examples(
    "rankgrad train synthetic --loss neural_ndcg@10 --epochs 8 --out runs/first",
    "rankgrad train data/ --loss lambdarank@10 --model mlp --patience 10",
    "rankgrad train data/ --recipe dasalc --seed 1",
    "rankgrad train config.toml --seed 4 --set loss.options.tau=0.5",
    "rankgrad train --resume runs/first",
    "torchrun --nproc-per-node 4 -m rankgrad train data/ --out runs/wide",
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
    """Train a model on DATA and measure how well it ranks.

    Everything about it is kept in the folder RUN. The model learns from the train split; the validation split picks the
    best epoch (a fifth of the train queries is held out if there is none); the test split is used once, at the end. Ctrl-C
    saves and stops; --resume goes on from there, exactly.
    """
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
    from rankgrad.cli.render import describe_report
    from rankgrad.runs.run import train_run
    from rankgrad.training.config import configure

    if resume is not None:
        events = train_run(resume)
    else:
        config = configure(data or "", given, settings or [], recipe)
        events = train_run(out or new_folder(config.loss.title), config)
    report = follow(events, quiet=quiet)
    if report is not None:
        show(report, describe_report, quiet=quiet, as_json=as_json)


def follow(events: "Iterator[Event]", *, quiet: bool, title: str = "epoch") -> dict[str, Any] | None:
    """Train the run behind `events` to its end, showing how it goes; its report, None in all processes but the first."""
    from rankgrad.runs.run import Finished, Started
    from rankgrad.training.distributed import rank
    from rankgrad.training.loop import Epoch, Step
    from rankgrad.training.progress import watch

    started = next(events)
    assert isinstance(started, Started)
    reports = []

    def steps() -> "Iterator[Step | Epoch]":
        for event in events:
            if isinstance(event, Finished):
                reports.append(event.report)
            elif isinstance(event, Step | Epoch):
                yield event

    watch(steps(), started.config, quiet=quiet or rank() > 0, title=title)
    return reports[0] if reports else None


def new_folder(name: str) -> Path:
    """A folder under runs/ that does not exist, named after what is run and when."""
    now = datetime.datetime.now()
    first = Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"
    return next(path for path in (first, *(Path(f"{first}-{n}") for n in range(2, 1_000))) if not path.exists())
