"""Cells on several processes: each has imported torch once, takes a cell at a time, and saves its place when told to stop.

Imports cells. Processes come from a server that is started before anything else is, so that none inherits a lock or a GPU.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rankgrad.reproduce.cells import Cell, fill
from rankgrad.training.distributed import InterruptedRunError

Outcome = tuple[Cell, dict[str, Any] | ValueError]
PATIENCE = 60  # seconds a process that was told to stop may take to save


def filled(cells: Sequence[Cell], jobs: int) -> Iterator[Outcome]:
    """Every cell as it is finished, with its line or what went wrong with it alone.

    One job is this process. Ctrl-C and SIGTERM stop all of them after the step they are at.
    """
    if jobs == 1 or len(cells) <= 1:
        for cell in cells:
            yield cell, _tried(cell)
        return
    with _told_to_stop(), _Workers(min(jobs, len(cells))) as workers:
        waiting = list(reversed(cells))
        while waiting or workers.busy:
            while waiting and workers.idle:
                workers.give(waiting.pop())
            yield from workers.finished()


@contextlib.contextmanager
def _told_to_stop() -> Iterator[None]:
    """SIGTERM as Ctrl-C, where signals can be heard: in the first thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tried(cell: Cell) -> dict[str, Any] | ValueError:
    """A cell's line, or what is wrong with this cell alone, such as numbers that are not finite."""
    try:
        return fill(cell)
    except (ValueError, MemoryError, RuntimeError) as error:
        return ValueError(f"{cell}: {error or 'there is not enough memory'}")


class _Workers(contextlib.AbstractContextManager["_Workers"]):
    """Processes that fill cells."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rankgrad.reproduce.cells"])
        self.idle: list[tuple[BaseProcess, Connection]] = []
        self.busy: dict[Connection, tuple[BaseProcess, Cell]] = {}
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.idle.append((process, ours))

    def give(self, cell: Cell) -> None:
        """Let an idle process fill a cell."""
        process, connection = self.idle.pop()
        connection.send(cell)
        self.busy[connection] = process, cell

    def finished(self) -> Iterator[Outcome]:
        """Wait until some process has something to say."""
        for connection in wait(list(self.busy)):
            assert isinstance(connection, Connection)
            process, cell = self.busy.pop(connection)
            try:
                outcome = connection.recv()
            except (EOFError, ConnectionError):
                process.join()
                raise InterruptedRunError(
                    f"the process at {cell} was killed (exit code {process.exitcode}), for want of memory perhaps"
                ) from None
            self.idle.append((process, connection))
            if isinstance(outcome, InterruptedRunError | OSError):  # that concerns all of them
                raise outcome
            yield cell, outcome

    def __exit__(self, *_: object) -> None:
        for connection in [connection for _, connection in self.idle]:
            connection.close()  # there is nothing more to do: the process ends and cleans up behind it
        busy = [process for process, _ in self.busy.values()]
        for process in busy:
            process.terminate()  # SIGTERM: a run saves its place
        for process in [*busy, *(process for process, _ in self.idle)]:
            process.join(PATIENCE)


def _work(connection: Connection) -> None:
    """Fill cells until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the first process tells the others what to do
    threading.Thread(target=_follow, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            cell = connection.recv()
            try:
                connection.send(_tried(cell))
            except (InterruptedRunError, OSError) as error:
                connection.send(error)
                return


def _follow() -> None:
    """Stop when the first process has ended, however it did."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
