"""Workers that die: processes under torchrun are killed, stopped or fail, and the run goes on to the same bytes."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad.runs.folder import read_per_document
from rankgrad.runs.run import train_run
from reliability.numbers import import_everything, in_processes
from reliability.promise import Promise, Tally, tally

LONGEST = 60.0  # seconds after which all processes have ended
EPOCHS, STEPS = 8, 5
# A network that takes its time, so that a random moment is one in training, and that fails where it is told to.
NETWORK = """
import os, time, torch

class Tower(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(features, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
        self.calls = 0

    def forward(self, features, mask):
        time.sleep(0.02)
        self.calls += 1
        rank, calls, kind = os.environ.get("FAILS", "- 0 -").split()
        if os.environ.get("RANK") == rank and self.calls == int(calls):
            raise OSError(5, "Input/output error", "lists.bin") if kind == "OSError" else ZeroDivisionError("a defect")
        return self.layers(features).squeeze(-1)
"""
COMMAND = [
    "-m",
    "rankgrad",
    "train",
    "synthetic:tiny",
    "--model",
    "tower:Tower",
    "--loss",
    "lambdarank@5",
    "--batch-size",
    "7",
]
COMMAND += ["--epochs", str(EPOCHS), "--threads", "1", "--device", "cpu", "--quiet", "--out", "run"]


class Workplace:
    """A folder with the network, in which every round begins anew, and what an undisturbed run leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "tower.py").write_text(NETWORK)
        sys.path.insert(0, str(folder))
        os.chdir(folder)
        done = self.torchrun()
        if done.wait():
            raise RuntimeError(self.said())
        self.whole = contents(self.run)
        self.scores = read_per_document(self.run).scores

    def torchrun(self, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start two processes anew."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, *options]
        ours = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        path = os.pathsep.join(filter(None, (str(self.folder), ours.get("PYTHONPATH"))))
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(
                [sys.executable, *launcher, *COMMAND], env=ours | {"PYTHONPATH": path}, stdout=said, stderr=said
            )

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def cleared(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)

    def wrong(self) -> str:
        """Where what is there differs from the undisturbed run."""
        found = contents(self.run)
        differs = [name for name in {*found, *self.whole} if found.get(name) != self.whole.get(name)]
        return f"{', '.join(sorted(differs))} differ from an undisturbed run" if differs else ""

    def resume(self, world: int) -> str:
        """Go on with so many processes, to the end."""
        from tower import Tower

        def work(_: Path) -> str:
            for _ in train_run(Path("run"), model=Tower):
                pass
            return ""

        with tempfile.TemporaryDirectory() as folder:
            return next(filter(None, in_processes(world, work, Path(folder))), "")


def contents(run: Path) -> dict[str, Any]:
    """The files of a run, without what tells the time, or sums up what does, or is another after the last epoch was resumed."""
    found: dict[str, Any] = {}
    for path in sorted(run.iterdir()):
        if path.name.startswith("checkpoint"):
            continue  # it holds the seconds, and the one before the last a step within an epoch where a process was lost
        if path.suffix in (".json", ".jsonl"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            timed = ("seconds", "execution", "history", "checksum")
            found[path.name] = [
                {key: value for key, value in json.loads(line).items() if key not in timed} for line in lines
            ]
        else:
            found[path.name] = path.read_bytes()
    return found


def workers(launcher: int) -> dict[int, int]:
    """By rank the processes that torchrun has started."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has just ended
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            ranks = [entry[5:] for entry in environment if entry.startswith(b"RANK=")]
            if ranks:
                found[int(ranks[0])] = int(child)
    return found


def wait_until(happens: Any, process: subprocess.Popen[bytes], seconds: float = 120) -> bool:
    """Whether it happened before the process ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        if happens():
            return True
        time.sleep(0.02)
    return False


def hit(place: Workplace, process: subprocess.Popen[bytes], rank: int, moment: float, number: int) -> float:
    """Send a signal to one worker when its run is at `moment` of its epochs; when that was."""
    history = place.run / "history.jsonl"
    epochs = lambda: len(history.read_text().splitlines()) if history.is_file() else 0  # noqa: E731
    if not wait_until(lambda: (place.run / "config.toml").is_file() and epochs() >= int(moment), process):
        return 0.0
    time.sleep((moment % 1) * 0.02 * STEPS)
    at = workers(process.pid).get(rank)
    if at is None:
        return 0.0
    os.kill(at, number)
    return time.monotonic()


def end(process: subprocess.Popen[bytes], since: float) -> str:
    """A complaint if torchrun and its workers have not ended in time."""
    left = workers(process.pid)
    try:
        process.wait(max(1.0, since + LONGEST - time.monotonic()))
    except subprocess.TimeoutExpired:
        for pid in left.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        return f"not all processes had ended after {LONGEST:.0f} s"
    return ""


def unreadable(said: str, tracebacks: int = 0) -> str:
    """A complaint unless there is one message of ours, with what to do next, beside what torchrun itself writes."""
    ours = [line for line in said.splitlines() if line.startswith(("rankgrad:", "rankgrad ("))]
    if tracebacks == 0 and len(ours) != 1:
        return f"{len(ours)} messages: {ours}"
    if said.count("Traceback (most recent call last)") != tracebacks + 1:  # torchrun ends with one of its own
        return f"{said.count('Traceback (most recent call last)')} tracebacks"
    return ""


# --- promises ---------------------------------------------------------------------------------------------------------


def try_lost(place: Workplace, draw: random.Random, kind: str) -> str:
    """One worker is killed, stopped or fails: all end, one speaks, and the run goes on to the same bytes."""
    place.cleared()
    rank, moment = draw.randrange(2), draw.uniform(0, EPOCHS - 1)
    if kind in ("OSError", "defect"):
        calls = draw.randint(1, STEPS * (EPOCHS - 1))
        begun, process = time.monotonic(), place.torchrun(FAILS=f"{rank} {calls} {kind}")
        wait_until(lambda: (place.run / "config.toml").is_file(), process)
        since = max(begun, time.monotonic()) + 5
    else:
        process = place.torchrun()
        since = hit(place, process, rank, moment, {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[kind])
        calls = 0
    complaint = end(process, since) if since else "the moment did not come"
    status, said = process.returncode, place.said()
    if not complaint and status == 0:
        complaint = "torchrun ended with status 0"
    complaint = complaint or unreadable(said, tracebacks=int(kind == "defect"))
    if not complaint and kind in ("killed", "stopped") and "--resume run" not in said:
        complaint = "the message does not say how to go on"
    complaint = complaint or place.resume(2) or place.wrong()
    when = f"call {calls}" if calls else f"epoch {moment:.2f}"
    return f"{kind}, rank {rank}, {when}: {complaint}\n{said[-2000:]}" if complaint else ""


def try_restarts(place: Workplace, draw: random.Random, kills: int) -> str:
    """The workers that torchrun starts again go on to the same bytes by themselves."""
    place.cleared()
    process = place.torchrun("--max-restarts", "3")
    moments = sorted(draw.uniform(0, EPOCHS - 1) for _ in range(kills))
    victims = [draw.randrange(2) for _ in moments]
    seen: set[int] = set()
    for moment, rank in zip(moments, victims):
        if not wait_until(lambda: workers(process.pid).get(rank) not in (None, *seen), process):  # noqa: B023
            break
        before = workers(process.pid)
        hit(place, process, rank, moment, signal.SIGKILL)
        seen |= {*before.values(), *workers(process.pid).values()}
    complaint = end(process, time.monotonic() + 120)
    if not complaint and process.returncode:
        complaint = f"torchrun ended with status {process.returncode}"
    complaint = complaint or place.wrong()
    return f"restarts after {moments}, ranks {victims}: {complaint}\n{place.said()[-2000:]}" if complaint else ""


def try_other_number(place: Workplace, draw: random.Random, world: int) -> str:
    """A run that lost a worker goes on with one process, or with three, to the same scores."""
    place.cleared()
    process, moment = place.torchrun(), draw.uniform(0, EPOCHS - 1)
    since = hit(place, process, 1, moment, signal.SIGKILL)
    complaint = (end(process, since) if since else "the moment did not come") or place.resume(world)
    if not complaint:
        apart = read_per_document(place.run).scores - place.scores
        apart = np.abs(apart - apart.mean()).max()  # where scores lie the loss leaves to rounding
        complaint = f"the scores are {apart:.1e} apart" if not apart < 1e-4 else ""
    return f"{world} processes after epoch {moment:.2f}: {complaint}" if complaint else ""


@contextlib.contextmanager
def workplace() -> Iterator[Workplace]:
    """A folder of its own."""
    import_everything()
    torch.set_num_threads(1)
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="workers-") as folder:
        try:
            yield Workplace(Path(folder))
        finally:
            os.chdir(before)


def lost_workers(times: int, seed: int) -> Tally:
    """Workers that are killed, fail or are stopped."""
    draw, kinds = random.Random(seed), ("killed", "OSError", "killed", "stopped", "defect")
    with workplace() as place:
        return tally(try_lost(place, draw, kinds[number % len(kinds)]) for number in range(times))


def restarted_workers(times: int, seed: int) -> Tally:
    """Workers that torchrun starts again."""
    draw = random.Random(seed)
    with workplace() as place:
        return tally(try_restarts(place, draw, 1 + number % 2) for number in range(times))


def other_numbers(times: int, seed: int) -> Tally:
    """Runs that go on with another number of processes."""
    draw = random.Random(seed)
    with workplace() as place:
        return tally(try_other_number(place, draw, (1, 3)[number % 2]) for number in range(times))


PROMISES = [
    Promise(
        "lost-worker",
        "one of two workers under torchrun is killed, stopped (SIGSTOP) or fails: all end within 60 s with one message, and the run "
        "goes on to the bytes of an undisturbed one",
        8,
        lost_workers,
    ),
    Promise(
        "restarted-workers",
        "`torchrun --max-restarts 3` and workers that are killed once or twice: the run ends by itself in the same bytes",
        4,
        restarted_workers,
    ),
    Promise(
        "other-number-of-workers",
        "a run that lost a worker goes on with one process or three, to the same scores up to rounding",
        2,
        other_numbers,
    ),
]
