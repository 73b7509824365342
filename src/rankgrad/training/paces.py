"""By how many threads each step of training is done on the CPU, and how these wait for each other, learned from the steps before it.

What it may choose among is said by `threads`, which also does what is chosen. Nothing here touches torch: steps come in as numbers.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

WANTED, OF_EACH = (
    0.35,
    0.1,
)  # cores less than threads, at least and for each: others have so much for a moment on an idle machine too
UNDISTURBED = 0.85  # least share of a core on an idle machine
AMONG_SEVERAL = 0.72  # the same of one of several threads, which may sleep while it waits for the others
STEP_ITSELF = 250  # documents that take as long as what every step takes
PAIRS_ITSELF = 350  # documents of a list in which pairs take as long as the documents themselves
FASTER, SLOWER, FAR_SLOWER = 0.95, 1.5, 3.0  # shares of the usual time of a step: worth a change, and signs of one


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


class Span(NamedTuple):
    """So many steps, or fewer that take so many seconds: short steps differ by chance, and of long ones a few say enough.

    More of very short ones, that take the least seconds: other programs have a core for some thousandths of one at a time.
    """

    steps: int
    seconds: float
    least: float = 0.0

    def covered(self, steps: int, seconds: float) -> bool:
        return seconds >= self.seconds or (steps >= self.steps and seconds >= self.least)

    def times(self, factor: float) -> "Span":
        return Span(int(self.steps * factor), self.seconds * factor, self.least * factor)


HURRIED = Span(3, 0.6)  # by which other programs are noticed: by one step only if it is very long
FIRST = Span(5, 0.1, least=0.08)  # with what training begins: are there other programs?
CALM = Span(10, 1.0, least=0.2)  # by which it is noticed that they are gone
TRIED = Span(5, 0.5)  # a trial
BESIDE = Span(20, 2.0, least=1.0)  # the same beside other programs, whose turns last for a tenth of a second and more
HELD, HELD_LONGEST = Span(30, 3.0), Span(240, 24.0)  # between two trials
BEFORE_A_TRIAL = 1.0  # seconds beside other programs: of small operations a trial's step may take half of one
CHANCE = 0.1  # seconds that a trial beside them may lose before it is judged
LOST, SPENT = 12, 4  # times what a trial has lost, and beside other programs has taken, pass before the next
LONGEST = 60.0  # seconds of that, if a step just stood still
Paces = Generator[Way, Pace, None]


def paces(numbers: list[int], *, sleeps: bool = True) -> Paces:
    """A way for each step, which is sent its pace: one of these numbers of threads, asleep where other programs want the cores too.

    From one thread on a calm machine the largest number is tried first. Then now and then a neighbouring one is, and the faster stays. Trials
    come less often the more of them were in vain and the more they have lost, and end with a step that is far slower. Beside busy programs
    threads that spin may be ten times slower: when these come they are left without a trial, and tried again when the machine is calm.
    """
    busy = numbers[0] > 1  # whether it is so: one thread finds out by itself, several begin gently
    alone = beside = 0  # places in `numbers`, on an idle machine and beside busy programs
    step, held, quiet, usual = -1, FIRST, CALM, math.inf
    # Seconds before the next trial: of other numbers, calm and busy, and of threads that sleep to be awake; where programs just came.
    owed, owed_awake, wait = [0.0, 0.0], 0.0, 0.0
    leaps = len(numbers) > 2  # to the largest number, when one thread is all that is known
    while True:
        at = beside if busy else alone
        one = numbers[at] == 1
        way = Way(numbers[at], asleep=sleeps and busy and not one)
        noticed = CALM if one else quiet if busy else HURRIED
        steps: list[Pace] = []
        spent, look, over, changed = 0.0, 0.0, False, False  # changed: between busy and calm
        pause = max(owed[busy], wait)
        while not (changed or (over and spent >= pause)):
            steps.append((yield way))
            spent += steps[-1].seconds
            if spent < look:
                continue
            look = spent + noticed.least / 20
            over = over or all(span.covered(len(steps), spent) for span in (held, FIRST))
            latest = _latest(steps, noticed)
            enough = over or noticed.covered(len(latest), _seconds(latest))
            asked = one or not busy or spent >= owed_awake
            changed = asked and enough and _disturbed(latest, way, usual) != busy
        # The first may wake threads.
        usual = _usual(_latest(steps[1:] or steps, BESIDE if busy else TRIED.times(2)), by_chance=busy)
        owed = [max(0.0, seconds - spent) for seconds in owed]
        owed_awake, wait = max(0.0, owed_awake - spent), 0.0
        if changed and (one or not busy or not sleeps):
            held = TRIED if busy else TRIED.times(2)  # more are soon tried where it is calm again
            wait, usual = 0.0 if busy else BEFORE_A_TRIAL, math.inf
            busy, alone, step, quiet = not busy, at if busy else 0, -1, CALM
            leaps = len(numbers) > 2
            continue
        leap = leaps and one and not busy
        if changed:  # calm, as it seems: threads that sleep are without a core in any case
            trial, place = Way(numbers[at]), at
        elif len(numbers) > 1:
            step = -step if 0 <= at - step < len(numbers) else step  # the other neighbour in turn
            place = len(numbers) - 1 if leap else at + step
            trial = Way(numbers[place], asleep=sleeps and busy and numbers[place] > 1)
        else:
            continue
        tried: list[Pace] = []
        by_chance = busy and not changed
        long_enough = BESIDE if by_chance else TRIED
        over = False
        while not over:
            tried.append((yield trial))
            spent, latest = _seconds(tried), _latest(tried, CALM)
            alone_now = by_chance and CALM.covered(len(tried), spent) and not _disturbed(latest, trial, usual)
            over = alone_now or long_enough.covered(len(tried), spent) or _in_vain(tried, usual, by_chance)
        # Where it is calm threads need not be faster awake: other numbers of them may be, which are tried then.
        found = _usual(tried[1:] or tried, by_chance)
        leaps = leaps and not leap
        lost = min(LONGEST, max(LOST * _lost(tried, usual), SPENT * _seconds(tried) if by_chance else 0.0))
        if changed:
            owed_awake = lost
        elif not leap:  # all of many may be slow where two are not
            owed[busy] = lost
        if leap and found >= FASTER * usual:
            held, step = TRIED, -1  # and soon the neighbour
        elif found >= (usual / FASTER if changed else FASTER * usual):
            held = min(max(held, HELD.times(0.5)).times(2), HELD_LONGEST)
            quiet = min(quiet.times(2), CALM.times(24)) if changed else quiet
        else:
            further = changed or leap or 0 <= place + step < len(numbers)
            held, usual = TRIED if further else HELD.times(0.5), found  # soon on in this direction, not back
            if further:
                owed[busy] = 0.0
            if changed:
                busy, alone = False, place
            elif busy:
                beside, step = place, -step
            else:
                alone, step = place, -step


def _seconds(steps: Sequence[Pace]) -> float:
    return sum(pace.seconds for pace in steps)


def _lost(tried: list[Pace], usual: float) -> float:
    """Seconds more than usual."""
    return sum(pace.seconds - usual * pace.work for pace in tried)


def _in_vain(tried: list[Pace], usual: float, by_chance: bool) -> bool:
    """Whether a trial need not go on. Its first step, which also wakes threads, says less.

    Beside other programs any few steps do, but new threads that happen to share a core go on so, and have better luck another time.
    """
    slower = (SLOWER if len(tried) > 1 else FAR_SLOWER) * usual
    if not by_chance:
        return tried[-1].relative > slower
    seconds, work = _seconds(tried), sum(pace.work for pace in tried)
    shown = BESIDE.times(0.5).covered(len(tried), seconds) and seconds > usual * work
    return shown or (seconds > slower * work and seconds - usual * work > CHANCE)


def _latest(steps: list[Pace], span: Span) -> list[Pace]:
    """As few of the last steps as cover it."""
    seconds = 0.0
    for count, pace in enumerate(reversed(steps), 1):
        seconds += pace.seconds
        if span.covered(count, seconds):
            return steps[-count:]
    return steps


def _usual(steps: list[Pace], by_chance: bool) -> float:
    """What a unit of work takes; where a step has a core of its own by chance, on average, without the slowest few."""
    if not by_chance:
        return median(pace.relative for pace in steps)
    most = sorted(steps, key=lambda pace: pace.relative)[: len(steps) - len(steps) // 16]
    return _seconds(most) / sum(pace.work for pace in most)


def _disturbed(steps: list[Pace], way: Way, usual: float) -> bool:
    """Whether other programs seem to want the core of a thread; where there is one, also that of a second. A step may look so by chance."""
    shares = sorted(pace.share for pace in steps)[len(steps) > 1 :]
    least = UNDISTURBED if way.threads == 1 else AMONG_SEVERAL
    rooms = [pace.room for pace in steps if pace.room < math.inf]
    needed = max(way.threads, 2)
    crowded = bool(rooms) and fmean(rooms) < needed - max(WANTED, OF_EACH * needed)
    return crowded or fmean(shares) < least or min(pace.relative for pace in steps) > SLOWER * usual
