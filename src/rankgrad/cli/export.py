"""`rankgrad export`: a ranker for other programs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rankgrad.cli.options import Json, Networks, Overwrite, examples, show

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "solr": ".json", "xgboost": ".json"}
EXAMPLES = examples(
    "rankgrad export runs/first --out first.onnx",
    "rankgrad export ranker.safetensors --format torch --out first.pt2",
    "rankgrad export runs/first --format xgboost --data data/ --out trees.json",
)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run, or a file that NeuralRanker.save wrote.")],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help=f"{', '.join(SUFFIXES)}.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write. [the run's name with the format's suffix]")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="xgboost alone: lists to learn the run's scores on. [those it was trained on]"
        ),
    ] = None,
    model: Networks = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a ranker for programs without rankgrad.

    onnx and torch (torch.export's .pt2) take raw features [documents, features] float32 and sizes [lists] int64, how many
    rows each list has, and give scores [documents]: feature scaling, missing values, categories (as places in the lists that
    the file holds), list-relative inputs and averaged members are inside. solr is the JSON of a NeuralNetworkModel, which one network on plainly standardised features can
    be. xgboost grows trees that learn the run's scores.

    The file is run on 256 lists with missing, huge and equal features among them before it gets its name, and is not
    left behind where it differs from the run by more than 1e-5 max(1, score). --format onnx needs the extra `onnx`.
    """
    from rankgrad.checks import one_of

    one_of("--format", form, SUFFIXES)
    target = out or Path(f"{run.resolve().stem}{SUFFIXES[form]}")
    if form == "xgboost":
        from rankgrad.export.trees import export_trees

        show(export_trees(run, target, data, overwrite=overwrite), _describe, as_json=as_json)
        return
    if data is not None:
        raise ValueError(f"--data is for --format xgboost, and the format is {form}; leave it out")
    from rankgrad.export import export_ranker
    from rankgrad.runs.ensemble import open_run
    from rankgrad.runs.folder import TREES
    from rankgrad.runs.run import Run
    from rankgrad.training.network import import_network

    if (run / TREES).is_file():
        raise ValueError(
            f"{run} holds trees, which their own library exports; expected a run of networks; take the model file in its folder, or "
            f"distil it into a network: rankgrad distil {run} DATA --into mlp:64,32"
        )
    opened = open_run(run, "cpu", [import_network(name) for name in model or ()])
    assert isinstance(opened, Run)
    show(export_ranker(opened.ranker, target, form, overwrite=overwrite), _describe, as_json=as_json)


def _describe(written: dict[str, Any]) -> str:
    lines = [f"{written['file']}, {written['bytes'] / 1024:,.0f} KB, {written['features']} features"]
    if "checked" in written:
        checked = written["checked"]
        lines.append(
            f"scores agree with the run on {checked['documents']:,} documents of {checked['lists']} lists, to {checked['largest']:.0e}"
        )
    if "distilled" in written:
        found = written["distilled"]
        lost = "quality_low" in found and (
            f"{found['split']} {found['metric']} {found['quality_mean_a']:.4f} against {found['quality_mean_b']:.4f} of the run, "
            f"95% interval of the difference [{found['quality_low']:+.4f}, {found['quality_high']:+.4f}]"
        )
        lines.append(lost or "there are no labels to measure by")
    return "\n".join(lines)
