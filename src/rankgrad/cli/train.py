"""`rankgrad train`: from what a person typed to a run that trains."""

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankgrad.checks import whole
from rankgrad.cli.options import SOURCES, Json, Quiet, Threads, examples, show
from rankgrad.inert import inert_line
from rankgrad.training.config import NATIVE, TREES, Config

if TYPE_CHECKING:
    from rankgrad.runs.run import Event, Finished, Started
    from rankgrad.runs.trees import Grown

DEFAULT = Config()
# What trees take where nothing else is given: the library's own objective, one of the settings, stopped by validation.
TREE_DEFAULTS = {
    "loss.name": NATIVE,
    "train.epochs": 1_000,
    "train.patience": 50,
    "members.count": 1,
    "members.keep": 1,
    "members.bag": 1,
}
AVERAGED = 5  # best settings, where more than so many are tried
EXAMPLES = examples(
    "rankgrad train synthetic --loss neural_ndcg@10 --epochs 8 --out runs/first",
    "rankgrad train data/ --loss lambdarank@10 --model mlp --patience 10",
    "rankgrad train data/ --recipe dasalc --seed 1",
    "rankgrad train data/ --model lightgbm --trials 24",
    "rankgrad train data/ --model xgboost --loss neural_ndcg@10 --bag 5",
    "rankgrad train config.toml --seed 4 --set loss.options.tau=0.5",
    "rankgrad train --resume runs/first",
    "rankgrad train --resume runs/first --epochs 200",
    "rankgrad train june/ --init runs/may --out runs/june",
    "torchrun --nproc-per-node 4 -m rankgrad train data/ --out runs/wide",
)


def train(
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help=f"{SOURCES}; or a configuration, FILE.toml.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="What is not given follows it: strong, paper, small, dasalc. [strong; paper with --model]"),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help=f"Such as lambdarank, or neural_ndcg@10 for a cut-off. [{DEFAULT.loss.name}]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"transformer, mlp or linear; boosted trees: {', '.join(TREES)}; your own: MODULE:CLASS. [{DEFAULT.model.kind}]"
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help=f"Of trees: random settings to try; of more than {AVERAGED} the best {AVERAGED} are averaged. [1]"
        ),
    ] = None,
    bag: Annotated[
        int | None,
        typer.Option(help="Splits of train and validation queries to fit models on, which are averaged. [1]"),
    ] = None,
    members: Annotated[
        int | None, typer.Option(help="Networks trained at once, the best averaged. [64 on a GPU, 16 on a CPU]")
    ] = None,
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
    threads: Threads = None,
    fold: Annotated[int | None, typer.Option(help=f"Fold, where DATA has folds. [{DEFAULT.data.fold}]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any key of config.toml; may be given many times."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Go on with a run that was interrupted; with --epochs, extend a finished one."
        ),
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Start from the weights of another run; what is not given follows it too."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a model on DATA and measure how well it ranks.

    Everything about it is kept in the folder RUN. The model learns from the train split; the validation split picks the
    best epoch (a fifth of the train queries is held out if there is none); the test split is used once, at the end. Ctrl-C
    saves and stops; --resume goes on from there, exactly. With --epochs it gives a finished run more of them.

    Boosted trees are grown by their own library, with its own objective or with --loss; epochs are then rounds. Ctrl-C finishes
    the run with the settings that have been tried.
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
        "train.init": None if init is None else str(init),
        "train.precision": precision,
        "train.threads": threads,
        "data.fold": fold,
        "members.count": members if trials is None else trials,
        "members.keep": None if trials is None else AVERAGED if trials > AVERAGED else 1,
        "members.bag": bag,
    }
    for name, number in (
        ("--epochs", epochs),
        ("--batch-size", batch_size),
        ("--members", members),
        ("--bag", bag),
        ("--threads", threads),
    ):
        if number is not None:
            whole(name, number, 1)
    given = {key: value for key, value in options.items() if value is not None}
    others = {*given} - {"train.epochs", *(["model.kind"] if model is not None and ":" in model else [])}
    if resume is not None and (data is not None or out is not None or recipe or settings or others):
        raise ValueError(
            f"--resume takes everything from {resume}/config.toml; expected no DATA and no other setting but --epochs, more for a "
            "run that is finished, and --model MODULE:CLASS for one of a network of your own"
        )
    if resume is None and data is None:
        raise ValueError("there is nothing to train on; expected DATA, a configuration file, or --resume RUN")
    from rankgrad.cli.render import describe_report
    from rankgrad.runs.folder import read_config_table
    from rankgrad.runs.run import begun_before_restart, train_run
    from rankgrad.training import distributed
    from rankgrad.training.config import configure
    from rankgrad.training.network import import_network

    if resume is not None:
        config = None
        kind = read_config_table(resume).get("model", {}).get("kind")
    else:
        if model in TREES:
            given = _given_to_trees(given, recipe, from_file=str(data).endswith(".toml"))
        base = None if init is None else _base(init, given, settings or [], recipe)
        config = configure(data or "", given, settings or [], recipe, base=base)
        kind = config.model.kind
        if trials is not None and kind not in TREES:
            raise ValueError(f"--trials is for boosted trees, and the model is {kind}; expected --model lightgbm, say")
        out = out or begun_before_restart(_name(config), config) or new_folder(_name(config))
    folder = resume or out or Path()
    more = epochs if resume is not None else None
    if kind in TREES and more is None:
        from rankgrad.runs.trees import grow_run

        report: dict[str, Any] | None = follow_trees(grow_run(folder, config), quiet=quiet)
    else:
        network = import_network(model) if resume is not None and model is not None else None
        with distributed.process_group(), distributed.one_message():
            report = follow(train_run(folder, config, epochs=more, model=network), quiet=quiet)
    if report is not None:
        show(report, describe_report, quiet=quiet, as_json=as_json)


