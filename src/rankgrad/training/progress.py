"""What training looks like: a live bar on a terminal, a line that is written over and over in a notebook, a line per epoch elsewhere.

Everything goes to stderr, so that stdout holds nothing but what was asked for. Where stderr is not a terminal there is
never an escape code.
"""

import contextlib
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from rankgrad.training.config import Config
from rankgrad.training.loop import Epoch, Step


def make_bar(*columns: ProgressColumn, quiet: bool, transient: bool = False) -> Progress:
    """A progress display that stays out of sight unless stderr is a terminal whose cursor can be moved."""
    return Progress(
        *columns,
        console=Console(stderr=True, force_jupyter=False),
        disable=quiet or not _is_terminal(),
        transient=transient,
        expand=not transient,
    )


def is_watched() -> bool:
    """Whether a person sees stderr as it is written, in a terminal or a notebook, and no other worker writes there too."""
    alone = (
        multiprocessing.current_process().name == "MainProcess"
        and threading.current_thread() is threading.main_thread()
    )
    return alone and (_is_terminal() or _is_notebook())


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _is_notebook() -> bool:
    return sys.stderr is not None and Console().is_jupyter


def watch(
    events: Iterable[Step | Epoch], config: Config, *, quiet: bool = False, title: str = "epoch", after: float = 0.0
) -> None:
    """Run the training behind `events` to its end and show how it goes: loss, metric, speed, time left.

    `after`: seconds before anything is shown; a bar then goes away at the end.
    """
    metric, throughput = config.train.metric, Throughput()
    epochs = config.train.epochs  # 0 until the data has been read, where it follows from that
    numbers = TextColumn("{task.fields[numbers]}", markup=False)
    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), numbers, TimeRemainingColumn()
    bar = make_bar(*columns, quiet=quiet, transient=after > 0)
    line = _Line() if not quiet and bar.disable and _is_notebook() else None
    loss, value, finished, begun, showing = "", "", 0, time.monotonic(), not after
    with contextlib.ExitStack() as shown:
        if showing:
            shown.enter_context(bar)
        task = bar.add_task(title, total=None, numbers="reading the data")
        for event in events:
            if not showing and time.monotonic() - begun >= after:
                showing = True
                shown.enter_context(bar)
            if isinstance(event, Step):
                epochs = event.epochs
                if throughput.first is None:  # a jump that is no progress of this session: the bar's clock starts here
                    bar.reset(task, total=epochs * event.steps, completed=event.epoch * event.steps)
                throughput.count(event)
                finished = event.epoch
                loss = "" if event.loss is None else f"loss {event.loss:.4f}"
            else:
                finished = event.epoch
                loss, value = _loss(event), f"{metric} {event.metric:.4f}"
                if event.stop:
                    bar.update(task, total=throughput.done)
                if bar.disable and not quiet and line is None and showing:
                    print(_line(event, metric, epochs, throughput, title), file=sys.stderr, flush=True)
            numbers_now = " ".join(filter(None, (loss, value, throughput.speed())))
            bar.update(task, description=f"{title} {finished}/{epochs}", completed=throughput.done, numbers=numbers_now)
            if line is not None and showing:
                line.write(f"{title} {finished}/{epochs}  {numbers_now}  {throughput.left(epochs)}")
        if line is not None and showing:
            line.end()


class _Line:
    """A line that takes the place of the one before, a few times a second: notebooks know no other movement."""

    def __init__(self) -> None:
        self._shown, self._width, self._text = 0.0, 0, ""

    def write(self, text: str) -> None:
        self._text = text
        if time.monotonic() - self._shown >= 0.25:
            self._show("")
            self._shown = time.monotonic()

    def end(self) -> None:
        self._show("\n")

    def _show(self, end: str) -> None:
        print(f"\r{self._text:<{self._width}}", end=end, file=sys.stderr, flush=True)
        self._width = len(self._text)


class Throughput:
    """How fast lists go by and how long the rest will take, validation included, reading the data left out."""

    def __init__(self) -> None:
        self.lists = 0  # since the clock was started
        self.first: int | None = None  # steps done when the clock was started
        self.started = 0.0
        self.done = self.steps = 0

    def count(self, step: Step) -> None:
        """Take note of a step; the first starts the clock, wherever in a resumed run it is."""
        self.steps, self.done = step.steps, step.epoch * step.steps + step.step
        if self.first is None:
            self.first, self.started = self.done, time.perf_counter()
        else:
            self.lists += step.lists

    def speed(self) -> str:
        """Lists per second, or nothing before the second step."""
        return f"{self.lists / (time.perf_counter() - self.started):,.0f} lists/s" if self.lists else ""

    def left(self, epochs: int) -> str:
        """The time until the last epoch ends, unless early stopping comes first."""
        seconds = self._seconds_per_step()
        return f"{(epochs * self.steps - self.done) * seconds:.0f} s left" if seconds else ""

    def _seconds_per_step(self) -> float:
        steps = self.done - (self.first or 0)
        return (time.perf_counter() - self.started) / steps if steps else 0.0


def _loss(epoch: Epoch) -> str:
    if math.isnan(epoch.loss):
        return "no step was taken" if epoch.skipped else "no list could be learned from"
    return f"loss {epoch.loss:.4f}"


def _line(epoch: Epoch, metric: str, epochs: int, throughput: Throughput, title: str) -> str:
    parts = (
        f"{title} {epoch.epoch}/{epochs}",
        _loss(epoch),
        f"vali {metric} {epoch.metric:.4f}{' best' if epoch.best else ''}",
        f"{epoch.skipped} step{'s' * (epoch.skipped > 1)} skipped" if epoch.skipped else "",
        throughput.speed(),
        "stopped early" if epoch.stop else throughput.left(epochs),
    )
    return "  ".join(filter(None, parts))
