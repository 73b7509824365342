"""A run among other processes: joining those that torchrun started, noticing that one is lost, sending bytes, signals to stop.

Everything works alone too, where there is nobody to wait for. Only bytes are sent: torch's own way of sending objects
would load pickles.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rankgrad.errors import InterruptedRunError, OtherProcessError

T = TypeVar("T")

JOINING = timedelta(minutes=5)  # that processes which are started together may take to import what they need
# An exchange waits for whoever still works alone: reading text, writing results. It is long because a process that died closes its
# connections, and one that stands still stops beating.
WORKING = timedelta(hours=6)
BEAT = 2.0  # seconds
MISSED = 10  # beats after which a process is lost; torchrun takes another 30 s to end one that stands still
SPOKE = "spoke"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


class Heart(threading.Thread):
    """Tells the others every other second that this process lives, and ends it if one of them has not beaten for a while.

    A process that is stopped, or whose machine is frozen, closes no connection: those who wait for it would wait for hours, in
    a call that nothing can interrupt. Missed beats are counted in beats of one's own, so that all may be stopped together and go on.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        super().__init__(name="rankgrad-heart", daemon=True)
        self.remedy = ""  # what a person is told beside that a process was lost
        self.store, self._rank, self._world = store, rank, world
        self._stopping = threading.Event()
        store.set(self._key(rank), "0")
        store.wait([self._key(number) for number in range(world)], JOINING)

    @staticmethod
    def _key(number: int) -> str:
        return f"beats/{number}"

    def run(self) -> None:
        """Beat until told to stop."""
        own, missed, seen = 0, [0] * self._world, [b""] * self._world
        while not self._stopping.wait(BEAT):
            own += 1
            try:
                self.store.set(self._key(self._rank), str(own))
                beats = [self.store.get(self._key(number)) for number in range(self._world)]
            except RuntimeError:  # the process that kept the store is gone, and the others notice that by themselves
                return
            for number, beat in enumerate(beats):
                missed[number] = missed[number] + 1 if beat == seen[number] else 0
            seen = beats
            if max(missed) >= MISSED and not self._stopping.is_set():
                self._leave(missed.index(max(missed)))

    def stop(self) -> None:
        """Beat no more: whoever leaves in order has met the others at the end, or closes its connections."""
        self._stopping.set()
        self.join(BEAT)  # a store that does not answer must not hold it up

    def _leave(self, number: int) -> None:
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            if self.store.add(SPOKE, 1) == 1 and sys.stderr is not None:
                shown = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""  # a bar has hidden the cursor
                words = (
                    f"process {number} of the run has not answered for {MISSED * BEAT:.0f} s, and the others have ended"
                )
                os.write(sys.stderr.fileno(), f"{shown}rankgrad: {words}{self.remedy}\n".encode())
        os._exit(130)


_heart: Heart | None = None


def rank() -> int:
    """The number of this process, before and after joining."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if _launched() else 0


def place() -> tuple[int, int]:
    """The number of this process and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextlib.contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """Join the other processes under torchrun: (rank, world). A group that the caller has made is used and left alone."""
    global _heart
    if dist.is_initialized() or not _launched():
        yield (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        found, number, world = next(rendezvous("env://", timeout=JOINING))
        # torchrun's store lives on when it starts all processes again.
        store: Any = PrefixStore(f"rankgrad/{os.environ.get(RESTARTS, 0)}", found)
        _heart = Heart(store.clone(), number, world)
    except RuntimeError as error:
        raise InterruptedRunError(
            f"the other processes of the run did not join within {JOINING.seconds} s; expected all of them to be started together; "
            "look at what they said, and start again"
        ) from error
    _heart.start()
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backends, store=store, rank=number, world_size=world, timeout=WORKING)
        yield number, world
    except BaseException as error:
        _clear_frames(error)
        if isinstance(error, RuntimeError) and lost_a_process(error):
            raise InterruptedRunError(
                "another process of the run ended; expected all of them to stay; look at what it said, and start again"
            ) from error
        raise
    finally:
        _heart.stop()
        gc.collect()  # a gloo group that is destroyed before its DistributedDataParallel aborts now and then
        if dist.is_initialized():
            dist.destroy_process_group()
        _heart = None


def advise(remedy: str) -> None:
    """What a person is told beside that a process was lost."""
    if _heart is not None:
        _heart.remedy = remedy


def watch_no_more() -> None:
    """A process is lost and this one is about to say so: what it still has to save may take its time."""
    if _heart is not None:
        _heart.stop()


@contextlib.contextmanager
def one_message() -> Iterator[None]:
    """Of processes that fail together, or one after another, the first says why and the others leave quietly."""
    try:
        yield
    except OtherProcessError:
        raise
    except (Exception, InterruptedRunError) as error:
        if _speaks_first():
            raise
        if isinstance(error, InterruptedRunError):
            raise InterruptedRunError("", error.status) from None
        raise OtherProcessError from error


