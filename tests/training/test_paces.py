"""How each step is done by the paces of those before it, on machines whose every step is made up."""

import itertools
import math
import random

import pytest

from rankgrad.training.paces import KNOWN, QUIET_LONGEST, STEP_ITSELF, Pace, Way, paces, work_of

ONE, GENTLE, GREEDY = Way(1), Way(2, asleep=True), Way(2)
IDLE = {ONE: 1.0, GREEDY: 0.7, GENTLE: 0.9}  # time of a step on two cores
BUSY = {ONE: 1.5, GREEDY: 15.0, GENTLE: 1.1}  # beside two programs
SIXTEEN = {1: 1.0, 2: 0.6, 4: 0.4, 8: 0.3, 16: 0.25}
SHORT, LONG = 0.02, 0.3  # seconds of a step


def taken(step_of, steps, numbers, *, unit=SHORT, sleeps=True):
    """The ways of so many steps: step_of(step, way) says how long each takes, in units, its share of a core, and the cores there were."""
    pace = paces(numbers, sleeps=sleeps)
    found = [next(pace)]
    for step in range(steps - 1):
        time, share, room = step_of(step, found[-1])
        found.append(pace.send(Pace(time * unit, 1000.0, share, room)))
    return found


def counted(times, room):
    """Steps of a machine on which the cores are counted."""
    return lambda _, way: (times[way], 1.0, room)


def calm(seconds):
    """Steps by their number of threads on a machine where nobody else wants anything."""
    return lambda _, way: (seconds[way.threads], 1.0, max(seconds))


@pytest.mark.parametrize("unit", [SHORT, LONG])
@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0, 2: 0.7}, 2),
        ({1: 1.0, 2: 20.0}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.4, 8: 0.3}, 8),
        ({1: 1.0, 2: 0.6, 4: 0.4, 8: 5.0}, 4),
        ({1: 1.0, 2: 3.0, 4: 0.1, 8: 5.0}, 4),
        ({1: 1.0, 2: 5.0, 4: 9.0, 8: 20.0}, 1),
    ],
)
def test_the_fastest_number_is_found_and_others_are_tried_seldom(seconds, best, unit):
    found = [way.threads for way in taken(calm(seconds), 1500, list(seconds), unit=unit)]
    assert found[100:].count(best) > 0.95 * len(found[100:])
    assert sum(seconds[number] > 2 * seconds[best] for number in found) < 40


@pytest.mark.parametrize("unit", [0.004, SHORT, LONG])
def test_training_begins_with_one_thread_and_soon_has_all_cores(unit):
    found = taken(calm(SIXTEEN), 200, list(SIXTEEN), unit=unit)
    first = found.index(Way(16))
    assert set(found[:first]) == {ONE} and unit * (first - 1) <= max(0.25, unit)


