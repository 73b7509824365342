"""By how many threads each step of training is done on the CPU, and how these wait for each other, learned from the steps before it.

What it may choose among is said by `threads`, which also does what is chosen. Nothing here touches torch: steps come in as numbers.
"""

import math
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

WANTED, OF_EACH = 0.35, 0.1  # cores that idle machines may lack, in all and for each thread: none is quite idle
SHARE, SHARE_AMONG_SEVERAL = 0.85, 0.72  # of a core that a step's thread has there; one of several also waits
STEP_ITSELF = 250  # documents that take as long as what every step takes
PAIRS_ITSELF = 350  # documents of a list in which pairs take as long as the documents themselves
SLOWER, SUDDENLY, FAR_SLOWER = 1.5, 2.0, 3.0  # times what is usual: signs of others, of anything; a trial in vain
LOST = 0.1  # seconds that such a trial may have cost


@dataclass(frozen=True)
class Way:
    """How torch's threads work together: so many, and whether they soon sleep while they wait for each other, or spin."""

    threads: int
    asleep: bool = False


class Pace(NamedTuple):
    """What a step took: seconds for its work, the share of them in which its thread had a core, and how many there were for it (`room`)."""

    seconds: float
    work: float
    share: float
    room: float = math.inf

    @property
    def relative(self) -> float:
        return self.seconds / self.work


def work_of(documents: int, padded_to: int = 0) -> float:
    """About what a step has to do, so that steps of any size can be compared, in documents of short lists.

    Where lists are padded, documents of long ones take longer: attention and many losses see pairs.
    """
    return STEP_ITSELF + documents * (1 + padded_to / PAIRS_ITSELF)


WINDOW = 0.1  # seconds, or one step that takes longer: after each it is asked how many threads have a core
TRIED, TRIED_BESIDE = 0.3, 0.6  # seconds that tell how fast a way is; turns of others take a tenth of one and more
ENOUGH = 20  # windows that are kept
AGAIN, KNOWN = 2.5, 60.0  # seconds until ways are tried again: first beside other programs, then longer; and elsewhere
MORE = 1.2  # times as much of the cores as one thread would have: several were lucky
QUIET, QUIET_LONGEST = 0.2, 30.0  # seconds with cores for more threads before these spin: if others come and go, more
Paces = Generator[Way, Pace, None]


def paces(numbers: list[int], *, cores: int | None = None, sleeps: bool = True) -> Paces:
    """A way for each step, which is sent its pace, with one of these numbers of threads: the fastest of those that the load allows.

    Threads that spin while they wait for one that has no core take ten times as long and more. So only as many spin as have a core each.
    More sleep while they wait. Whether these are faster is a matter of luck, by the cores that they get and keep: who is lucky stays, and who
    was not tries again. A single number is a user's choice: then there is only to choose how they wait. `cores`: all that there are, by
    default the largest number.
    """
    cores = cores or numbers[-1]
    load, again = _Load(), AGAIN
    # What a unit of work takes, by how many threads have a core each, and the seconds of such a load since others were tried.
    known: defaultdict[int, dict[Way, float]] = defaultdict(dict)
    ages: defaultdict[int, float] = defaultdict(float)
    way, windows = _choice(numbers, 1, math.inf, sleeps, {}), list[Pace]()
    while True:
        window = yield from _window(way)
        windows = [*windows[1 - ENOUGH :], window]
        before = load.most
        here, age = known[before], ages[before] + window.seconds
        ages[before] = age
        free = _free_cores(window.room, way.threads, cores)
        changes = load.changes(window.seconds, _with_a_core(numbers, free, windows, way, here.get(way, math.inf)))
        beside = load.most < numbers[-1]  # other programs
        if changes:
            here.pop(way, None)  # it may be what has become slower
            here = known[load.most]
            again = AGAIN if before == numbers[-1] else again
            if way == Way(1) and load.most > before:
                here[way] = window.relative
        elif not beside and window.relative > SUDDENLY * here.get(way, math.inf):
            del here[way]  # too few programs to be counted have come
            windows = [window]
        elif age > (again if beside else KNOWN) and not (way.asleep and age < KNOWN and _have_more(windows, numbers)):
            known[load.most] = here = {way: _usual(windows, beside)}
            ages[load.most], again = 0.0, min(2 * again, KNOWN)
        elif (beside or way not in here) and _told(windows, here, beside):
            here[way] = _usual(windows, beside)  # beside other programs again and again: luck may leave
            if beside and here[way] > FAR_SLOWER * min(here.values()):
                again = KNOWN
        chosen = _choice(numbers, load.most, free, sleeps, here)
        if changes or chosen != way:
            way, windows = chosen, []