def _speaks_first() -> bool:
    if _heart is None:
        return True
    try:
        return _heart.store.add(SPOKE, 1) == 1
    except RuntimeError:  # the first process kept the store and is gone: the next one speaks
        return rank() == 1


def restarted() -> bool:
    """Whether torchrun has started the processes again after it had lost one."""
    return _launched() and os.environ.get(RESTARTS, "0") not in ("", "0")


def barrier() -> None:
    """Return when every process has come here."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # unlike dist.barrier it needs no GPU


def any_process(value: bool) -> bool:
    """Whether it is true in any process."""
    return sum_over_processes(float(value)) > 0


def sum_over_processes(value: float) -> float:
    """The sum of what the processes have."""
    if not dist.is_initialized():
        return value
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def gather_rows(tensor: Tensor) -> Tensor:
    """Rows that are dealt out among the processes in turn, put together in every process, on the CPU."""
    tensor = tensor.detach().cpu()
    world = place()[1]
    if world == 1:
        return tensor
    total = int(sum_over_processes(len(tensor)))
    padded = torch.zeros(-(-total // world), *tensor.shape[1:], dtype=tensor.dtype)
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(world)]
    as_bytes = padded.dtype == torch.bool
    if as_bytes:
        padded, parts = padded.view(torch.uint8), [part.view(torch.uint8) for part in parts]
    dist.all_gather(parts, padded)
    rows = torch.stack(parts, 1).flatten(0, 1)[:total]
    return rows.view(torch.bool) if as_bytes else rows


def from_first(make: Callable[[], T], dump: Callable[[T], bytes], load: Callable[[bytes], T]) -> T:
    """What `make` gives in the first process, in every process: dumped, sent and loaded in all but the first.

    Where it fails in the first process, the others leave quietly.
    """
    if rank() > 0:
        content = broadcast_bytes(b"")
        if not content:
            raise OtherProcessError
        return load(content)
    try:
        made = make()
    except BaseException:
        broadcast_bytes(b"")
        raise
    broadcast_bytes(dump(made))
    return made


def broadcast_bytes(content: bytes) -> bytes:
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


def place_on_machine() -> tuple[int, int]:
    """Which process of its machine this one is, and which machine of the run."""
    return int(os.environ.get("LOCAL_RANK", rank())), int(os.environ.get("GROUP_RANK", 0))


def lost_a_process(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed says that another process is gone."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "connectFullMesh failed")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


class Signals(contextlib.AbstractContextManager["Signals"]):
    """SIGTERM and Ctrl-C of a run.

    While `patient`, a signal only sets `received`, which training looks at after every step; otherwise it raises at once.
    `finished` says whether the run in a folder has ended, so that nobody is told to resume it.
    """

    def __init__(self, out: Path, finished: Callable[[Path], bool] = lambda _: False) -> None:
        self.received = False
        self.status = 130  # of the command after the signal that came: 128 and its number
        self.patient = False
        self._out, self._finished = out, finished
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Handle signals until the end of the `with`."""
        with contextlib.suppress(ValueError):  # not the main thread: its owner handles signals
            self._before = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop_at_once(self) -> None:
        """From now on a signal raises at once; so does one that has come already."""
        self.patient = False
        if self.received:
            self.handle()

    def handle(self, number: int | None = None, _: Any = None) -> None:
        """Handle a signal."""
        again, self.received = self.received, True
        self.status = self.status if number is None else 128 + number
        if self.patient and not again and not (number == signal.SIGTERM and _launched()):  # which torchrun sends
            _say("stopping after this step")
        if not self.patient:
            # With its status: it may come while the `with` is being left.
            rest = f"go on with: rankgrad train --resume {self._out}"
            if self._finished(self._out):
                rest = f"the run {self._out} is finished"
            raise InterruptedRunError(f"stopped; nothing is lost; {rest}", self.status)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InterruptedRunError):
            error.status = self.status
        for number, handler in self._before.items():
            # torchrun sends SIGTERM to all when it has lost one: a process that is leaving must still report why.
            leaving = number == signal.SIGTERM and _launched() and isinstance(error, InterruptedRunError)
            signal.signal(number, signal.SIG_IGN if leaving else handler)


def _say(sentence: str) -> None:
    """Write a line to stderr from a handler of signals, which may have interrupted another write there.

    Of several processes the first does, and no worker of another program of ours.
    """
    if rank() == 0 and multiprocessing.parent_process() is None and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed, or not a file
            erased = "\r\x1b[2K" if sys.stderr.isatty() else ""  # the bar is drawn again below
            os.write(sys.stderr.fileno(), f"{erased}rankgrad: {sentence}\n".encode())


def _launched() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _clear_frames(error: BaseException | None) -> None:
    """Drop the locals that an exception's traceback holds: a DistributedDataParallel among them must go before its group."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