@pytest.mark.parametrize("unit", [0.004, SHORT, LONG])
@pytest.mark.parametrize("room", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("numbers", [[1, 2], [2]])
def test_threads_never_spin_beside_programs_that_were_there_before(numbers, room, unit):
    """Also where a step had a core to itself, as three programs on two cores have in turn; no window of counters is over before 0.05 s."""

    def step_of(step, way):
        return BUSY[way], 1.0, room if (step + 1) * unit >= 0.05 else math.inf

    assert not any(way == GREEDY for way in taken(step_of, 600, numbers, unit=unit))


@pytest.mark.parametrize("unit", [SHORT, LONG])
@pytest.mark.parametrize("numbers", [[1, 2], [2]])
def test_threads_sleep_while_others_want_their_cores_and_spin_again_afterwards(numbers, unit):
    def step_of(step, way):
        return (BUSY[way], 0.6, 0.9) if 300 <= step < 600 else (IDLE[way], 1.0, 2.0)

    found = taken(step_of, 900, numbers, unit=unit)
    assert found[150:300].count(GREEDY) > 120
    noticed = 300 + found[300:].index(GENTLE if 1 not in numbers else ONE)
    assert noticed <= 302 and GREEDY not in found[noticed:600]
    assert found[700:].count(GREEDY) > 0.8 * 200


@pytest.mark.parametrize(("asleep", "best"), [(0.7, GENTLE), (1.4, ONE)])
def test_beside_busy_programs_the_faster_of_two_gentle_ways_is_found(asleep, best):
    """Two that sleep have more of the cores, and where operations are small they lose more by waiting."""
    found = taken(counted({ONE: 1.0, GENTLE: asleep, Way(4, asleep=True): 2.0}, 0.9), 1500, [1, 2, 4])
    assert found[200:].count(best) > 0.9 * 1300


def test_more_than_two_may_sleep_beside_busy_programs():
    """Sixteen programs on sixteen cores: sixteen threads more have half of them, and wait for the last of many."""
    times = {
        Way(threads, threads > 1): seconds for threads, seconds in {1: 1.0, 2: 0.8, 4: 0.7, 8: 0.9, 16: 2.0}.items()
    }
    found = taken(counted(times, 0.9), 2000, list(SIXTEEN))
    assert found[400:].count(Way(4, asleep=True)) > 0.8 * 1600 and Way(16, asleep=True) not in found


def test_luck_that_has_left_is_noticed_beside_busy_programs():
    """Two threads that sleep may be the faster way for long, by the cores that they happen to get, and then the slower one."""

    def step_of(step, way):
        return (1.0 if way == ONE else 0.75 if step < 700 else 1.4), 0.6, 0.9

    found = taken(step_of, 1400, [1, 2])
    assert found[200:700].count(GENTLE) > 350 and found[900:].count(ONE) > 400


@pytest.mark.parametrize("seed", range(6))
def test_unlucky_threads_try_again_and_lucky_ones_stay(seed):
    """Two that sleep get a core for the two of them, or one each beside another program, and keep what they got."""
    draw, last, lucky = random.Random(seed), ONE, False

    def step_of(_, way):
        nonlocal last, lucky
        lucky, last = lucky if way == last else draw.random() < 0.5, way
        if way == ONE:
            return 1.0, 0.66, 0.67
        return (0.75, 0.5, 0.98) if lucky else (1.25, 0.35, 0.68)

    found = taken(step_of, int(60 / SHORT), [1, 2])
    settled = found[len(found) // 2 :]
    assert settled.count(GENTLE) > 0.85 * len(settled)
    assert sum(1 for before, after in itertools.pairwise(found) if before != after) < 16


@pytest.mark.parametrize("unit", [0.004, SHORT])
def test_a_trial_that_is_far_slower_is_soon_over(unit):
    """Where operations are small, one step of threads that wait for each other may take as long as fifty."""
    times = {ONE: 1.5, GENTLE: 0.5 / unit}
    found = taken(counted(times, 0.9), int(20 / unit), [1, 2], unit=unit)
    assert found.count(GENTLE) <= 1
    assert sum(times[way] for way in found) < 1.1 * 1.5 * len(found)


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

    found = taken(step_of, 3000, [1, 2], unit=0.03)
    others = 3000 - found.count(GENTLE)
    assert 1 + others / 3000 * (1 / faster - 1) < 1.2 and GREEDY not in found


def test_as_many_threads_spin_as_have_a_core():
    """Sixteen cores, of which another program wants eight."""

    def step_of(step, way):
        wanted = 8 if 500 <= step < 1000 else 0
        lacking = max(0, way.threads + wanted - 16)
        return (10.0 if lacking else SIXTEEN[way.threads]), 1.0, 16.0 - wanted + lacking / 3

    found = taken(step_of, 1500, list(SIXTEEN))
    assert found[200:500] == [Way(16)] * 300
    assert found[510:1000].count(Way(8)) > 400 and not any(way.asleep for way in found)
    assert found[1200:] == [Way(16)] * 300


def test_sixteen_threads_stay_where_others_want_little():
    """Counters are rounded, and a machine of sixteen cores is never quite idle."""
    found = taken(lambda step, way: (SIXTEEN[way.threads], 1.0, (15.4, 14.6, 15.0)[step % 3]), 600, list(SIXTEEN))
    assert found[200:] == [Way(16)] * 400


def test_a_moment_of_others_costs_a_moment():
    def step_of(step, way):
        return IDLE[way], 1.0, 1.2 if 300 <= step < 306 else 2.0

    found = taken(step_of, 400, [1, 2])
    assert GENTLE in found[300:310] or ONE in found[300:310]
    assert found[325:].count(GREEDY) == 75


def test_others_that_come_and_go_are_left_alone():
    """A program that rests for half a second and works for half of one: each time it is noticed by a step that is ten times slower."""

    def seconds(on_and_off):
        time, spent, ways = 0.0, 0.0, []
        pace = paces([1, 2])
        way = next(pace)
        while time < 60.0:
            there = on_and_off and time % 1.0 < 0.5
            step = SHORT * (BUSY if there else IDLE)[way]
            time += step
            ways.append(way)
            spent += step if way == GREEDY and there else 0.0
            way = pace.send(Pace(step, 1000.0, 1.0, 0.9 if there else 2.0))
        return spent

    assert seconds(on_and_off=False) == 0.0 and seconds(on_and_off=True) < 0.1 * 60.0


def test_one_thread_is_tried_again_after_a_while():
    """What was known of the ways may no longer hold."""
    changed = int(20 / SHORT)

    def step_of(step, way):
        return (1.0 if way == ONE else 0.7 if step < changed else 1.6), 1.0, 2.0

    found = taken(step_of, int(2 * KNOWN / SHORT), [1, 2])
    assert found[changed - 100 : changed].count(GREEDY) == 100
    assert found[-200:].count(ONE) == 200


@pytest.mark.parametrize("numbers", [[1, 2], [2]])
def test_where_nobody_counts_the_share_of_a_core_tells(numbers):
    idle, busy = {ONE: 1.0, GREEDY: 0.98, GENTLE: 0.85}, {ONE: 0.6, GREEDY: 0.5, GENTLE: 0.4}

    def step_of(step, way):
        there = step < 100 or 400 <= step < 700
        return (BUSY if there else IDLE)[way], (busy if there else idle)[way], math.inf

    found = taken(step_of, 1000, numbers)
    assert GREEDY not in found[:100] and found[200:400].count(GREEDY) > 170
    assert GREEDY not in found[403:700] and found[800:].count(GREEDY) > 170


def test_where_nobody_counts_slow_steps_tell_and_are_seldom():
    """The other thread's core is wanted: the one that is asked has its own, and spins."""

    def step_of(step, way):
        return (IDLE if step < 300 else BUSY)[way], 1.0, math.inf

    found = taken(step_of, int(60 / SHORT), [1, 2])
    assert found[200:300].count(GREEDY) > 80
    assert found[304:].count(GREEDY) <= 4 + 2 * math.log2(QUIET_LONGEST)


def test_how_threads_wait_is_left_to_the_user():
    for times, room in ((IDLE, 2.0), (BUSY, 0.9)):
        assert not any(way.asleep for way in taken(counted(times, room), 300, [1, 2], sleeps=False))


def test_a_number_that_the_user_has_chosen_stays():
    for room in (0.9, 2.0, 4.0):
        assert {way.threads for way in taken(lambda _, way, room=room: (1.0, 1.0, room), 300, [3])} == {3}


def test_long_lists_are_no_sign():
    """Steps of the same pace, whose lists are long for a while, and then short."""
    pace = paces([1, 2])
    way, found = next(pace), []
    for length in itertools.islice(itertools.cycle([20] * 60 + [400] * 8), 400):
        found.append(way)
        documents = 64 * length
        seconds = 1e-5 * (STEP_ITSELF + documents + documents * length / 350) * IDLE[way]
        way = pace.send(Pace(seconds, work_of(documents, length), 1.0))
    assert found[100:].count(GREEDY) > 0.9 * 300


def test_the_first_step_of_other_threads_may_take_longer():
    last = ONE

    def step_of(_, way):
        nonlocal last
        woken, last = way != last, way
        return {1: 1.0, 2: 0.7, 4: 0.5}[way.threads] * (4 if woken else 1), 1.0, 4.0

    assert taken(step_of, 200, [1, 2, 4], unit=LONG)[20:] == [Way(4)] * 180


def test_a_few_slow_steps_are_no_reason_to_change():
    """Every fortieth stands still for a while: what is usual is known again after a minute, and one of its windows is not."""
    found = taken(
        lambda step, way: (IDLE[way] * (6 if step % 40 == 0 else 1), 1.0, 2.0), int(4 * KNOWN / SHORT), [1, 2]
    )
    assert found[100:].count(GREEDY) > 0.97 * len(found[100:])
