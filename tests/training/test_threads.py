"""How many threads train a model, and how they wait for each other where their number is part of the result."""

import contextlib
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from rankgrad import estimator, ranker
from rankgrad.data import synthetic
from rankgrad.models import MEMBERS_IN_ONE, MLP, Members, SharedMLP, SharedTransformer, Transformer
from rankgrad.runs import run
from rankgrad.training import openmp, threads
from rankgrad.training.build import fit_to_data, make_objectives, make_state
from rankgrad.training.config import RECIPES, Config, Data, Model, Train
from rankgrad.training.loop import train
from rankgrad.training.paces import Way
from rankgrad.training.threads import numbers_to_try, paces_of_training, threads_asleep, torch_threads, working

CPU = torch.device("cpu")
GENTLE, GREEDY = Way(2, asleep=True), Way(2)


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


class UnevenOfMany(Uneven):
    """The same, of splits that are measured: of more documents than a step has, and without gradients."""

    def score(self, x, codes):
        measured = x.shape[:-1].numel() >= MEMBERS_IN_ONE and not torch.is_grad_enabled()
        return super().score(x, codes) if measured else Members.score(self, x, codes)


def test_where_the_number_of_threads_counts_it_is_chosen_once_and_written_down():
    data = synthetic("tiny")
    config = fit_to_data(RECIPES["strong"](), data, CPU, validated=True)
    features = data.features.shape[1]
    with torch_threads(2):
        for kind, expected in ((Members, 0), (Uneven, 1), (UnevenOfMany, 1)):
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
    assert seen and min(seen) <= threads.PROBED and max(seen) <= threads.PROBED_WITHOUT_GRADIENT


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


def of_a_new_thread(ask=torch.get_num_threads):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(ask).result()


@pytest.mark.parametrize(("number", "counted"), [(2, 16), (3, 2), (16, 16)])
def test_new_threads_have_the_callers_number_after_others_stood_by(number, counted, monkeypatch):
    """torch tells new threads what was set last, by whomever."""
    monkeypatch.setattr(threads, "cores", lambda: counted)
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with threads_asleep(number):
            assert of_a_new_thread() == number
        assert of_a_new_thread() == of_a_new_thread(threads.most_threads) == number
    finally:
        torch.set_num_threads(before)


def test_threads_that_call_at_the_same_time_each_get_their_number_back():
    together = threading.Barrier(3)

    def call(own):
        torch.get_num_threads()  # when a thread asks for the first time, torch gives it what was set last, by whomever
        torch.set_num_threads(own)
        together.wait()
        time.sleep(0.05 * own)  # one after the other, and all at once
        with torch_threads(5):
            together.wait()
        return torch.get_num_threads()

    with ThreadPoolExecutor(3) as executor:
        assert [*executor.map(call, (2, 3, 4))] == [2, 3, 4]


def test_a_container_has_no_more_threads_than_its_quota(monkeypatch):
    with torch_threads(8):
        for quota, most in ((math.inf, 8), (2.5, 3), (0.5, 1)):
            monkeypatch.setattr(threads, "quota", lambda quota=quota: quota)
            monkeypatch.setattr(threads, "cores", lambda: 16)
            assert threads.most_threads() == most
            assert threads.threads_of_jobs(-1) == min(16, most if most < 8 else 16)


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


@pytest.mark.parametrize(("number", "said", "helpers"), [(1, False, 0), (2, False, 1), (2, True, 0)])
def test_threads_that_score_sleep_unless_the_user_has_said_how_they_wait(monkeypatch, number, said, helpers):
    monkeypatch.setattr(threads, "waiting_was_chosen", lambda: said)
    before = torch.get_num_threads()
    with threads_asleep(number):
        assert len(standing_by()) == helpers and torch.get_num_threads() == number
    assert not standing_by() and torch.get_num_threads() == before
    monkeypatch.setattr(threads, "_home", os.getpid() + 1)  # forked: threads are left behind
    with threads_asleep(2):
        assert not standing_by() and torch.get_num_threads() == 1


def test_many_lists_are_scored_and_runs_measured_by_threads_that_sleep(monkeypatch, tmp_path):
    seen = []

    @contextlib.contextmanager
    def asleep(number):
        seen.append(number)
        with torch_threads(number):
            yield

    for module in (estimator, ranker, run):
        monkeypatch.setattr(module, "threads_asleep", asleep)
    data = synthetic("tiny")
    X, y, qid = data.features, data.labels, np.repeat(data.query_ids, data.lengths)
    with torch_threads(2):
        fitted = estimator.NeuralRanker(model="mlp", hidden=(8,), epochs=1, random_state=0, verbose=0)
        fitted.fit(X, y, qid=qid)
        assert len(seen) == 1  # after training, what chose is measured
        monkeypatch.setattr(threads, "WORTH_A_THREAD", 1.0)
        fitted.predict(X, qid=qid)
        assert seen[1:] == [2]
        data.save(tmp_path / "lists")
        config = Config(data=Data(str(tmp_path / "lists")), model=Model("linear"), train=Train(epochs=1, threads=2))
        list(run.train_run(tmp_path / "run", config))
        assert seen[2:] == [2]


def test_what_follows_the_load_and_what_the_user_says(monkeypatch):
    seen = []
    monkeypatch.setattr(threads, "paces", lambda numbers, *, cores, sleeps: seen.append((numbers, sleeps)))
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
