"""How many threads a step gets by the paces of those before it, on machines whose every step is made up."""

import itertools
import math
import random
from itertools import pairwise

import pytest

from rankgrad.training.paces import BEFORE_A_TRIAL, HELD_LONGEST, STEP_ITSELF, TRIED, Pace, Way, paces, work_of

GENTLE, GREEDY = Way(2, asleep=True), Way(2)
IDLE = {Way(1): (1.0, 1.0), GREEDY: (0.7, 1.0), GENTLE: (0.9, 0.85)}  # time of a step, share of a core
BUSY = {  # another program shares the core of the step's thread, or that of the other one, for which it then waits and spins
    "its core": {Way(1): (1.5, 0.6), GREEDY: (15.0, 0.5), GENTLE: (1.6, 0.4)},
    "the other": {Way(1): (1.0, 1.0), GREEDY: (15.0, 1.0), GENTLE: (1.6, 0.7)},
}
SHORT, LONG = 0.02, 0.3  # seconds of a step


def taken(step_of, steps, numbers, *, unit=SHORT, sleeps=True):
    """The ways of so many steps: step_of(step, way) says how long each takes, in units, and perhaps its share of a core, and the room."""
    pace = paces(numbers, sleeps=sleeps)
    found = [next(pace)]
    for step in range(steps - 1):
        said = step_of(step, found[-1])
        time, *rest = said if isinstance(said, tuple) else (said, 1.0)
        found.append(pace.send(Pace(time * unit, 1000.0, *rest)))
    return found


@pytest.mark.parametrize("unit", [SHORT, LONG])
@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0, 2: 0.7}, 2),
        ({1: 1.0, 2: 0.97}, 1),  # too little to change for
        ({1: 1.0, 2: 0.9, 4: 0.81, 8: 0.74}, 8),  # little, and again and again
        ({1: 1.0, 2: 20.0}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.4, 8: 0.3}, 8),
        ({1: 1.0, 2: 0.6, 4: 0.4, 8: 5.0}, 4),
        ({1: 1.0, 2: 3.0, 4: 0.1, 8: 0.2}, 4),  # the largest is tried first
        ({1: 1.0, 2: 3.0, 4: 0.1, 8: 5.0}, 1),  # and then only neighbours
    ],
)
def test_the_fastest_way_is_found_and_others_are_tried_seldom(seconds, best, unit):
    numbers = list(seconds)
    found = [way.threads for way in taken(lambda _, way: seconds[way.threads], 1000, numbers, unit=unit)]
    assert found[200:].count(best) > 0.97 * len(found[200:])
    slow = [number for number in found if seconds[number] > 2 * seconds[best]]
    assert len(slow) < 30
    places = [numbers.index(number) for number in found]
    assert sum(abs(a - b) > 1 for a, b in pairwise(places)) <= 2  # to the largest and perhaps back


@pytest.mark.parametrize("numbers", [[1, 2], [2]])
@pytest.mark.parametrize("disturbed", BUSY)
def test_the_way_follows_the_load(disturbed, numbers):
    gentle = Way(1) if 1 in numbers else GENTLE
    found = taken(lambda step, way: (BUSY[disturbed] if 300 <= step < 600 else IDLE)[way], 1200, numbers)
    assert found[: TRIED.steps] == [gentle] * TRIED.steps and found[200:300].count(GREEDY) > 90
    assert found[300 : 304 + TRIED.steps].count(GREEDY) <= 4  # noticed by a few steps
    assert found[300:600].count(GREEDY) < 10  # and seldom tried where it is ten times slower
    taken_then = sum(BUSY[disturbed][way][0] for way in found[320:600])
    assert taken_then < 1.1 * 280 * BUSY[disturbed][gentle][0]
    back = found[600:].index(GREEDY)
    assert back < (4 * TRIED.steps if disturbed == "its core" or gentle == GENTLE else HELD_LONGEST.steps)
    after = found[600 + back + TRIED.steps :]
    assert after.count(GREEDY) > 0.9 * len(after)


@pytest.mark.parametrize("numbers", [[1, 2], [2]])
def test_long_steps_are_few_before_something_is_done(numbers):
    """What takes a second is not to be seen five times: after one the better way is tried."""
    gentle = Way(1) if 1 in numbers else GENTLE
    found = taken(lambda step, way: (BUSY["its core"] if 40 <= step < 80 else IDLE)[way], 120, numbers, unit=LONG)
    assert found[:2] == [gentle, GREEDY] and found[8:40].count(GREEDY) > 24
    assert found[40:80].count(GREEDY) <= 2  # when other programs came, and what was chosen before that step was over
    assert found[80:92].count(GREEDY) > 5


