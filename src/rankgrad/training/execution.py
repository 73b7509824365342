"""How the steps of a run are executed: what [train] asks for, what the machine and the model allow.

    resident   the train split lies in the device's memory; else its batches are gathered by a thread and copied, ahead of time
    pack       lists end to end without padding (data/packed.py)
    graph      the step recorded as CUDA graphs (cuda_graph.py)

Each is "auto", true or false. "auto" is on where it works and pays; true is an error where it cannot work. Results agree.
"""

from typing import NamedTuple

import torch
from torch import nn

from rankgrad import kernels
from rankgrad.data.dataset import GPU_SHARE, RankingDataset
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.data.packed import ROW_MULTIPLE
from rankgrad.models import Members, Transformer
from rankgrad.training.config import Train

READ = "the features are larger than the memory that is free for them: they are read and scaled batch by batch"
CHOICES = ("resident", "pack", "graph")


class ExecutionPlan(NamedTuple):
    """What is on, and for each that is off, why."""

    resident: bool
    pack: bool
    graph: bool
    why_not: dict[str, str]
    row_multiple: int = ROW_MULTIPLE  # the rows of a packed step are a multiple of this

    def without(self, **reasons: str) -> "ExecutionPlan":
        """The same with those off that have a reason."""
        off = {name: reason for name, reason in reasons.items() if reason}
        return self._replace(**dict.fromkeys(off, False), why_not=self.why_not | off)


def plan_execution(
    settings: Train, model: nn.Module, data: RankingDataset, device: torch.device, *, world: int = 1
) -> ExecutionPlan:
    """How a run of `world` processes trains."""
    cannot = obstacles(model, device) | {"resident": _too_large(data, device)}
    if world > 1:
        shared = f"it works for one process, and {world} share this run"
        cannot |= {"pack": shared, "graph": shared}
    expected = _discouraged(cannot, model, device)
    chosen: dict[str, bool] = {}
    why_not = {}
    for name in CHOICES:
        wish = getattr(settings, name)
        if wish is True and cannot[name]:
            raise ValueError(f"train.{name} = true cannot be done here: {cannot[name]}; say 'auto' or false")
        reason = "" if wish is True else "not asked for" if wish is False else expected[name]
        chosen[name] = not reason
        if reason:
            why_not[name] = reason
    # Members have no kernel that wants few shapes on a CPU; on a GPU a graph for each of a few shapes.
    members = isinstance(model, Members)
    multiple = (1 if device.type == "cpu" else 256) if members else ROW_MULTIPLE
    return ExecutionPlan(**chosen, why_not=why_not, row_multiple=multiple)


def obstacles(model: nn.Module, device: torch.device) -> dict[str, str]:
    """What keeps a machine from each of them, whatever the data; empty where nothing does.

    >>> obstacles(nn.Linear(1, 1), torch.device("cpu"))["graph"]
    'CUDA graphs need a CUDA device'
    """
    return {
        "resident": "",
        "pack": _not_packable(model, device),
        "graph": "" if device.type == "cuda" else "CUDA graphs need a CUDA device",
    }


def expectations(model: nn.Module, device: torch.device) -> dict[str, str]:
    """What "auto" leaves off on a machine and why, whatever the data; empty where it is on."""
    return _discouraged(obstacles(model, device), model, device)


def _discouraged(cannot: dict[str, str], model: nn.Module, device: torch.device) -> dict[str, str]:
    """What cannot be done, and what does not pay on a device; members are always packed."""
    on_cpu = "" if device.type == "cuda" or isinstance(model, Members) else "it does not pay on the CPU"
    ours = type(model).__module__ == Members.__module__
    own = "" if ours else "a network of your own may do what a recording does not repeat"
    reasons = {"pack": on_cpu, "graph": own}
    return {name: reason or reasons.get(name, "") for name, reason in cannot.items()}


def _too_large(data: RankingDataset, device: torch.device) -> str:
    if device.type != "cuda":
        return READ if isinstance(data.features, FeatureRows) else ""
    free, _ = torch.cuda.mem_get_info(device)
    if data.features.nbytes <= GPU_SHARE * free:
        return ""
    return f"the features take {data.features.nbytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of the device are free"


def _not_packable(model: nn.Module, device: torch.device) -> str:
    if not hasattr(model, "packed"):
        return f"{type(model).__name__} has no method packed(features, lists)"
    if isinstance(model, Transformer) and device.type == "cuda":
        return kernels.why_no_attention(device, model.head)
    return ""
