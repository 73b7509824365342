"""A run among other processes: joining those torchrun started, telling them something, and being told to leave.

Room 5: imports nothing of rankgrad. Everything works alone too, where there is nobody to wait for. What is told are bytes:
torch's own way of sending objects would load pickles.
"""

import contextlib
import gc
import os
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def rank() -> int:
    """The number of this process, before and after joining."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if _launched() else 0


@contextlib.contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Join the other processes under torchrun: (rank, world). A group that the caller has made is used and left alone."""
    if dist.is_initialized() or not _launched():
        yield (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    except BaseException as error:
        _forget_frames(error)
        raise
    finally:
        gc.collect()  # a gloo group that is destroyed before its DistributedDataParallel aborts now and then
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Return when every process is here."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # a barrier that needs no GPU


def told_by_first(content: bytes) -> bytes:
    """The first process's content, in every process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return content
    size = torch.tensor([len(content)])
    dist.broadcast(size, 0)
    payload = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        payload = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    if len(payload):
        dist.broadcast(payload, 0)
    return payload.numpy().tobytes()


def machine() -> tuple[int, int]:
    """Which process of its machine this one is, and which machine of the run."""
    return int(os.environ.get("LOCAL_RANK", rank())), int(os.environ.get("GROUP_RANK", 0))


class InterruptedRunError(Exception):
    """The run was asked to stop, or lost a process, and has saved its place."""


class Signals(contextlib.AbstractContextManager["Signals"]):
    """SIGTERM and Ctrl-C of a run: training is patient and asks `received` after every step; all else is left at once."""

    def __init__(self, out: Path) -> None:
        self.received = False
        self.patient = False
        self._out = out
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Handle signals until the end of the `with`."""
        with contextlib.suppress(ValueError):  # not the main thread: its owner handles signals
            self._before = {number: signal.signal(number, self.take) for number in (signal.SIGTERM, signal.SIGINT)}

    def impatient(self) -> None:
        """From now on leave at once, now if a signal has come already."""
        self.patient = False
        if self.received:
            self.take()

    def take(self, *_: Any) -> None:
        """Handle a signal."""
        self.received = True
        if not self.patient:
            raise InterruptedRunError(f"stopped; nothing is lost; go on with: rankgrad train --resume {self._out}")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            # torchrun sends SIGTERM to all when it has lost one: who is leaving already has a last word to say.
            leaving = number == signal.SIGTERM and _launched() and isinstance(error, InterruptedRunError)
            signal.signal(number, signal.SIG_IGN if leaving else handler)


def _launched() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _forget_frames(error: BaseException | None) -> None:
    """Let go of the locals an exception's traceback holds: the model that ties the processes together is one of them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