def test_one_slow_step_costs_no_more_than_a_few():
    """A long one says as much as a few short ones, but not so much that threads are given up for long."""
    found = taken(lambda step, way: (5.0, 0.5) if step == 100 else IDLE[way], 130, [1, 2], unit=LONG)
    assert found[102:130].count(GREEDY) > 14


def test_beside_busy_programs_threads_that_sleep_are_taken_where_they_are_faster():
    """Large operations: two threads have two shares of the cores, and lose little by waiting for each other."""
    busy = {Way(1): (1.5, 0.6), GENTLE: (1.0, 0.5), GREEDY: (15.0, 0.5)}
    found = taken(lambda step, way: (busy if 300 <= step < 600 else IDLE)[way], 1200, [1, 2])
    first = 300 + int(BEFORE_A_TRIAL / SHORT)
    assert found[first : first + 10].count(GENTLE) > 0 and found[first:600].count(GENTLE) > 0.85 * (600 - first)
    assert found[304:600].count(GREEDY) == 0
    assert found[620:].count(GREEDY) > 0.9 * len(found[620:])
    soon = taken(lambda step, way: (busy if step >= 50 else IDLE)[way], 100, [1, 2], unit=LONG)
    assert soon[56:].count(GENTLE) > 0.8 * 44


@pytest.mark.parametrize("sleeps", [True, False])
def test_more_threads_are_tried_again_when_it_is_calm(sleeps):
    """Where threads that sleep are as fast as those that spin, as large operations are."""
    idle = {1: 1.0, 2: 0.6, 4: 0.4}
    busy = {1: 1.5, 2: 1.0, 4: 1.8}

    def step_of(step, way):
        return (busy[way.threads], 0.5) if step < 300 else (idle[way.threads], 1.0)

    found = taken(step_of, 1000, [1, 2, 4], sleeps=sleeps)
    assert sum(way.threads == 2 for way in found[100:300]) > 160
    assert sum(way == Way(4) for way in found[500:]) > 0.9 * len(found[500:])


@pytest.mark.parametrize("unit", [0.004, SHORT, LONG])
def test_trials_beside_busy_programs_lose_little(unit):
    """Where operations are small, one step of threads that wait for each other may take as long as fifty."""
    alone, together = 1.5, max(1.6, 0.5 / unit)

    def seconds(steps):
        step_of = {Way(1): (alone, 0.6), GENTLE: (together, 0.4), GREEDY: (10 * together, 0.4)}
        return unit * sum(step_of[way][0] for way in taken(lambda _, way: step_of[way], steps, [1, 2], unit=unit))

    for steps in (int(0.9 / (alone * unit)), int(10 / unit), int(60 / unit)):
        assert seconds(steps) < (1.15 if steps * unit > 5 else 1.01) * alone * unit * steps


def test_how_threads_wait_is_left_to_the_user():
    for disturbed in BUSY.values():
        ways = taken(lambda _, way, disturbed=disturbed: disturbed[way], 300, [1, 2], sleeps=False)
        assert not any(way.asleep for way in ways)


@pytest.mark.parametrize("unit", [SHORT, LONG])
@pytest.mark.parametrize("numbers", [[1, 2], [2]])
def test_a_busy_machine_is_known_before_the_greedy_way_is_tried(numbers, unit):
    assert GREEDY not in taken(lambda _, way: BUSY["its core"][way], 600, numbers, unit=unit)


@pytest.mark.parametrize("unit", [0.004, SHORT, LONG])
@pytest.mark.parametrize("numbers", [[1, 2], [2], [1, 2, 4]])
@pytest.mark.parametrize("room", [0.7, 1.0])
def test_cores_that_others_have_are_known_though_a_step_had_its_own(room, numbers, unit):
    """Three programs on two cores: for a tenth of a second and more one of them has a core to itself."""

    def step_of(step, way):
        known = (step + 1) * unit >= 0.05  # no window is over before
        return 1.0 if way.threads == 1 else 1.3 if way.asleep else 20.0, 1.0, room if known else math.inf

    assert not any(way.threads > 1 and not way.asleep for way in taken(step_of, 600, numbers, unit=unit))


@pytest.mark.parametrize("numbers", [[1, 2], [2]])
def test_cores_that_are_idle_are_soon_at_work(numbers):
    found = taken(lambda _, way: (*IDLE[way], 2.0), 300, numbers)
    assert GREEDY in found[: 2 * TRIED.steps] and found.count(GREEDY) > 250
    for tried in (1.0, 0.5 / SHORT):  # what a trial beside the others has lost is not owed when they are gone

        def step_of(step, way, tried=tried):
            time, share = IDLE[way]
            return (time * tried if way == GENTLE and step < 100 else time), share, 0.9 if step < 100 else 2.0

        back = taken(step_of, 300, numbers)
        assert GREEDY not in back[:100] and GREEDY in back[100 : 100 + 6 * TRIED.steps]


