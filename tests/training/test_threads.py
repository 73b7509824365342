"""How many threads train members, and how the threads of one network wait for each other."""

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from rankgrad import openmp
from rankgrad.data import synthetic
from rankgrad.models import Members
from rankgrad.training import threads
from rankgrad.training.build import fit_to_data, make_objectives, make_state
from rankgrad.training.config import RECIPES
from rankgrad.training.loop import train
from rankgrad.training.threads import (
    HELD_LONGEST,
    TRIED,
    Pace,
    Way,
    numbers_to_try,
    paces,
    torch_threads,
    ways_to_work,
    working,
)

CPU = torch.device("cpu")


def taken(pace_of, steps, ways):
    """The ways of so many steps, each of which takes what pace_of(step, way) says: seconds, and perhaps the share of a core it had."""
    pace = paces(ways)
    found = [next(pace)]
    for step in range(steps - 1):
        seconds = pace_of(step, found[-1])
        found.append(pace.send(seconds if isinstance(seconds, Pace) else Pace(seconds, 1.0)))
    return found


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0, 2: 0.7}, 2),
        ({1: 1.0, 2: 0.95}, 1),  # too little to change for
        ({1: 1.0, 2: 20.0}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.4, 8: 0.3}, 8),
        ({1: 1.0, 2: 0.6, 4: 0.4, 8: 5.0}, 4),
        ({1: 1.0, 2: 3.0, 4: 0.1, 8: 0.1}, 1),  # only neighbours are tried
    ],
)
def test_the_fastest_way_is_found_and_others_are_tried_seldom(seconds, best):
    numbers = list(seconds)
    found = [
        way.threads for way in taken(lambda _, way: seconds[way.threads], 1000, [Way(number) for number in numbers])
    ]
    assert found[200:].count(best) > 0.97 * len(found[200:])
    slow = [number for number in found if seconds[number] > 2 * seconds[best]]
    assert len(slow) < 30 and all(abs(numbers.index(a) - numbers.index(b)) < 2 for a, b in pairwise(found))


GENTLE, GREEDY = Way(2, asleep=True), Way(2)
IDLE = {Way(1): (1.0, 1.0), GREEDY: (0.7, 1.0), GENTLE: (0.9, 0.85)}
BUSY = {  # another program shares the core of the step's thread, or that of the other one, for which it then waits and spins
    "its core": {Way(1): (1.5, 0.6), GREEDY: (15.0, 0.5), GENTLE: (1.6, 0.4)},
    "the other": {Way(1): (1.0, 1.0), GREEDY: (15.0, 1.0), GENTLE: (1.6, 0.7)},
}


@pytest.mark.parametrize("gentle", [Way(1), GENTLE])
@pytest.mark.parametrize("disturbed", BUSY)
def test_the_way_follows_the_load(disturbed, gentle):
    def pace(step, way):
        return Pace(*(BUSY[disturbed] if 300 <= step < 600 else IDLE)[way])

    found = taken(pace, 1200, [gentle, GREEDY])
    assert found[:TRIED] == [gentle] * TRIED and found[200:300].count(GREEDY) > 90
    assert found[300 : 304 + TRIED].count(GREEDY) <= 4  # noticed by a few steps
    assert found[300:600].count(GREEDY) < 10  # and seldom tried where it is ten times slower
    back = found[600:].index(GREEDY)
    assert back < (4 * TRIED if disturbed == "its core" or gentle == GENTLE else HELD_LONGEST)
    assert found[600 + back + TRIED :].count(GREEDY) > 0.9 * len(found[600 + back + TRIED :])


def test_a_busy_machine_is_known_before_the_greedy_way_is_tried():
    found = taken(lambda _, way: Pace(*BUSY["its core"][way]), 600, [GENTLE, GREEDY])
    assert GREEDY not in found


def test_one_slow_step_is_no_sign():
    found = taken(lambda step, way: Pace(9.0, 0.3) if step == 200 else Pace(*IDLE[way]), 260, [GENTLE, GREEDY])
    without = taken(lambda _, way: Pace(*IDLE[way]), 260, [GENTLE, GREEDY])
    assert found == without


def test_the_numbers_to_try():
    assert [numbers_to_try(most) for most in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]


def trained(number, monkeypatch=None):
    """The weights of members after three epochs with so many threads; 0: as it pays, which here changes all the time."""
    data = synthetic("tiny")
    config = fit_to_data(RECIPES["strong"](), data, CPU, validated=True)
    settings = replace(config.train, epochs=3, threads=number)
    config = replace(config, train=settings, members=replace(config.members, count=5))
    seen = set()
    if monkeypatch is not None:
        changing = [Way(number) for number in (1, 2, 3, 2)] * 100

        def every_number(_):
            for chosen in changing:
                seen.add(chosen.threads)
                yield chosen

        monkeypatch.setattr("rankgrad.training.loop.paces", every_number)
    with torch_threads(number or 3):
        state = make_state(config, data, CPU)
        for _ in train(state, make_objectives(config), data, data, config, CPU):
            pass
    return state, seen


