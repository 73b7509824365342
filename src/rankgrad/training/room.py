"""How many cores other programs and a container's quota leave to this process, read from Linux. Imports no torch."""

import contextlib
import math
import os
import time
from collections.abc import Collection
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")  # a container's
COUNTERS = Path("/proc/stat")  # of every core, in hundredths of a second since it began
WINDOW = 0.05  # seconds between two readings: five of the counters' units
WINDOW_OF_CORE = 0.035  # times the root of the cores, as roundings add up; not of the first window
READING = 0.01  # largest share of the time that readings may take, where there are hundreds of cores


class Room:
    """Cores that this process had or that were idle, on average of the latest window; infinite where that is not known.

    >>> Room()() > 0
    True
    """

    def __init__(self) -> None:
        self._found = float("inf")
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
        self._begin()
        self._long_enough = WINDOW

    def __call__(self) -> float:
        """A new window begins when this one is long enough."""
        if self._idle is None or (passed := time.perf_counter() - self._since) < self._long_enough:
            return self._found
        idle, had = self._idle, self._had
        self._begin()
        if self._idle is not None:
            self._found = (self._had - had + self._idle - idle) / passed
        return self._found

    def _begin(self) -> None:
        begun = time.perf_counter()
        self._idle = _idle_seconds(self._cores)
        self._since, self._had = time.perf_counter(), time.process_time()
        at_least = max(WINDOW, WINDOW_OF_CORE * len(self._cores) ** 0.5)
        self._long_enough = max(at_least, (self._since - begun) / READING)


def _idle_seconds(cores: Collection[int]) -> float | None:
    """What these cores have been idle since the system began, all together; None where nobody counts."""
    try:
        lines = COUNTERS.read_text().splitlines()
        counted = {
            name: [int(count) for count in counts] for name, *counts in map(str.split, lines) if name[:3] == "cpu"
        }
        of_ours = [counted[f"cpu{core}"] for core in cores]
    except (OSError, ValueError, KeyError):
        return None
    # user, nice, system, idle, waiting for a disk, ...; a thread may be bound to one core, and some sandboxes have a file of zeros.
    if len(of_ours) < 2 or not any(map(sum, of_ours)):
        return None
    return sum(sum(counts[3:5]) for counts in of_ours) / os.sysconf("SC_CLK_TCK")


def quota() -> float:
    """How many cores' time a container gives its processes (`docker run --cpus`); infinite where it does not say.

    >>> quota() > 0
    True
    """
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            allowed, period = " ".join((GROUP / file).read_text() for file in files).split()
            if allowed not in ("max", "-1"):
                return int(allowed) / int(period)
    return math.inf