def test_sixteen_threads_stay_where_others_want_little():
    """Counters are rounded, and a machine of sixteen cores is never quite idle."""
    idle = {1: 1.0, 2: 0.6, 4: 0.4, 8: 0.3, 16: 0.25}
    found = taken(lambda step, way: (idle[way.threads], 1.0, (15.4, 14.6, 15.0)[step % 3]), 300, list(idle))
    assert found[20:].count(Way(16)) > 250


@pytest.mark.parametrize("seed", range(6))
def test_the_better_way_is_found_although_turns_come_by_chance(seed):
    """Beside two programs on two cores a thread has one to itself for some tenths of a second, and then a half."""
    draw, left, shared = random.Random(seed), 0.0, False
    faster = 0.72

    def step_of(_, way):
        nonlocal left, shared
        if left <= 0:
            left, shared = draw.uniform(0.1, 0.6), draw.random() < 0.5
        time = (2.0 if shared else 1.0) * (faster if way == GENTLE else 1.0) * draw.uniform(0.85, 1.15)
        left -= time * 0.03
        return time, 0.5 if shared else 1.0, 0.9

    found = taken(step_of, 1500, [1, 2], unit=0.03)
    others = 1500 - found.count(GENTLE)
    assert 1 + others / 1500 * (1 / faster - 1) < 1.15 and GREEDY not in found


def test_one_slow_step_is_no_sign():
    found = taken(lambda step, way: (9.0, 0.3) if step == 200 else IDLE[way], 260, [2])
    assert found == taken(lambda _, way: IDLE[way], 260, [2])


def test_one_long_step_that_is_not_very_long_is_no_sign():
    found = taken(lambda step, way: (1.2, 0.6) if step == 100 else IDLE[way], 115, [1, 2], unit=LONG)
    assert found[100:] == [GREEDY] * 15


def test_after_a_false_sign_several_are_soon_at_work_again():
    found = taken(lambda step, way: (9.0, 0.3) if step in (200, 201, 202) else IDLE[way], 260, [1, 2])
    assert found[204] == Way(1) and found[204:].index(GREEDY) <= 3 * TRIED.steps


def test_long_lists_are_no_sign():
    """Steps of the same pace, whose lists are long for a while, and then short."""
    pace = paces([1, 2])
    way, found = next(pace), []
    for length in itertools.islice(itertools.cycle([20] * 8 + [400] * 8), 400):
        found.append(way)
        documents = 64 * length
        seconds = 1e-7 * (STEP_ITSELF + documents + documents * length / 350) * IDLE[way][0]
        way = pace.send(Pace(seconds, work_of(documents, length), 1.0))
    assert found[20:].count(GREEDY) > 0.9 * 380


@pytest.mark.parametrize("unit", [SHORT, LONG])
def test_sixteen_cores_are_at_work_soon(unit):
    """And none but one where other programs want them."""
    idle = {1: 1.0, 2: 0.6, 4: 0.4, 8: 0.3, 16: 0.25}
    found = taken(lambda _, way: idle[way.threads], 40, list(idle), unit=unit)
    assert found[TRIED.steps] == Way(16) and found.count(Way(16)) > 25
    busy = taken(lambda _, way: (way.threads, 0.5), 40, list(idle), unit=unit)
    assert all(way.threads <= 2 for way in busy)
    again = taken(lambda step, way: (way.threads, 0.5) if step < 60 else (idle[way.threads], 1.0), 120, list(idle))
    assert again[90:].count(Way(16)) > 20


def test_many_threads_that_wait_for_each_other_are_no_sign():
    """The command line lets them sleep after half a millisecond: sixteen had down to 0.84 of a core on an idle machine."""
    idle, shares = {1: 1.0, 2: 0.6, 4: 0.4, 8: 0.3, 16: 0.25}, (0.84, 0.82, 0.79)

    def step_of(step, way):
        return idle[way.threads], 1.0 if way.threads == 1 else shares[step % len(shares)]

    assert taken(step_of, 300, list(idle))[20:].count(Way(16)) > 250


def test_the_first_step_of_other_threads_may_take_longer():
    last = None

    def step_of(_, way):
        nonlocal last
        woken, last = way != last, way
        return {1: 1.0, 2: 0.7, 4: 0.5}[way.threads] * (2.5 if woken else 1)

    found = taken(step_of, 200, [1, 2, 4])
    assert found[50:].count(Way(4)) > 0.9 * 150


def test_what_was_just_left_is_not_tried_at_once_again():
    """Where there is nothing further on."""
    found = taken(lambda _, way: IDLE[way], 60, [1, 2])
    first = found.index(GREEDY)
    assert found.index(Way(1), first) - first >= 3 * TRIED.steps
