"""Processes of their own for tests, forked from a server that has imported torch once: one costs a tenth of a second."""

import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import traceback

LEFT, INTERRUPTED, REFUSED = 4, 3, 2  # exit codes of `train`; LEFT: another process has said what is wrong

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["reliability.preloaded"])  # one server for all tests of a process


def start(function, *arguments, **environment):
    """A process that calls a function of a test module."""
    process = context.Process(target=_enter, args=(function, arguments, environment))
    process.start()
    return process


def code(process, seconds=60):
    """Its exit code; a negative number is the signal that ended it."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the process did not end within {seconds} s")
    return process.exitcode


def group(function, world, *arguments):
    """Processes as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    return [start(function, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(world)]


def begin(out, config):
    """Make the folder of a run and leave it there, as a run that is killed before it has read its data."""
    from rankgrad.runs.run import train_run

    events = train_run(out, config)
    next(events)
    events.close()


def train(out, prepare=None, config=None):
    """Train a run to its end; `prepare` is called first, to set traps. Without a configuration the run is resumed."""
    from rankgrad.errors import InterruptedRunError, OtherProcessError
    from rankgrad.runs.run import train_run

    if prepare is not None:
        prepare()
    message = pathlib.Path(f"{out}.message-{os.environ.get('RANK', 0)}")
    try:
        for event in train_run(out, config):
            if prepare is not None and hasattr(prepare, "see"):
                prepare.see(event)
    except OtherProcessError:
        sys.exit(LEFT)
    except InterruptedRunError as error:
        message.write_text(str(error))
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as error:
        message.write_text(str(error))
        sys.exit(REFUSED)


class Trap:
    """Something that happens at the n-th write to the disk (fsync or rename), or at the n-th step."""

    def __init__(self, number, *, at="write", what="SIGKILL"):
        self.number, self.at, self.what, self.count = number, at, what, 0

    def __call__(self):
        if self.at == "write":
            os.fsync, pathlib.Path.replace = self._watched(os.fsync), self._watched(pathlib.Path.replace)

    def _watched(self, function):
        def watched(*arguments):
            self.count += 1
            if self.count == self.number:
                self.spring()
            return function(*arguments)

        return watched

    def see(self, event):
        if self.at == type(event).__name__.lower():
            self.count += 1
            if self.count == self.number:
                self.spring()

    def spring(self):
        if self.what == "exit":
            os._exit(1)
        if self.what == "full disk":
            raise OSError(28, "No space left on device")
        os.kill(os.getpid(), getattr(signal, self.what))


def _enter(function, arguments, environment):
    os.environ.update(environment)
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
