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
    two = taken(calm({1: 1.0, 2: 0.7}), 200, [1, 2], unit=unit)
    assert ONE not in two[two.index(GREEDY) :]  # is known


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


def sixteen_cores(others, asleep, begin=0, end=10**9):
    """So many other programs from one step to another. Threads that sleep take so much longer, and no core is theirs alone."""

    def step_of(step, way):
        there = others if begin <= step < end else 0
        wanted = way.threads + there
        crowded = max(1.0, wanted / 16)
        time = SIXTEEN[way.threads] * (crowded * asleep if way.asleep else 1.0 if wanted <= 16 else 15.0)
        return time, 1.0, min(16.0 - there if wanted <= 16 else way.threads * 16 / wanted, 16.0)

    return step_of


def test_as_many_threads_spin_as_have_a_core():
    """Sixteen cores, of which other programs want eight."""
    found = taken(sixteen_cores(8, asleep=1.3, begin=500, end=5000), 5500, list(SIXTEEN))
    assert found[200:500] == [Way(16)] * 300
    assert found[504:5000].count(Way(8)) > 0.8 * 4500 and Way(16) not in found[504:5000]
    assert found[5250:] == [Way(16)] * 250


@pytest.mark.parametrize(("others", "asleep", "best"), [(1, 1.05, 16), (2, 1.05, 16), (14, 1.05, 8), (14, 1.9, 2)])
def test_more_threads_than_have_a_core_sleep_if_that_is_faster(others, asleep, best):
    """Also where so few programs came that the counters do not show them, and where many threads seem to leave room for few."""
    found = taken(sixteen_cores(others, asleep, begin=500), 4000, list(SIXTEEN))
    assert found[200:500] == [Way(16)] * 300
    assert found[1000:].count(Way(best, asleep=best > 2)) > 0.8 * 3000
    assert sum(way.threads + others > 16 and not way.asleep for way in found[500:]) < 50


@pytest.mark.parametrize("others", [1, 2, 14])
def test_a_number_that_the_user_has_chosen_sleeps_where_it_has_no_cores(others):
    found = taken(sixteen_cores(others, asleep=1.3), 1000, [16])
    assert found.count(Way(16)) < 50 and found[200:].count(Way(16, asleep=True)) > 0.95 * 800


@pytest.mark.parametrize("others", [1, 2])
def test_more_threads_wait_until_programs_stay_away(others):
    """One or two of four cores are wanted for half of the time: sleeping threads would be best, or two that spin."""
    times, now, done, pace = {1: 1.0, 2: 0.6, 4: 0.4}, 0.0, 0, paces([1, 2, 4])
    way, changed = next(pace), 0
    while done < 3000:
        left, begun = SHORT * times[way.threads] * (1.15 if way.asleep else 1.0), now
        while left > 0:  # in thousandths of a second
            lacking = way.threads + others * (now % 0.3 < 0.15) > 4
            left -= 0.001 * (1.0 if not lacking else 0.8 if way.asleep else 1 / 15)
            now += 0.001
        room = 4.0 - others * ((now - 0.05) % 0.3 < 0.15)
        before, way, done = way, pace.send(Pace(now - begun, 1000.0, 1.0, room)), done + 1
        changed += way != before
    assert now < 1.3 * 3000 * SHORT * times[2] and changed < 150


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
    idle, busy = {ONE: 1.0, GREEDY: 0.8, GENTLE: 0.85}, {ONE: 0.6, GREEDY: 0.5, GENTLE: 0.4}

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
    found = taken(lambda step, way: ((IDLE if step < 40 else BUSY)[way], 1.0, math.inf), 50, [1, 2], unit=LONG)
    assert found[40:42] == [GREEDY, ONE]  # a step that is far slower is enough


def test_where_nobody_counts_a_machine_may_stay_slower():
    """Because it is hot, say: what threads that spin took before is not what they take now."""
    step_of = lambda step, way: (IDLE[way] * (1.7 if step > 1000 else 1.0), 1.0, math.inf)  # noqa: E731
    found = taken(step_of, int(120 / SHORT), [1, 2])
    assert found[-3000:].count(GREEDY) > 0.95 * 3000


def test_where_nobody_counts_one_slow_step_is_no_sign():
    found = taken(lambda step, way: (IDLE[way] * (2.0 if step % 9 == 8 else 1), 1.0, math.inf), 400, [1, 2], unit=LONG)
    assert found[20:].count(GREEDY) > 0.95 * 380


def test_how_long_a_machine_was_calm_does_not_matter():
    """When programs come, others are tried after a moment."""
    step_of = lambda step, way: (1.0, 1.0, 2.0) if step < 20_000 else (1.0 if way == ONE else 0.8, 1.0, 0.9)  # noqa: E731
    found = taken(step_of, 20_000 + int(5 / SHORT), [1, 2])
    assert GENTLE in found[20_000 : 20_000 + int(1.0 / SHORT)] and found[-50:] == [GENTLE] * 50


def test_how_threads_wait_is_left_to_the_user():
    for times, room in ((IDLE, 2.0), (BUSY, 0.9)):
        assert not any(way.asleep for way in taken(counted(times, room), 300, [1, 2], sleeps=False))


def test_two_threads_of_a_crowded_machine_do_not_spin():
    """Fifteen programs on sixteen cores: two threads have nearly two cores, in turns with the others."""
    found = taken(lambda _, way: (BUSY[way], 1.0, 1.0 if way == ONE else 2 * 16 / 17), 400, [1, 2])
    assert GREEDY in found
    pace = paces([1, 2], cores=16)
    found = [next(pace)]
    for _ in range(400):
        found.append(pace.send(Pace(BUSY[found[-1]] * SHORT, 1000.0, 1.0, 1.0 if found[-1] == ONE else 2 * 16 / 17)))
    assert GREEDY not in found and GENTLE in found


def test_lucky_threads_are_compared_again_after_a_minute():
    """Three programs, and then one."""

    def step_of(step, way):
        return ({ONE: 2.0, GENTLE: 1.5} if step < 1000 else {ONE: 1.0, GENTLE: 1.45})[way], 0.6, 1.0

    found = taken(step_of, 1000 + int(1.2 * KNOWN / SHORT), [1, 2])
    assert found[900:1000] == [GENTLE] * 100 and found[-50:] == [ONE] * 50


def test_programs_that_come_again_are_a_new_chance():
    """What was found unlucky for minutes is tried again soon after a calm time."""

    def step_of(step, way):
        if 5000 <= step < 6000:
            return IDLE[way], 1.0, 2.0
        return 1.0 if way == ONE else 1.4 if step < 6100 else 0.7, 0.6, 0.9

    found = taken(step_of, 7000, [1, 2])
    assert found[-300:] == [GENTLE] * 300


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
