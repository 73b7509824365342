"""`rankgrad distil`: a small ranker that learns the scores of large ones."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rankgrad.checks import whole
from rankgrad.cli.options import DataSource, Json, Networks, Quiet, RunFolders, examples, expect_runs_and_data, show
from rankgrad.cli.train import follow, new_folder

EXAMPLES = examples(
    "rankgrad distil runs/first data/ --into mlp:64,32 --out runs/small",
    "rankgrad distil runs/first runs/trees data/ --into xgboost",
    "rankgrad distil runs/first unlabelled.parquet --into mlp:32",
)


def distil(
    runs: RunFolders,
    data: DataSource,
    into: Annotated[
        str, typer.Option(metavar="MODEL", help="mlp:64,32 with the sizes of its layers, linear, or xgboost.")
    ] = "mlp:64,32",
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="New folder for the run; runs/distilled-TIME if not given.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Times through the data; of trees rounds. [60; 1000]")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random follows from it. [0]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any key of config.toml; may be given many times."),
    ] = None,
    model: Networks = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a small, fast ranker on the scores of large ones.

    Several runs, of networks and of trees, teach the mean of their scores, standardised within each list. The labels of DATA
    are not learned from, and a file need not have any; where it has, they measure what was lost: the difference of the
    metric with its 95 % interval, on the test split if there is one. What comes out is a run like any other.
    """
    from rankgrad.runs.distil import distil as distilled
    from rankgrad.training.network import import_network

    expect_runs_and_data(runs, data, "learn their scores on")
    if epochs is not None:
        whole("--epochs", epochs, 1)
    given = {key: value for key, value in {"train.epochs": epochs, "train.seed": seed}.items() if value is not None}
    folder = out or new_folder("distilled")
    networks = [import_network(name) for name in model or ()]
    events = distilled(runs, data, into, folder, given=given, settings=settings or (), networks=networks)
    report = follow(events, quiet=quiet)
    if report is not None:
        show(report, describe, quiet=quiet, as_json=as_json)


def describe(report: dict[str, Any]) -> str:
    """The report of any run, what was lost and what was gained."""
    from rankgrad.cli.render import describe_report

    found = report["distilled"]
    lines = [describe_report(report)]
    if "quality_difference" in found:
        lines.append(
            f"{found['split']} {found['metric']} {found['quality_mean_a']:.4f} against {found['quality_mean_b']:.4f} of "
            f"{', '.join(found['from'])}: {found['quality_difference']:+.4f}, "
            f"95% interval [{found['quality_low']:+.4f}, {found['quality_high']:+.4f}], p = {found['quality_p_value']:.3g}"
        )
    else:
        lines.append(f"there are no labels: measured by {found['measured_by']}")
    before, after = (1e3 * found[f"seconds_{when}"] for when in ("before", "after"))
    lines.append(f"{found['times_faster']:.1f} times faster: a query takes {after:.2f} ms instead of {before:.2f} ms")
    return "\n".join(lines)