class _Load:
    """The largest number of threads that have a core each: a smaller one as soon as it is seen, a larger one some time after."""

    def __init__(self) -> None:
        self.most = 1
        self._quiet, self._more_for, self._since = QUIET, 0.0, 0.0

    def changes(self, seconds: float, most: int) -> bool:
        """Whether it is another one now, after so many seconds in which it seemed to be `most`."""
        self._since += seconds
        self._more_for = self._more_for + seconds if most > self.most else 0.0
        if most == self.most or (most > self.most and self._more_for < self._quiet):
            return False
        if most < self.most:  # the time is longer where they come and go
            self._quiet = QUIET if self._since > 4 * self._quiet else min(2 * self._quiet, QUIET_LONGEST)
        self.most, self._more_for, self._since = most, 0.0, 0.0
        return True


def _window(way: Way) -> Generator[Way, Pace, Pace]:
    """Steps in this way, as one."""
    seconds, work, at_work, rooms = 0.0, 0.0, 0.0, list[float]()
    while not seconds or seconds < WINDOW:
        step = yield way
        seconds, work, at_work = seconds + step.seconds, work + step.work, at_work + step.share * step.seconds
        if step.room < math.inf:
            rooms.append(step.room)
    return Pace(seconds, work, at_work / seconds, fmean(rooms) if rooms else math.inf)


def _free_cores(room: float, threads: int, cores: int) -> float:
    """Those that other programs leave, of what so many threads had or could have had: where these are more they took turns with others.

    >>> _free_cores(10.0, 4, 16), _free_cores(8.0, 16, 16)
    (10.0, 0.0)
    """
    if room >= threads:
        return room
    others = threads * max(0.0, cores - room) / max(room, 0.01)
    return cores - others


def _with_a_core(numbers: list[int], free: float, windows: list[Pace], way: Way, usual: float) -> int:
    """The largest of these numbers of threads for each of which there is a core, else 1; where nobody counts, by signs that one has none."""
    if free < math.inf:
        return max((number for number in numbers if number - max(WANTED, OF_EACH * number) <= free), default=1)
    least = SHARE if way.threads == 1 else SHARE_AMONG_SEVERAL
    slower = (
        min(window.relative for window in windows[-2:]) > SLOWER * usual or windows[-1].relative > FAR_SLOWER * usual
    )
    return 1 if windows[-1].share < least or slower else numbers[-1]


def _have_more(windows: list[Pace], numbers: list[int]) -> bool:
    """Whether threads have clearly more of the cores than one would, beside as many other programs as there are cores."""
    of_one = numbers[-1] / (numbers[-1] + 1)
    return MORE * of_one < fmean(window.room for window in windows) < math.inf


def _told(windows: list[Pace], known: Mapping[Way, float], beside: bool) -> bool:
    """Whether they tell how fast a way is: at once if it is far slower than another."""
    best = min(known.values(), default=math.inf)
    seconds, work = _seconds(windows), _work(windows)
    in_vain = seconds > FAR_SLOWER * best * work and seconds - best * work > LOST
    return in_vain or (seconds >= TRIED_BESIDE if beside else seconds >= TRIED and len(windows) > 1)


def _usual(windows: list[Pace], beside: bool) -> float:
    """What a unit of work takes; beside other programs on average, as a step has a core of its own by chance."""
    after = windows[1:] or windows  # the first may wake threads
    return _seconds(after) / _work(after) if beside else median(window.relative for window in after)


def _choice(numbers: list[int], most: int, free: float, sleeps: bool, known: Mapping[Way, float]) -> Way:
    """The next to be tried, or the fastest: of so many threads as have a core each, and then of more, that sleep.

    Each until one is slower than the one before it; more of them also where they only just have a core each.
    """
    spinning = [Way(number) for number in reversed(numbers) if number <= most]
    lacking = free < numbers[-1] - WANTED
    more = [number for number in numbers if number > most or (lacking and number == numbers[-1] > 1)]
    found: list[Way] = []
    for ways in (spinning, [Way(number, asleep=sleeps) for number in more]):
        found = [_next([*found, *ways], known)] if ways else found
        if found and found[0] not in known:
            break
    return found[0]


def _next(ways: Sequence[Way], known: Mapping[Way, float]) -> Way:
    before = math.inf
    for way in ways:
        if way not in known:
            return way
        if known[way] > before:
            break
        before = known[way]
    return min((way for way in ways if way in known), key=known.__getitem__)


def _seconds(steps: Sequence[Pace]) -> float:
    return sum(step.seconds for step in steps)


def _work(steps: Sequence[Pace]) -> float:
    return sum(step.work for step in steps)
