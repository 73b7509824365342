"""`rankgrad` commands in processes of their own, forked from a server that has imported everything once: a tenth of a second each.

The clock that commands take their seconds from stands still in them, so that equal runs leave equal bytes.
"""

import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the server loads torch
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["reliability.preloaded"])

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
FOLDER = b"a folder"
NOBODY = 65534
CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = (
    0x20000,
    1,
    32,
    16384,
    1 << 18,
)  # of linux/sched.h, linux/mount.h
Trap = Callable[[], object]


class Ended(NamedTuple):
    """How a command ended: its status as a shell counts it, 137 for SIGKILL, and what it said."""

    status: int
    out: str
    err: str
    changes: int = 0  # of the disk, where `AtChange` counted them


@dataclass
class Running:
    """A command at work."""

    process: multiprocessing.process.BaseProcess
    log: Path

    def wait(self, seconds: float = 120) -> Ended:
        """How it ends; one that does not is killed, and its status is 124."""
        self.process.join(seconds)
        if late := self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        out, err = (self.log.with_suffix(ending).read_text(errors="replace") for ending in (".out", ".err"))
        counted = self.log.with_suffix(".count")
        changes = int(counted.read_text()) if counted.is_file() else 0
        return Ended(124 if late else code if code >= 0 else 128 - code, out, err, changes)


def start(
    words: list[str], folder: Path, trap: Trap | None = None, log: Path | None = None, **environment: str
) -> Running:
    """Start `rankgrad WORDS` in a folder; `trap` is called first in its process, what it says goes to files called `log`."""
    log = log or folder.parent / f"{folder.name}-log{environment.get('RANK', '')}"
    process = context.Process(
        target=_enter, args=([str(word) for word in words], str(folder), str(log), trap, environment)
    )
    process.start()
    return Running(process, log)


def run(words: list[str], folder: Path, trap: Trap | None = None, **environment: str) -> Ended:
    """`rankgrad WORDS` in a folder, to its end."""
    return start(words, folder, trap, **environment).wait()


def start_ranks(words: list[str], folder: Path, count: int, traps: dict[int, Trap]) -> list[Running]:
    """As torchrun would start them; a trap for some of them, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    return [
        start(words, folder, traps.get(rank), RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(count)
    ]


def stop_the_clock() -> None:
    """The seconds that runs write down are 0 from now on."""
    import rankgrad.runs.run
    import rankgrad.runs.trees

    for module in (rankgrad.runs.run, rankgrad.runs.trees):
        module.time = types.SimpleNamespace(perf_counter=lambda: 0.0)


def _enter(words: list[str], folder: str, log: str, trap: Trap | None, environment: dict[str, str]) -> None:
    for number, ending in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(f"{log}{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
    stop_the_clock()
    sys.argv = ["rankgrad", *words]
    from rankgrad.cli import main

    if trap is not None:
        trap()
    try:
        main()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        if isinstance(trap, AtChange):
            Path(f"{log}.count").write_text(str(trap.count))
        elif isinstance(trap, SmallDisk):
            trap.bring_back()


# --- what happens to them ---------------------------------------------------------------------------------------------


class AtChange:
    """A signal just before the n-th change of the disk: a file opened to be written, synced, renamed, removed, a folder made.

    Number 0 is never reached: the changes are counted.
    """

    def __init__(self, number: int, what: int = signal.SIGKILL) -> None:
        self.number, self.what, self.count = number, what, 0

    def __call__(self) -> None:
        sync, look_up = os.fsync, ctypes.CDLL.__getattr__

        def synced(number: int) -> None:
            self._see()
            sync(number)

        def looked_up(library: ctypes.CDLL, name: str) -> object:
            if name == "renameat2":  # two folders change their names
                self._see()
            return look_up(library, name)

        os.fsync = synced
        ctypes.CDLL.__getattr__ = looked_up  # type: ignore[method-assign]
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES or (event == "open" and _writes(arguments)):
            self._see()

    def _see(self) -> None:
        self.count += 1
        if self.count == self.number:
            os.kill(os.getpid(), self.what)


def _writes(arguments: tuple[object, ...]) -> bool:
    _, _, flags = arguments
    return isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) != 0


class InWrite:
    """Killed by the kernel inside of the write that would make a file larger than so many bytes; what fits is written."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and writes fail instead
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


class SizeLimit:
    """No file may become larger: writes fail, as Python has it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


class Nobody:
    """Another user, who may read everything and write nothing; without a home."""

    def __call__(self) -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.environ.pop("HOME", None)


class SmallDisk:
    """The folder lies on a disk of its own on which so many bytes are free, none, or which is read-only (None).

    The disk is this process's alone and gone with it; what was on it is in the folder again.
    """

    def __init__(self, folder: Path, free: int | None) -> None:
        self.folder, self.free = folder, free

    def __call__(self) -> None:
        before = contents(self.folder)
        libc = ctypes.CDLL(None, use_errno=True)
        size = 64 << 20 if self.free is None else sum(map(len, before.values())) + 4096 * (len(before) + 4) + self.free
        self._expect(libc.unshare(CLONE_NEWNS))
        self._expect(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        self.outside = os.open(self.folder, os.O_RDONLY)  # below the disk
        disk = b"tmpfs", os.fsencode(self.folder), b"tmpfs"
        self._expect(libc.mount(*disk, 0, b"size=%d" % size))
        restore(self.folder, before)
        if self.free is None:
            self._expect(libc.mount(*disk, MS_REMOUNT | MS_RDONLY, b"size=%d" % size))
        os.chdir(self.folder)

    def bring_back(self) -> None:
        """Put what the disk holds where it can be seen."""
        after = contents(self.folder)
        os.chdir("/")
        below = Path(f"/proc/self/fd/{self.outside}")
        for path in below.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        restore(below, after)

    def _expect(self, result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), "no disk of its own can be made here")


def own_disks() -> bool:
    """Whether a process may have disks of its own here."""
    return (
        os.getuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


def restore(folder: Path, found: dict[str, bytes]) -> None:
    """Write what `contents` read."""
    for name, content in found.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content == FOLDER:
            (folder / name).mkdir(exist_ok=True)
        else:
            (folder / name).write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too; folders without any as well."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else FOLDER
        for path in sorted(folder.rglob("*"))
    }


def difference(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """The first thing that is not the same, "" where there is none."""
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            state = "is missing" if name not in found else "should not be there" if name not in expected else "differs"
            return f"{name} {state}"
    return ""
