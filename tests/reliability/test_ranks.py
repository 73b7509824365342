"""Two processes: the promises of reliability/numbers.py and reliability/workers.py, a few tries each."""

import dataclasses
import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest
from reliability.numbers import MODELS, config_of

import children
from rankgrad.data import synthetic
from rankgrad.errors import InterruptedRunError, OtherProcessError
from rankgrad.runs.run import Finished, Started, train_run
from rankgrad.training import distributed
from rankgrad.training.config import loads, replaced, strong

pytestmark = pytest.mark.slow  # each starts processes


def held(attempt, times):
    """Try a promise in a process that has no threads, because it forks."""
    from reliability import numbers

    found = getattr(numbers, attempt)(times, 1)
    print("\n".join(found.failures), file=sys.stderr)
    sys.exit(bool(found.failures) or found.tried != times)


@pytest.mark.parametrize(("attempt", "times"), [("refused_steps", 3), ("dropped_members", 1), ("nothing_relevant", 1)])
def test_bad_numbers_in_one_of_two_processes(attempt, times):
    assert children.code(children.start(held, attempt, times), seconds=120) == 0


class StopOne:
    """One process is stopped in the midst of training, and a beat is short."""

    def __init__(self):
        self.steps = 0

    def __call__(self):
        distributed.BEAT = 0.2

    def see(self, event):
        self.steps += type(event).__name__ == "Step"
        if self.steps == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)


CONFIG = config_of(MODELS["mlp"], "neural_ndcg@5")


def test_a_process_that_stands_still_does_not_keep_the_other_waiting(tmp_path):
    one, other = children.group(children.train, 2, tmp_path / "run", StopOne(), CONFIG)
    assert children.code(one, seconds=60) == 130
    assert other.is_alive()
    other.kill()
    list(train_run(tmp_path / "run"))


@pytest.fixture
def again(monkeypatch):
    monkeypatch.setattr(distributed, "restarted", lambda: True)


def report(run):
    return {key: value for key, value in json.loads((run / "report.json").read_text()).items() if key != "seconds"}


def test_after_a_restart_the_same_command_goes_on_with_its_run_and_with_no_other(tmp_path, again):
    whole, half = tmp_path / "whole", tmp_path / "half"
    list(train_run(whole, CONFIG))  # nothing was there yet
    events = train_run(half, CONFIG)
    while type(next(events)).__name__ != "Epoch":
        pass
    events.close()
    with pytest.raises(ValueError, match="exists already"):
        list(train_run(half, dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, seed=7))))
    started, *events = train_run(half, CONFIG)
    assert "torchrun" in started.note and sum(type(event).__name__ == "Epoch" for event in events) == 1
    assert (half / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for asked in (CONFIG, None):
        started, finished = train_run(half, asked)  # it was done when another process was lost
        assert isinstance(started, Started) and isinstance(finished, Finished)
        assert {key: value for key, value in finished.report.items() if key not in ("run", "seconds")} == report(half)


@pytest.mark.parametrize("weighted", [False, True])
def test_what_the_data_have_settled_is_the_run_that_was_asked_for(tmp_path, again, weighted):
    """Numbers that are left open, inputs, and losses that documents' weights leave out are written down when data are read."""
    data = synthetic("tiny")
    if weighted:
        data = dataclasses.replace(data, document_weights=np.arange(len(data.labels)) % 3 + 1.0)
    data.save(tmp_path / "lists")
    members = {"members.count": 4, "train.epochs": 2, "loss.options": {"tau": 2.0}}
    config = replaced(strong(), "data.path", str(tmp_path / "lists"))
    for name, value in members.items():
        config = replaced(config, name, value)
    events = train_run(tmp_path / "run", config)
    while type(next(events)).__name__ != "Epoch":
        pass
    events.close()
    settled = loads((tmp_path / "run" / "config.toml").read_text())
    assert settled.model.inputs == "pieces" and ("neural_ndcg@10" in settled.loss.names) == (not weighted)
    started, *_ = train_run(tmp_path / "run", config)
    assert "torchrun" in started.note
    with pytest.raises(ValueError, match="exists already"):
        list(train_run(tmp_path / "run", replaced(config, "loss.name", ("softmax", "neural_ndcg@5"))))


def test_a_restart_without_a_name_finds_the_run_that_it_had_begun(tmp_path, again, monkeypatch):
    from rankgrad.runs.run import begun_before_restart

    monkeypatch.chdir(tmp_path)
    assert begun_before_restart("loss", CONFIG) is None
    for name in ("loss-1", "loss-2", "other-3"):
        events = train_run(tmp_path / "runs" / name, CONFIG)
        next(events)
        events.close()
    os.utime(tmp_path / "runs" / "loss-1" / "config.toml")
    assert begun_before_restart("loss", CONFIG).name == "loss-1"
    shutil.rmtree(tmp_path / "runs" / "loss-1")
    assert begun_before_restart("loss", CONFIG).name == "loss-2"
    monkeypatch.setattr(distributed, "restarted", lambda: False)
    assert begun_before_restart("loss", CONFIG) is None


class Spoken:
    """A heart whose store counts who speaks."""

    def __init__(self):
        self.store, self.count = self, 0

    def add(self, _, number):
        self.count += number
        return self.count


def test_of_processes_that_fail_the_first_speaks(monkeypatch):
    monkeypatch.setattr(distributed, "_heart", Spoken())

    def fail(error):
        with distributed.one_message():
            raise error

    with pytest.raises(OSError, match="disk"):
        fail(OSError("disk"))
    with pytest.raises(OtherProcessError):
        fail(ValueError("the same, or what came of it"))
    with pytest.raises(InterruptedRunError) as caught:
        fail(InterruptedRunError("stopped", 143))
    assert (str(caught.value), caught.value.status) == ("", 143)
