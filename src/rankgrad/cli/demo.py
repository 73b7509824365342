"""`rankgrad demo`: three losses and a linear model on made-up data, a minute on two cores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rankgrad.cli.options import Json, Quiet, as_typed, examples, show
from rankgrad.cli.train import follow, new_folder
from rankgrad.training.config import Config, Data, Loss, Model, Optimiser, Train

EXAMPLES = examples("rankgrad demo", "rankgrad demo --out runs/my-demo --json")
METRICS = ("ndcg@5", "ndcg@10", "map", "mrr")
RULE = "empty=0"


def demo(
    out: Annotated[Path | None, typer.Option(help="New folder for the runs; runs/demo-TIME if not given.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train four small models on made-up data in about a minute.

    NeuralNDCG@10, LambdaRank@10 and ListNet each train a small Transformer that sees whole lists; the linear model shows
    how much of the ranking a weighted sum of features can explain.
    """
    results = compete(new_folder("demo") if out is None else out, recipes(), quiet=quiet)
    show(results, describe, quiet=quiet, as_json=as_json)


def recipes(data: str = "synthetic:small", epochs: int = 8) -> dict[str, Config]:
    """What is trained, by name. One thread: small models gain little from two, and the numbers are the same everywhere."""
    transformer = Model(width=64, layers=2, heads=2, feedforward=128)
    rivals = {
        "neural_ndcg@10": (transformer, 3e-3),
        "lambdarank@10": (transformer, 3e-3),
        "listnet": (transformer, 3e-3),
        "linear": (Model(kind="linear"), 1e-2),
    }
    return {
        name: Config(
            data=Data(path=data),
            model=model,
            loss=Loss("neural_ndcg@10" if name == "linear" else name),
            optimiser=Optimiser(lr=lr, schedule="cosine"),
            train=Train(epochs=epochs, batch_size=32, device="cpu", threads=1, metrics=METRICS),
        )
        for name, (model, lr) in rivals.items()
    }


def compete(out: Path, rivals: Mapping[str, Config], *, quiet: bool) -> dict[str, Any]:
    """Train each in a folder of its own; their reports by name."""
    from rankgrad.runs.run import train_run

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; expected a new folder; choose another --out")
    width = max(map(len, rivals))
    reports = {}
    for name, config in rivals.items():
        reports[name] = follow(train_run(out / name, config), quiet=quiet, title=name.ljust(width))
    return {"runs": str(out), "rule": RULE, "reports": reports}


def describe(results: Mapping[str, Any]) -> str:
    """The table of the test split, and what to do next."""
    from rankgrad.runs.text import table

    rows = [("trained with", "model", *METRICS, "seconds")]
    for name, report in results["reports"].items():
        means = report["metrics"]["test"]
        model = "linear" if name == "linear" else "transformer"
        numbers = (f"{means[metric][RULE]:.4f}" for metric in METRICS)
        rows.append((report["loss"], model, *numbers, f"{report['seconds']:.1f}"))
    queries = next(iter(results["reports"].values()))["splits"]["test"]["queries"]
    command = as_typed()
    return (
        f"{table(rows)}\n"
        f"{queries} test queries of made-up data; those without a relevant document count 0\n"
        f"the runs are in {results['runs']}\n"
        "look closer:\n"
        f"  {command} report {results['runs']}/*\n"
        f"  {command} evaluate {results['runs']}/listnet synthetic\n"
        "go on with files, these or your own (LETOR text, Parquet, CSV):\n"
        f"  {command} synthetic --out data/\n"
        f"  {command} train data/ --loss neural_ndcg@10"
    )
