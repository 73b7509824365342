"""How many threads train a model, and how they wait for each other where their number is part of the result."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from rankgrad.data import synthetic
from rankgrad.models import MLP, Members, SharedMLP, SharedTransformer, Transformer
from rankgrad.training import openmp, threads
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
    paces_of_training,
    torch_threads,
    working,
)

CPU = torch.device("cpu")


def taken(pace_of, steps, numbers):
    """The ways of so many steps, each of which takes what pace_of(step, way) says: seconds, and perhaps the share of a core it had."""
    pace = paces(numbers)
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
    found = [way.threads for way in taken(lambda _, way: seconds[way.threads], 1000, numbers)]
    assert found[200:].count(best) > 0.97 * len(found[200:])
    slow = [number for number in found if seconds[number] > 2 * seconds[best]]
    assert len(slow) < 30 and all(abs(numbers.index(a) - numbers.index(b)) < 2 for a, b in pairwise(found))


GENTLE, GREEDY = Way(2, asleep=True), Way(2)
IDLE = {Way(1): (1.0, 1.0), GREEDY: (0.7, 1.0), GENTLE: (0.9, 0.85)}
BUSY = {  # another program shares the core of the step's thread, or that of the other one, for which it then waits and spins
    "its core": {Way(1): (1.5, 0.6), GREEDY: (15.0, 0.5), GENTLE: (1.6, 0.4)},
    "the other": {Way(1): (1.0, 1.0), GREEDY: (15.0, 1.0), GENTLE: (1.6, 0.7)},
}


@pytest.mark.parametrize("numbers", [[1, 2], [2]])
@pytest.mark.parametrize("disturbed", BUSY)
def test_the_way_follows_the_load(disturbed, numbers):
    gentle = Way(1) if 1 in numbers else GENTLE

    def pace(step, way):
        return Pace(*(BUSY[disturbed] if 300 <= step < 600 else IDLE)[way])

    found = taken(pace, 1200, numbers)
    assert found[:TRIED] == [gentle] * TRIED and found[200:300].count(GREEDY) > 90
    assert found[300 : 304 + TRIED].count(GREEDY) <= 4  # noticed by a few steps
    assert found[300:600].count(GREEDY) < 10  # and seldom tried where it is ten times slower
    assert found[320:600].count(gentle) > 0.85 * 280
    back = found[600:].index(GREEDY)
    assert back < (4 * TRIED if disturbed == "its core" or gentle == GENTLE else HELD_LONGEST)
    assert found[600 + back + TRIED :].count(GREEDY) > 0.9 * len(found[600 + back + TRIED :])


def test_beside_busy_programs_threads_that_sleep_are_taken_where_they_are_faster():
    """Large operations: two threads have two shares of the cores, and lose little by waiting for each other."""
    busy = {Way(1): (1.5, 0.6), GENTLE: (1.0, 0.5), GREEDY: (15.0, 0.5)}

    def pace(step, way):
        return Pace(*(busy if 300 <= step < 600 else IDLE)[way])

    found = taken(pace, 1200, [1, 2])
    assert found[340:600].count(GENTLE) > 0.85 * 260 and found[304:600].count(GREEDY) == 0
    assert found[620:].count(GREEDY) > 0.9 * len(found[620:])


@pytest.mark.parametrize("sleeps", [True, False])
def test_more_threads_are_tried_again_when_it_is_calm(sleeps):
    """Where threads that sleep are as fast as those that spin, as large operations are."""
    idle = {1: 1.0, 2: 0.6, 4: 0.4}
    busy = {1: 1.5, 2: 1.0, 4: 1.8}
    pace = paces([1, 2, 4], sleeps=sleeps)
    found = [next(pace)]
    for step in range(1000):
        seconds = (busy if step < 300 else idle)[found[-1].threads]
        found.append(pace.send(Pace(seconds, 0.5 if step < 300 else 1.0)))
    assert sum(way.threads == 2 for way in found[100:300]) > 160
    assert sum(way == Way(4) for way in found[500:]) > 0.9 * len(found[500:])


def test_how_threads_wait_is_left_to_the_user():
    for disturbed in BUSY.values():
        pace = paces([1, 2], sleeps=False)
        way = next(pace)
        for _ in range(300):
            assert not way.asleep
            way = pace.send(Pace(*disturbed[way]))


@pytest.mark.parametrize("numbers", [[1, 2], [2]])
def test_a_busy_machine_is_known_before_the_greedy_way_is_tried(numbers):
    assert GREEDY not in taken(lambda _, way: Pace(*BUSY["its core"][way]), 600, numbers)


def test_one_slow_step_is_no_sign():
    found = taken(lambda step, way: Pace(9.0, 0.3) if step == 200 else Pace(*IDLE[way]), 260, [2])
    without = taken(lambda _, way: Pace(*IDLE[way]), 260, [2])
    assert found == without


def test_the_numbers_to_try():
    assert [numbers_to_try(most) for most in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]


def trained(recipe, numbers, monkeypatch):
    """What is learned in three epochs with these numbers of threads in turn."""
    data = synthetic("tiny")
    config = fit_to_data(RECIPES[recipe](), data, CPU, validated=True)
    count = 5 if recipe == "strong" else 1
    config = replace(config, train=replace(config.train, epochs=3), members=replace(config.members, count=count))
    seen = set()

    def in_turn(_):
        for number in itertools.cycle(numbers):
            seen.add(torch.get_num_threads())
            yield Way(number)

    monkeypatch.setattr("rankgrad.training.loop.paces_of_training", in_turn)
    with torch_threads(numbers[0]):
        torch.manual_seed(0)
        state = make_state(config, data, CPU)
        with torch_threads(3):
            for _ in train(state, make_objectives(config), data, data, config, CPU):
                pass
    assert {*numbers} <= seen
    return state.model.parameters()


@pytest.mark.parametrize("recipe", ["strong", "paper"])
def test_training_is_the_same_to_the_bit_with_any_number_of_threads(recipe, monkeypatch):
    one, two, some = (trained(recipe, numbers, monkeypatch) for numbers in ([1], [2], [1, 2, 3, 2]))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, some))


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


def test_wide_features_are_compared_on_a_few_documents():
    members, seen = Members(30_000, ids=range(2), hidden=(2,)), []
    members.register_forward_pre_hook(lambda _, given: seen.append(given[0].numel()))
    with torch_threads(2):
        threads.learns_the_same(members, 10**3, [10**3])  # all of them would be 120 GB
    assert seen and max(seen) <= threads.PROBED


@pytest.mark.parametrize(
    "model",
    [
        Transformer(5, width=16, feedforward=32, dropout=0.2, inputs="list"),
        MLP(5, hidden=(64, 32), dropout=0.2, input_noise=0.1),
        SharedTransformer(5, members=3, width=16, feedforward=32),
        SharedMLP(5, members=3, hidden=(32,), categories={1: 7, 4: 3}),
        Transformer(5, width=16, feedforward=32, categories={0: 9}),
    ],
    ids=["transformer", "mlp", "shared transformer", "shared mlp", "categories"],
)
def test_networks_learn_the_same_to_the_bit_with_any_number_of_threads(model):
    before = [parameter.clone() for parameter in model.parameters()]
    state = torch.random.get_rng_state()
    with torch_threads(4):
        assert threads.learns_the_same(model, 40, [9, 90])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_network_that_is_worth_threads_follows_the_load(monkeypatch):
    data = synthetic("tiny")
    config = fit_to_data(RECIPES["paper"](), data, CPU, validated=True)

    def chosen(model, config=config):
        return threads.threads_of_training(config, model, data, CPU)

    class Own(MLP):
        """A network of one's own may change with every call: it is not tried."""

        def forward(self, features, mask=None):
            raise AssertionError

    small, large, own = (make(data.features.shape[1]) for make in (MLP, Transformer, Own))
    monkeypatch.setattr(threads, "WORTH_IN_TRAINING", 1.0)
    with torch_threads(2):
        assert chosen(large) == chosen(small) == 0
        assert chosen(own) == 2
        assert chosen(large, replace(config, train=replace(config.train, threads=3))) == 3
        assert chosen(large, replace(config, train=replace(config.train, precision="bf16"))) == 2
        monkeypatch.setattr(threads, "learns_the_same", lambda *_: False)
        assert chosen(large) == 2
        monkeypatch.setattr(threads, "WORTH_IN_TRAINING", 1e15)
        assert chosen(large) == chosen(small) == 1
    monkeypatch.undo()
    monkeypatch.setattr(threads, "WORTH_IN_TRAINING", 1.0)
    with torch_threads(1):  # a run that goes on elsewhere learns the same
        assert chosen(large) == 0 and chosen(own) == 1


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


