"""`rankgrad info`: versions, devices, the code path of each loss, optional packages."""

import importlib.util
import os
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from rankgrad.cli.options import Json, examples, show

EXAMPLES = examples("rankgrad info", "rankgrad info --json")

# what a package is for, its module, and how to install it
EXTRAS = {
    "Parquet, CSV, Arrow and frames": ("pyarrow", "pip install 'rankgrad[tables]'"),
    "text compressed with zstandard": ("zstandard", "pip install 'rankgrad[zstd]'"),
    "TensorBoard events": ("tensorboard", "pip install 'rankgrad[tensorboard]'"),
    "reports and figures": ("matplotlib", "pip install 'rankgrad[report]'"),
    "LightGBM as a rival": ("lightgbm", "pip install 'rankgrad[gbdt]'"),
    "XGBoost as a rival": ("xgboost", "pip install 'rankgrad[gbdt]'"),
    "CatBoost as a rival": ("catboost", "pip install 'rankgrad[catboost]'"),
    "a search of settings": ("optuna", "pip install 'rankgrad[tune]'"),
    "export to ONNX": ("onnxruntime", "pip install 'rankgrad[onnx]'"),
    "a service": ("fastapi", "pip install 'rankgrad[serve]'"),
    "the scikit-learn estimator": ("sklearn", "pip install 'rankgrad[sklearn]'"),
}


def info(as_json: Json = False) -> None:
    """Say what runs here: versions, devices, code paths, extras."""
    show(collect(), describe, as_json=as_json)


def collect() -> dict[str, Any]:
    """Everything, as plain values."""
    import torch

    from rankgrad.losses import LOSS_TABLE
    from rankgrad.runs.provenance import versions

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "steps": _steps(),
        "losses": {spec.name: _backend(spec.parameters) for spec in LOSS_TABLE},
        "extras": {
            purpose: {"package": module, "installed": importlib.util.find_spec(module) is not None, "install": line}
            for purpose, (module, line) in EXTRAS.items()
        },
    }


def _steps() -> dict[str, str]:
    """What [train] can have here for the paper's model, and why not otherwise."""
    import torch

    from rankgrad.models import Transformer
    from rankgrad.training.execution import expectations

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {name: reason or "on" for name, reason in expectations(Transformer(1), device).items()}


def _backend(parameters: Collection[str]) -> dict[str, str]:
    """Which path backend="auto" gives a loss with these parameters on this machine, and why."""
    import torch

    from rankgrad.kernels import why_no_numba

    if not torch.cuda.is_available() and "sort" in parameters and not why_no_numba():
        return {"backend": "numba", "why": "compiled loops on the CPU, PyTorch for float64 and other sorts"}
    if not torch.cuda.is_available():
        return {"backend": "torch", "why": "there is a Triton kernel, and no CUDA GPU here to run it"}
    if importlib.util.find_spec("triton") is None:
        return {"backend": "torch", "why": "there is a Triton kernel, and triton is not installed"}
    return {"backend": "triton", "why": "a kernel for lists of any length, PyTorch for float64"}


def describe(found: Mapping[str, Any]) -> str:
    """What `collect` found, for a person."""
    versions_line = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    gpus = ", ".join(found["gpus"]) or "none"
    lines = [
        *textwrap.wrap(f"versions  {versions_line}", 80, subsequent_indent=" " * 10),
        f"CPU       {found['cpus']} cores, {found['threads']} threads in torch",
        f"GPU       {gpus}; models train on {found['device']} unless told otherwise",
        "steps",
        *(f"  {name}: {state if state == 'on' else 'off: ' + state}" for name, state in found["steps"].items()),
        "losses",
    ]
    by_path: dict[tuple[str, str], list[str]] = {}
    for name, path in found["losses"].items():
        by_path.setdefault((path["backend"], path["why"]), []).append(name)
    for (backend, why), names in by_path.items():
        lines += [
            f"  {backend}: {why}",
            *textwrap.wrap(", ".join(names), 76, initial_indent="    ", subsequent_indent="    "),
        ]
    lines.append("extras")
    for purpose, extra in found["extras"].items():
        lines.append(f"  {purpose}: {extra['package'] if extra['installed'] else 'not installed; ' + extra['install']}")
    return "\n".join(lines)