def test_members_learn_the_same_to_the_bit_with_any_number_of_threads(monkeypatch):
    (one, _), (two, _), (some, seen) = trained(1), trained(2), trained(0, monkeypatch)
    assert seen == {1, 2, 3}
    for other in (two, some):
        assert torch.equal(one.model.weights, other.model.weights) and torch.equal(one.values, other.values)


class Uneven(Members):
    """Members of a machine on which sums depend on the number of threads."""

    def score(self, x, codes):
        return super().score(x, codes) * (1 + torch.get_num_threads() * 1e-6)


def test_where_the_number_of_threads_counts_it_is_chosen_once_and_written_down():
    data = synthetic("tiny")
    config = fit_to_data(RECIPES["strong"](), data, CPU, validated=True)
    features = data.features.shape[1]
    with torch_threads(2):
        for kind, expected in ((Members, 0), (Uneven, 1)):
            model = kind(features, ids=range(4), inputs="list")
            assert threads.threads_of_training(config, model, data, CPU) == expected
    with torch_threads(1):
        assert threads.threads_of_training(config, Members(features, ids=range(4)), data, CPU) == 1


def test_categories_are_members_too():
    data = synthetic("tiny")
    config = fit_to_data(RECIPES["strong"](), data, CPU, validated=True)
    model = Members(3, ids=range(4), categories={1: 7})
    with torch_threads(2):
        assert threads.threads_of_training(config, model, data, CPU) == 0


def test_members_of_wide_features_are_compared_on_a_few_documents():
    with torch_threads(2):
        assert threads.learn_the_same(Members(30_000, ids=range(2), hidden=(2,)), 10**6)  # all of them would be 120 GB


def standing_by():
    return [thread for thread in threading.enumerate() if thread.name == "rankgrad-stands-by"]


def stopped_while_asleep():
    with contextlib.suppress(KeyError), working() as work:
        work(GENTLE)
        raise KeyError


def test_those_who_stand_by_are_gone_afterwards():
    before = torch.get_num_threads()
    with torch_threads(2):
        with working() as work:
            for way, helpers in (
                (GENTLE, 1),
                (GENTLE, 1),
                (GREEDY, 0),
                (Way(1), 0),
                (Way(3, asleep=True), 1),
                (GENTLE, 1),
            ):
                work(way)
                assert len(standing_by()) == helpers and torch.get_num_threads() == way.threads
        assert not standing_by() and torch.get_num_threads() == 2
        stopped_while_asleep()
        assert not standing_by() and torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def test_one_network_waits_as_the_load_says_unless_the_user_does(monkeypatch):
    for name in openmp.WAITING:
        monkeypatch.delenv(name, raising=False)
    with torch_threads(2):
        assert ways_to_work(False) == [GENTLE, GREEDY] and ways_to_work(True) == [Way(1), Way(2)]
        with monkeypatch.context() as shell:
            for name, value in openmp.SHORTLY.items():  # as the command line does
                shell.setenv(name, value)
            assert ways_to_work(False) == [GENTLE, GREEDY]
            shell.setenv("GOMP_SPINCOUNT", "7")
            assert ways_to_work(False) == [GREEDY]
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        assert ways_to_work(False) == [GREEDY]
    with torch_threads(1):
        assert ways_to_work(False) == ways_to_work(True) == [Way(1)]


def test_one_network_learns_the_same_however_its_threads_wait(monkeypatch):
    data = synthetic("tiny")
    config = fit_to_data(RECIPES["small"](), data, CPU, validated=True)
    config = replace(config, train=replace(config.train, epochs=2, threads=2))
    learned = []
    for ways in ([GREEDY], [GENTLE, GREEDY] * 100):
        monkeypatch.setattr("rankgrad.training.loop.ways_to_work", lambda _, ways=ways: ways)
        monkeypatch.setattr(
            "rankgrad.training.loop.paces", lambda ways: (way for way in ways)
        )  # in turn, whatever is sent
        with torch_threads(2):
            torch.manual_seed(0)
            state = make_state(config, data, CPU)
            for _ in train(state, make_objectives(config), data, data, config, CPU):
                pass
        learned.append(torch.cat([weights.detach().flatten() for weights in state.model.parameters()]))
    assert torch.equal(*learned) and not standing_by()


SPINS = """
import contextlib, time, torch
from rankgrad.training.threads import sleeping
torch.set_num_threads(2)

def cpu_seconds():
    begun = time.process_time()
    for _ in range(100):
        torch.zeros(2**18).add_(1)  # by two threads, one of which then waits for more to do
        time.sleep(0.002)
    return time.process_time() - begun

cpu_seconds()
spinning = cpu_seconds()
with sleeping(2):
    asleep = cpu_seconds()
print(spinning, asleep, cpu_seconds())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only GNU's OpenMP, which torch has on Linux, sleeps so")
@pytest.mark.skipif(threads.cores() < 2, reason="on one core two threads never spin, so there is nothing to see")
def test_threads_sleep_while_they_wait_and_spin_again_afterwards():
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run([sys.executable, "-c", SPINS], env=environment, capture_output=True, text=True, check=True)
    spinning, asleep, again = map(float, done.stdout.split())
    assert asleep < 0.6 * min(spinning, again), done.stdout
