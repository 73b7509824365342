"""By how many threads each step of training is done on the CPU, and how these wait for each other, learned from the steps before it.

What it may choose among is said by `threads`, which also does what is chosen. Nothing here touches torch: steps come in as numbers.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

WANTED, OF_EACH = 0.35, 0.1  # cores that idle machines may lack, in all and for each thread: none is quite idle
SHARE, SHARE_AMONG_SEVERAL = 0.85, 0.72  # of a core that a step's thread has there; one of several also waits
STEP_ITSELF = 250  # documents that take as long as what every step takes
PAIRS_ITSELF = 350  # documents of a list in which pairs take as long as the documents themselves
SLOWER, FAR_SLOWER = 1.5, 3.0  # times what is usual: a sign of other programs, and of a trial in vain
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
QUIET, QUIET_LONGEST = 0.2, 30.0  # seconds without other programs before threads spin; more where these come and go
Paces = Generator[Way, Pace, None]


def paces(numbers: list[int], *, sleeps: bool = True) -> Paces:
    """A way for each step, which is sent its pace, with one of these numbers of threads: the fastest of those that the load allows.

    Threads that spin while they wait for one that has no core take ten times as long and more. So they spin only where there is a core for
    each. Beside busy programs one works alone, or several that sleep while they wait. Whether these are faster is a matter of luck, by the
    cores that they get and keep: who is lucky stays, and who was not tries again.
    A single number is a user's choice: then there is only to choose how they wait.
    """
    gentle = [Way(number, asleep=sleeps and number > 1) for number in numbers]
    load, age, again = _Load(), 0.0, AGAIN
    known: dict[bool, dict[Way, float]] = {False: {}, True: {}}  # what a unit of work takes, by whether it is calm
    way, windows = gentle[0], list[Pace]()
    while True:
        window = yield from _window(way)
        windows = [*windows[-ENOUGH:], window]
        age += window.seconds
        most = _with_a_core(numbers, window, way, known[load.calm].get(way, math.inf))
        changes = load.changes(window.seconds, alone=most > 1)
        calm = load.calm
        if changes:
            age = 0.0
            if way == Way(1) and calm:
                known[calm][way] = window.relative
        elif age > (KNOWN if calm else again) and not (way.asleep and _have_more(windows, numbers)):
            known[calm], age, again = {way: _usual(windows, calm)}, 0.0, min(2 * again, KNOWN)
        elif (not calm or (most >= way.threads and way not in known[calm])) and _told(windows, known[calm], calm):
            known[calm][way] = _usual(windows, calm)  # beside other programs again and again: luck may leave
            if not calm and known[calm][way] > FAR_SLOWER * min(known[calm].values()):
                again = KNOWN
        ways = [Way(number) for number in reversed(numbers) if number <= max(most, numbers[0])] if calm else gentle
        chosen = _choice(ways, known[calm])
        if changes or chosen != way:
            way, windows = chosen, []


class _Load:
    """Whether a machine is calm: no longer as soon as another program wants a core, and again after some time without one."""

    def __init__(self) -> None:
        self.calm = False
        self._quiet, self._alone_for, self._since = QUIET, 0.0, 0.0

    def changes(self, seconds: float, *, alone: bool) -> bool:
        self._since += seconds
        self._alone_for = self._alone_for + seconds if alone else 0.0
        if self.calm == alone or (alone and self._alone_for < self._quiet):
            return False
        if self.calm:  # the time is longer where they come and go
            self._quiet = QUIET if self._since > 4 * self._quiet else min(2 * self._quiet, QUIET_LONGEST)
        self.calm, self._since = alone, 0.0
        return True


def _window(way: Way) -> Generator[Way, Pace, Pace]:
    """Steps in this way, as one."""
    steps = [(yield way)]
    while _seconds(steps) < WINDOW:
        steps.append((yield way))
    rooms = [step.room for step in steps if step.room < math.inf]
    share = sum(step.share * step.seconds for step in steps) / _seconds(steps)
    return Pace(_seconds(steps), _work(steps), share, fmean(rooms) if rooms else math.inf)


def _with_a_core(numbers: list[int], window: Pace, way: Way, usual: float) -> int:
    """The largest of these numbers of threads for each of which there is a core, else 1; where nobody counts, by signs that one has none."""
    if window.room < math.inf:
        return max((number for number in numbers if number - max(WANTED, OF_EACH * number) <= window.room), default=1)
    least = SHARE if way.threads == 1 else SHARE_AMONG_SEVERAL
    return 1 if window.share < least or window.relative > SLOWER * usual else numbers[-1]


def _have_more(windows: list[Pace], numbers: list[int]) -> bool:
    """Whether threads have clearly more of the cores than one would, beside as many other programs as there are cores."""
    of_one = numbers[-1] / (numbers[-1] + 1)
    return MORE * of_one < fmean(window.room for window in windows) < math.inf


def _told(windows: list[Pace], known: Mapping[Way, float], calm: bool) -> bool:
    """Whether they tell how fast a way is: at once if it is far slower than another."""
    best = min(known.values(), default=math.inf)
    seconds, work = _seconds(windows), _work(windows)
    in_vain = seconds > FAR_SLOWER * best * work and seconds - best * work > LOST
    return in_vain or (seconds >= TRIED and len(windows) > 1 if calm else seconds >= TRIED_BESIDE)


def _usual(windows: list[Pace], calm: bool) -> float:
    """What a unit of work takes; beside other programs on average, as a step has a core of its own by chance."""
    after = windows[1:] or windows  # the first may wake threads
    return median(window.relative for window in after) if calm else _seconds(after) / _work(after)


def _choice(ways: Sequence[Way], known: Mapping[Way, float]) -> Way:
    """The next to be tried, until one is slower than the one before it, and then the fastest."""
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
