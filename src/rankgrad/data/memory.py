"""How much memory the process may still take, and which copies of features that allows."""

import os
from contextlib import suppress
from pathlib import Path

SHARE = 4  # a copy may take one part in this many of what is free: there are other splits, a model and its batches
UNPACKED, MANY_TIMES = 1 << 28, 100  # a file may unpack to so many bytes, or to so many times its size
UNKNOWN = 2 << 30  # bytes taken for free where the system does not say


def affordable(size: int) -> bool:
    """Whether a copy of this many bytes is made at once; a larger one is made piece by piece, when pieces are asked for."""
    return size <= free_bytes() // SHARE


def many_times(path: Path, size: int) -> bool:
    """Whether so many bytes are a lot, and more than a hundred times those of the file they come from: no lists compress so well."""
    return size > max(UNPACKED, MANY_TIMES * path.stat().st_size)


def expect_archive(path: Path, unpacked: int) -> None:
    """Refuse compressed text when it has been unpacked to too many bytes."""
    if many_times(path, unpacked):
        raise ValueError(
            f"{path} unpacks to more than {MANY_TIMES} times its size; expected lists, which do not compress so well; unpack it "
            "yourself if it is meant to be as large"
        )


def free_bytes() -> int:
    """The least of what the machine, the container (cgroup 2) and the limits of the process (ulimit -d, -v) leave."""
    found = []
    with suppress(OSError, KeyError, ValueError):
        found.append(1024 * _fields(Path("/proc/meminfo"))["MemAvailable"])
    with suppress(OSError, KeyError, ValueError):  # a limit of "max" is none; the files it caches can be dropped again
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        found.append(limit - _fields(Path("/sys/fs/cgroup/memory.stat"))["anon"])
    with suppress(ImportError, OSError, KeyError, ValueError):
        import resource

        used = _fields(Path("/proc/self/status"))
        for limit, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            soft, _ = resource.getrlimit(limit)
            if soft != resource.RLIM_INFINITY:
                found.append(soft - 1024 * used[name])
    if not found:
        with suppress(AttributeError, ValueError, OSError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found, default=UNKNOWN))


def _fields(path: Path) -> dict[str, int]:
    """Numbers by name of a file with lines `name: number unit` or `name number`; other lines are left out."""
    pairs = (line.replace(":", " ").split()[:2] for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
