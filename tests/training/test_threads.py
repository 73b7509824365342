"""How many threads train members, and how the threads of one network wait for each other."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from rankgrad.data import synthetic
from rankgrad.models import Members
from rankgrad.training import threads
from rankgrad.training.build import fit_to_data, make_objectives, make_state
from rankgrad.training.config import RECIPES
from rankgrad.training.loop import train
from rankgrad.training.threads import HELD_LONGEST, TRIED, numbers_to_try, paces, sleeping, torch_threads

CPU = torch.device("cpu")


def taken(seconds_of, steps, numbers):
    """The numbers of threads of so many steps, each of which takes as long as seconds_of(step, number) says."""
    pace = paces(numbers)
    found = [next(pace)]
    for step in range(steps - 1):
        found.append(pace.send(seconds_of(step, found[-1])))
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
def test_the_fastest_number_of_threads_is_found_and_others_are_tried_seldom(seconds, best):
    found = taken(lambda _, number: seconds[number], 1000, list(seconds))
    assert found[200:].count(best) > 0.97 * len(found[200:])
    slow = [number for number in found if seconds[number] > 2 * seconds[best]]
    assert len(slow) < 30 and all(abs(list(seconds).index(a) - list(seconds).index(b)) < 2 for a, b in pairwise(found))


def test_the_number_of_threads_follows_the_load():
    idle, busy = {1: 1.0, 2: 0.7}, {1: 1.5, 2: 15.0}
    found = taken(lambda step, number: (busy if 300 <= step < 600 else idle)[number], 1200, [1, 2])
    assert found[200:300].count(2) > 90
    assert found[300 + TRIED : 600].count(2) < 20  # noticed within a trial's steps
    assert found[600 + HELD_LONGEST + TRIED :].count(2) > 250  # and tried again from time to time


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
        changing = [1, 2, 3, 2] * 100

        def every_number(_):
            for chosen in changing:
                seen.add(chosen)
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


def test_those_who_stand_by_are_gone_afterwards(monkeypatch):
    for name in threads.WAITING:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    with torch_threads(2):
        with sleeping(2):
            assert len(standing_by()) == 1 and torch.get_num_threads() == 2
        with pytest.raises(KeyError), sleeping(2):
            raise KeyError
        assert not standing_by() and torch.get_num_threads() == 2
        with sleeping(1):
            assert not standing_by()
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        with sleeping(2):
            assert not standing_by()
    assert torch.get_num_threads() == before


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