def test_what_follows_the_load_and_what_the_user_says(monkeypatch):
    seen = []
    monkeypatch.setattr(threads, "paces", lambda numbers, *, sleeps: seen.append((numbers, sleeps)))
    for name in openmp.WAITING:
        monkeypatch.delenv(name, raising=False)

    def chosen(follows_load):
        seen.clear()
        paces_of_training(follows_load)
        return seen[0] if seen else None

    with torch_threads(2):
        assert chosen(False) == ([2], True) and chosen(True) == ([1, 2], True)
        with monkeypatch.context() as shell:
            for name, value in openmp.SHORTLY.items():  # as the command line does
                shell.setenv(name, value)
            assert chosen(False) == ([2], True)
            shell.setenv("GOMP_SPINCOUNT", "7")
            assert chosen(False) is None
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        assert chosen(False) is None and chosen(True) == ([1, 2], False)
    with torch_threads(1):
        assert chosen(False) is chosen(True) is None


def test_one_network_learns_the_same_however_its_threads_wait(monkeypatch):
    data = synthetic("tiny")
    config = fit_to_data(RECIPES["small"](), data, CPU, validated=True)
    config = replace(config, train=replace(config.train, epochs=2, threads=2))
    learned = []
    for ways in ([GREEDY], [GENTLE, GREEDY]):
        in_turn = (way for way in itertools.cycle(ways))  # whatever is sent
        monkeypatch.setattr("rankgrad.training.loop.paces_of_training", lambda _, in_turn=in_turn: in_turn)
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