def _given_to_trees(given: dict[str, Any], recipe: str | None, *, from_file: bool) -> dict[str, Any]:
    """The options for trees, and what they leave open; refuses what is for networks alone."""
    known = {*TREE_DEFAULTS, "model.kind", "train.seed", "train.metric", "train.threads", "data.fold"}
    others = [key.partition(".")[2].replace("_", "-") for key in given if key not in known]
    for name in [*(["recipe"] if recipe else []), *others]:
        raise ValueError(f"--{name} is for networks; expected options of boosted trees; leave it out")
    return given if from_file else TREE_DEFAULTS | given


def _base(init: Path, given: dict[str, Any], settings: list[str], recipe: str | None) -> Config:
    """The configuration that a run which starts from another follows; refuses what its weights do not allow."""
    from rankgrad.runs.folder import read_config_of
    from rankgrad.training.config import replaced
    from rankgrad.training.network import expect_own, is_own

    base = read_config_of(init)
    if recipe is not None:
        raise ValueError(
            f"--recipe {recipe} and --init {init} are two configurations; expected one; leave one of them out"
        )
    if "data.scaling" in given or any(text.strip().startswith("data.scaling") for text in settings):
        raise ValueError(f"--scaling was given with --init {init}, whose weights depend on its own; leave it out")
    if base.model.kind in TREES:
        raise ValueError(f"{init} holds trees, which have no weights to start from; expected a run of networks")
    if is_own(base.model.kind) and not is_own(str(given.get("model.kind", ""))):
        expect_own(base, None, str(init))
    for name, value in (("optimiser.restarts", ()), ("train.device", "auto"), ("train.threads", 0)):  # its own affair
        base = replaced(base, name, value)
    return base


def _name(config: Config) -> str:
    """What a new folder is called: by the loss, of trees by their library first."""
    if config.model.kind not in TREES:
        return config.loss.title
    loss = config.loss.title.removeprefix(NATIVE).strip(":").replace(":", "-")
    return "-".join(filter(None, (config.model.kind, loss)))


def follow_trees(events: "Iterator[Started | Grown | Finished]", *, quiet: bool) -> dict[str, Any] | None:
    """Grow the trees behind `events`, showing how it goes: a bar on a terminal, a line for each of the settings elsewhere."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    from rankgrad.runs.run import Finished, Started
    from rankgrad.training.progress import make_bar

    started = next(events)
    assert isinstance(started, Started)
    metric, count, best = started.config.train.metric, started.config.members.count, ""
    numbers = TextColumn("{task.fields[numbers]}", markup=False)
    bar = make_bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        numbers,
        TimeRemainingColumn(),
        quiet=quiet,
    )
    report = None
    with bar:
        task = bar.add_task(f"settings 0/{count}", total=count, numbers="growing trees")
        for event in events:
            if isinstance(event, Finished):
                report = event.report
            elif not isinstance(event, Started):
                line = f"vali {metric} {event.validation:.4f}{' best' * event.best}  {event.rounds} trees"
                best = f"{metric} {event.validation:.4f}" if event.best else best
                bar.update(task, description=f"settings {event.number}/{count}", completed=event.number, numbers=best)
                if bar.disable and not quiet:
                    print(f"settings {event.number}/{count}  {line}", file=sys.stderr, flush=True)
    return report


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

    if started.note and not quiet and rank() == 0:
        print(inert_line(started.note), file=sys.stderr, flush=True)
    watch(steps(), started.config, quiet=quiet or rank() > 0, title=title)
    return reports[0] if reports else None


def new_folder(name: str) -> Path:
    """A folder under runs/ that does not exist, named after what is run and when."""
    now = datetime.datetime.now()
    first = Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"
    return next(path for path in (first, *(Path(f"{first}-{n}") for n in range(2, 1_000))) if not path.exists())
