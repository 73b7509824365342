"""A run folder is the whole truth of a run, and whatever interrupts a run, it ends with the same bits."""

import dataclasses
import functools
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import children
import rankgrad
from cases import without_seal
from children import INTERRUPTED, REFUSED, Trap
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.synthetic import synthetic
from rankgrad.errors import InterruptedRunError, NonFiniteError
from rankgrad.files import load_tensors
from rankgrad.losses import LOSSES
from rankgrad.metrics import parse_metric
from rankgrad.runs import provenance
from rankgrad.runs.folder import Checkpoints, read_per_document, read_per_query
from rankgrad.runs.run import Finished, Run, Started, train_run
from rankgrad.training import build
from rankgrad.training.build import validate
from rankgrad.training.config import Config, Data, Loss, Members, Model, Optimiser, Train, loads
from rankgrad.training.data import shared_splits
from rankgrad.training.evaluate import measure, summarise
from rankgrad.training.loop import Epoch, Step

# Everything random is in it: dropout, input noise, a random loss, subsampled lists; and a rate that changes with every step.
CONFIG = Config(
    data=Data("synthetic:tiny", list_size=10),
    model=Model(kind="mlp", hidden=(6,), dropout=0.2, input_noise=0.1),
    loss=Loss("xe_ndcg"),
    optimiser=Optimiser(lr=0.02, schedule="cosine", warmup=3),
    train=Train(epochs=3, batch_size=8, threads=1, device="cpu", seed=4),
)
STEPS = 4  # of an epoch


def trained(out, config=CONFIG):
    return [event for event in train_run(out, config) if isinstance(event, Epoch)]


def resumed(out):
    """What happens in the rest of a run, its steps and epochs, or in a run that was killed before it was one."""
    begun = (out / "config.toml").exists()
    first, *events, last = train_run(out) if begun else train_run(out, CONFIG)
    assert isinstance(first, Started) and first.folder == out
    assert isinstance(last, Finished) and last.report == {"run": str(out), **report(out)}
    return events


def history(out):
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def weights(out):
    return load_tensors(out / "model.safetensors")[0]


def report(out):
    return json.loads((out / "report.json").read_text())


def message(out):
    return Path(f"{out}.message-0").read_text()


def assert_same_run(out, whole):
    own, expected = weights(out), weights(whole)
    assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    assert history(out) == history(whole)
    assert report(out)["metrics"] == report(whole)["metrics"]
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in out.iterdir()} == names  # nothing stray
    own, expected = (Checkpoints(folder).load()[0] for folder in (out, whole))
    assert all(torch.equal(own[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    trained(out)
    return out


@pytest.fixture(scope="module")
def writes(whole, tmp_path_factory):
    """How many writes to the disk a run makes."""
    out = tmp_path_factory.mktemp("counted") / "run"
    children.begin(out, CONFIG)
    assert children.code(children.start(count_writes, out)) == 0
    return int(message(out))


def count_writes(out):
    trap = Trap(0)
    children.train(out, trap)
    Path(f"{out}.message-0").write_text(str(trap.count))


# --- one seed, one result ---------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_bits_again_and_another_seed_others(whole, tmp_path):
    torch.manual_seed(123)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    trained(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert_same_run(tmp_path / "again", whole)
    trained(tmp_path / "other", dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, seed=5)))
    own, other = weights(whole), weights(tmp_path / "other")
    assert any(not torch.equal(own[name], other[name]) for name in own if name.startswith("model."))


@pytest.mark.slow
def test_another_process_gives_the_same_bits(whole, tmp_path):
    out = tmp_path / "run"
    assert children.code(children.start(children.train, out, None, CONFIG)) == 0
    assert_same_run(out, whole)


def test_equal_runs_leave_equal_bytes_and_so_does_one_that_was_resumed(whole, tmp_path):
    trained(tmp_path / "again")
    events = train_run(tmp_path / "cut", CONFIG)
    next(event for event in events if isinstance(event, Epoch))
    events.close()
    assert len(resumed(tmp_path / "cut")) == 2 * (STEPS + 1)
    for name in ("model.safetensors", "queries.safetensors"):
        expected = (whole / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == expected, name
        assert (tmp_path / "cut" / name).read_bytes() == expected, name


def test_events_begin_with_the_configuration_and_end_with_the_report(tmp_path):
    first, *between, last = train_run(tmp_path / "run", CONFIG)
    assert first == Started(tmp_path / "run", validate(CONFIG))
    assert [type(event) for event in between] == 3 * [*STEPS * [Step], Epoch]
    assert last == Finished({"run": str(tmp_path / "run"), **report(tmp_path / "run")})


def test_lists_may_come_from_the_caller(whole, tmp_path):
    """Whoever trains many runs on the same lists reads them once."""
    asked = []

    def read(config, folder, world):
        asked.append((config.data.path, folder, world))
        return shared_splits(config, folder, world)

    list(train_run(tmp_path / "run", CONFIG, read=read))
    assert asked == [("synthetic:tiny", tmp_path / "run", 1)]
    assert_same_run(tmp_path / "run", whole)


# --- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_any_write_a_run_resumes_exactly(whole, writes, tmp_path):
    assert writes > 30
    between_renames = {writes - 11, writes - 10}  # of the last checkpoint: nothing is written after it but the report
    for number in {*range(1, writes + 1, 12), *between_renames}:  # tests/reliability draws others
        out = tmp_path / f"run{number}"
        children.begin(out, CONFIG)
        assert children.code(children.start(children.train, out, Trap(number))) == -signal.SIGKILL
        if not (out / "report.json").exists():
            resumed(out)
        assert_same_run(out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["SIGKILL", "full disk"])
def test_a_new_run_that_ends_in_its_first_moments_can_be_trained_again(whole, tmp_path, what):
    for number in (1, 2, 3, 4, 5):
        out = tmp_path / f"run{number}"
        expected = REFUSED if what == "full disk" else -signal.SIGKILL
        assert children.code(children.start(children.train, out, Trap(number, what=what), CONFIG)) == expected
        if what == "full disk" and number > 3:  # it had begun, and has learned nothing
            assert not out.exists()
        resumed(out)
        assert_same_run(out, whole)


@pytest.mark.slow
def test_killed_again_and_again_a_run_still_ends_the_same(whole, tmp_path):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    for number in (5, 9, 4, 13, 12):
        assert children.code(children.start(children.train, out, Trap(number))) == -signal.SIGKILL
    resumed(out)
    assert_same_run(out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, STEPS, 2 * STEPS + 1])
def test_killed_between_steps_a_run_resumes_from_the_epoch_before(whole, tmp_path, step):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    assert children.code(children.start(children.train, out, Trap(step, at="step"))) == -signal.SIGKILL
    events = resumed(out)
    assert (events[0].epoch, events[0].step) == ((step - 1) // STEPS, 1)
    assert_same_run(out, whole)


@pytest.mark.slow
def test_killed_at_random_moments(whole, tmp_path):
    generator = np.random.default_rng()
    for number in range(4):
        out = tmp_path / f"run{number}"
        children.begin(out, CONFIG)
        process = children.start(children.train, out)
        time.sleep(generator.uniform(0.0, 0.6))
        process.kill()
        children.code(process)
        if not (out / "report.json").exists():
            resumed(out)
        assert_same_run(out, whole)


@pytest.mark.slow
def test_history_after_the_checkpoint_is_cut(whole, tmp_path):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    assert children.code(children.start(children.train, out, Trap(2, at="epoch"))) == -signal.SIGKILL
    with (out / "history.jsonl").open("a") as file:
        file.write('{"epoch": 3, "loss": 0.0}\n{"epoch": 4, "lo')
    resumed(out)
    assert_same_run(out, whole)


# --- asked to stop ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("step", [1, STEPS - 1, STEPS, 2 * STEPS - 1, 3 * STEPS - 1])
def test_asked_to_stop_a_run_saves_in_the_middle_of_an_epoch(whole, tmp_path, name, step):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    assert children.code(children.start(children.train, out, Trap(step, at="step", what=name))) == INTERRUPTED
    done = step + 1  # the step after the signal is finished
    facts = Checkpoints(out).load()[1]
    assert (facts["epoch"], facts["step"]) == ((done - 1) // STEPS, (done - 1) % STEPS + 1)
    epoch = facts["epoch"] + 1
    assert f"epoch {epoch} " in message(out) and f"rankgrad train --resume {out}" in message(out)
    events = resumed(out)
    assert [type(event) for event in events].count(Step) == 3 * STEPS - done
    assert_same_run(out, whole)


@pytest.mark.slow
def test_asked_to_stop_again_and_again(whole, tmp_path):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    for _ in range(3):
        assert children.code(children.start(children.train, out, Trap(1, at="step", what="SIGINT"))) == INTERRUPTED
    resumed(out)
    assert_same_run(out, whole)


def twice_while_saving():
    """Ctrl-C at the second step, and again in each write of the checkpoint that follows."""
    trap = Trap(0)
    trap.spring = lambda: os.kill(os.getpid(), signal.SIGINT)
    trap()

    def see(event):
        if isinstance(event, Step) and event.step == 2:
            trap.spring()
            trap.number = trap.count + 1
            trap.spring = lambda: setattr(trap, "number", trap.number + 1) or os.kill(os.getpid(), signal.SIGINT)

    twice_while_saving.see = see


@pytest.mark.slow
def test_a_second_ctrl_c_while_saving_breaks_nothing(whole, tmp_path):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    assert children.code(children.start(children.train, out, twice_while_saving)) == INTERRUPTED
    assert Checkpoints(out).load()[1]["step"] == 3
    resumed(out)
    assert_same_run(out, whole)


def interrupted_reading():
    from rankgrad.training import data as splits

    def read(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    splits.read_splits = read


def interrupted_finishing():
    from rankgrad.runs import run

    evaluate = run.evaluate

    def slow(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments, **options)

    run.evaluate = slow


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [interrupted_reading, interrupted_finishing])
def test_outside_of_training_a_run_is_left_at_once(whole, tmp_path, prepare):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    assert children.code(children.start(children.train, out, prepare), seconds=20) == INTERRUPTED
    assert "epoch" not in message(out) and f"rankgrad train --resume {out}" in message(out)
    resumed(out)
    assert_same_run(out, whole)


@pytest.mark.slow
def test_a_signal_in_the_last_epoch_s_validation_leaves_before_the_report(whole, tmp_path):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    assert children.code(children.start(children.train, out, Trap(3, at="epoch", what="SIGTERM"))) == INTERRUPTED
    assert not (out / "report.json").exists()
    assert resumed(out) == []
    assert_same_run(out, whole)


@pytest.mark.parametrize("extended", [False, True])
def test_a_signal_after_the_last_file_does_not_ask_to_resume(tmp_path, extended):
    out = tmp_path / "run"
    if extended:
        trained(out)
    events = train_run(out, epochs=4) if extended else train_run(out, CONFIG)
    assert any(isinstance(event, Finished) for event in events)  # which is not left yet
    with pytest.raises(InterruptedRunError) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    events.close()
    assert caught.value.status == 143
    assert f"{out} is finished" in str(caught.value) and "--resume" not in str(caught.value)


def test_handlers_are_the_caller_s_again(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trained(tmp_path / "run")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# --- damaged, full ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path):
    out = tmp_path / "run"
    children.begin(out, CONFIG)
    assert children.code(children.start(children.train, out, Trap(2, at="epoch"))) == -signal.SIGKILL
    assert Checkpoints(out).load()[1]["epoch"] == 2
    return out


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(whole, stopped, capsys, damage):
    path = stopped / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"empty": b"", "cut": bytes(content[:-1]), "flipped": bytes(content)}[damage])
    events = resumed(stopped)
    assert events[0].epoch == 1
    said = capsys.readouterr().err
    assert str(path) in said and "damaged" in said and "going on from the checkpoint before it" in said
    assert_same_run(stopped, whole)


def test_a_configuration_that_was_emptied_is_named(stopped):
    (stopped / "config.toml").write_text("\n")
    with pytest.raises(ValueError, match=r"config.toml is empty.*copy.*new run"):
        resumed(stopped)


def test_two_damaged_checkpoints_are_an_error(stopped):
    for path in stopped.glob("checkpoint*"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint.safetensors .*checkpoint.previous.safetensors "):
        list(train_run(stopped))


@pytest.mark.slow
def test_a_full_disk_is_a_message_and_the_run_goes_on_later(whole, writes, tmp_path):
    for number in range(2, writes + 1, 14):  # tests/reliability draws others
        out = tmp_path / f"run{number}"
        children.begin(out, CONFIG)
        trap = Trap(number, what="full disk")
        assert children.code(children.start(children.train, out, trap)) == REFUSED
        assert "No space left on device" in message(out)
        assert not list(out.glob(".*"))
        if not (out / "report.json").exists():
            resumed(out)
        assert_same_run(out, whole)


def test_other_data_is_not_taken_for_the_same(tmp_path):
    data = synthetic("tiny", "train")
    data.save(tmp_path / "data")
    config = dataclasses.replace(CONFIG, data=Data(str(tmp_path / "data")))
    out = tmp_path / "run"
    assert children.code(children.start(children.train, out, Trap(1, at="epoch"), config)) == -signal.SIGKILL
    features = data.features.copy()
    features[:, 0] += 1
    dataclasses.replace(data, features=features).save(tmp_path / "data", overwrite=True)
    with pytest.raises(ValueError, match="data of .*run changed.*new run"):
        list(train_run(out))


# --- the folder ------------------------------------------------------------------------------------------------------


def test_the_configuration_is_written_validated_and_loads_back(whole):
    assert loads((whole / "config.toml").read_text()) == validate(CONFIG)
    with pytest.raises(ValueError, match=r"is finished.*resume"):
        list(train_run(whole))


def test_the_report_says_everything(whole):
    said = report(whole)
    assert said["metrics"].keys() == said["splits"].keys() == {"train", "vali", "test"}
    for split, metrics in said["metrics"].items():
        assert list(metrics) == list(CONFIG.train.metrics)
        for rules in metrics.values():
            assert rules.keys() == {"empty=1", "empty=0", "skipped"}
            assert rules["empty=0"] < rules["skipped"] < rules["empty=1"]
        data = synthetic("tiny", split).describe()
        counts = {"queries": data.queries, "documents": data.documents, "empty_queries": data.empty_queries}
        assert said["splits"][split] == counts
    assert said["seed"] == 4 and said["loss"] == "xe_ndcg" and said["epochs"] == 3
    assert said["versions"]["torch"] == torch.__version__ and said["versions"]["numpy"] == np.__version__
    assert said["machine"]["platform"] and said["machine"]["device"] and said["machine"]["threads"] == 1
    assert said["seconds"] > 0 and "2^y - 1" in said["convention"]
    assert said["execution"]["resident"] is True and said["execution"]["graph"] is False
    assert "CUDA device" in said["execution"]["why_not"]["graph"]
    assert re.fullmatch(r"[0-9a-f]{40,64}( \(modified\))?", said["commit"] or "0" * 40)  # none without git


def test_the_commit_is_that_of_the_checkout_and_says_if_it_was_changed(tmp_path, monkeypatch):
    def git(*words):
        names = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", tmp_path, *names, *words], check=True, capture_output=True, text=True
        ).stdout

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "provenance.py").write_text("1\n")
    for words in ("init -q", "add runs/provenance.py", "commit -q -m first"):
        git(*words.split())
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "runs" / "provenance.py"))
    provenance._commit.cache_clear()
    head = git("rev-parse", "HEAD").strip()
    assert provenance.versions()["commit"] == head
    (tmp_path / "runs" / "provenance.py").write_text("2\n")
    assert provenance.versions()["commit"] == head  # as it was asked first
    provenance._commit.cache_clear()
    assert provenance.versions()["commit"] == f"{head} (modified)"
    provenance._commit.cache_clear()


def test_no_other_program_is_started_while_the_folder_is_locked(tmp_path, monkeypatch):
    """Killed at that moment, its child would hold the lock for a while, and whoever resumes at once would be refused."""
    while_locked = []

    class Seen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            while_locked.append((tmp_path / "run").exists())
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Seen)
    monkeypatch.setattr(platform, "_uname_cache", None)
    provenance._commit.cache_clear()
    list(train_run(tmp_path / "run", CONFIG))
    assert while_locked and not any(while_locked)


def test_a_copy_inside_another_repository_does_not_claim_its_commit(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "provenance.py").touch()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "runs" / "provenance.py"))
    provenance._commit.cache_clear()
    assert provenance.versions()["commit"] is None
    monkeypatch.setenv("PATH", "")
    provenance._commit.cache_clear()
    assert provenance.versions()["commit"] is None
    provenance._commit.cache_clear()


def test_the_commit_is_that_of_the_beginning(tmp_path, monkeypatch):
    config = Config(data=Data("synthetic:tiny"), model=Model(kind="linear"), train=Train(epochs=1, device="cpu"))
    answers = iter(["first", "second"])
    monkeypatch.setattr(provenance, "_commit", functools.cache(lambda: next(answers)))

    def and_then_something_is_checked_out(*arguments):
        assert provenance.versions()["commit"] == "first"
        return shared_splits(*arguments)

    *_, finished = train_run(tmp_path / "r", config, read=and_then_something_is_checked_out)
    assert finished.report["commit"] == "first"


def test_the_model_is_that_of_the_best_epoch_and_scores_like_the_report(whole, tmp_path):
    lines = history(whole)
    best = max(lines, key=lambda line: line["metric"])
    assert best["best"] and report(whole)["best_epoch"] == best["epoch"]
    assert report(whole)["metrics"]["vali"]["ndcg@10"]["empty=1"] == best["metric"]
    opened = Run.open(whole)
    test = opened.read("synthetic:tiny")
    values = opened.evaluate(test)
    assert summarise(values) == report(whole)["metrics"]["test"]
    left = read_per_query(whole)
    assert left.split == "test" and left.query_ids == test.query_ids.tolist()
    assert list(left.metrics) == list(CONFIG.train.metrics)
    for name, value in values.items():
        np.testing.assert_array_equal(left.metrics[name], value)
    assert opened.score(test).shape == test.labels.shape


def test_a_run_keeps_what_a_report_needs_of_every_query(whole):
    left, opened = read_per_query(whole), Run.open(whole)
    test = opened.read("synthetic:tiny")
    lists = [test.labels[a:b] for a, b in zip(test.offsets, test.offsets[1:])]
    assert left.documents.tolist() == [len(labels) for labels in lists]
    assert left.relevant.tolist() == [(labels > 0).sum() for labels in lists]
    assert list(left.curve) == [*range(1, 21), 30, 50, 100]
    expected = opened.evaluate(test, tuple(f"ndcg@{k}" for k in left.curve))
    for k, values in left.curve.items():
        np.testing.assert_allclose(values, expected[f"ndcg@{k}"], atol=1e-6)
    assert set(report(whole)["metrics"]["test"]) == set(CONFIG.train.metrics)


def test_the_last_epoch_is_not_the_best_and_is_not_read_per_query(tmp_path):
    config = dataclasses.replace(
        CONFIG, optimiser=Optimiser(lr=0.05), train=dataclasses.replace(CONFIG.train, epochs=8, seed=2)
    )
    epochs = trained(tmp_path / "run", config)
    best = max(epochs, key=lambda e: e.metric)
    assert best.epoch < 8
    last = {
        name.removeprefix("model."): t
        for name, t in Checkpoints(tmp_path / "run").load()[0].items()
        if "model." in name
    }
    kept = {name.removeprefix("model."): t for name, t in weights(tmp_path / "run").items() if "model." in name}
    assert any(not torch.equal(kept[name], last[name]) for name in kept)
    assert report(tmp_path / "run")["metrics"]["vali"]["ndcg@10"]["empty=1"] == best.metric


@pytest.mark.slow
def test_early_stopping_ends_a_run_even_if_it_is_killed_right_then(tmp_path):
    config = dataclasses.replace(
        CONFIG, optimiser=Optimiser(lr=0.05), train=dataclasses.replace(CONFIG.train, epochs=50, patience=2)
    )
    epochs = trained(tmp_path / "run", config)
    assert len(epochs) < 50 and epochs[-1].stop
    assert epochs[-1].epoch == report(tmp_path / "run")["best_epoch"] + 2
    out = tmp_path / "killed"
    assert children.code(children.start(children.train, out, Trap(len(epochs), at="epoch"), config)) == -signal.SIGKILL
    assert resumed(out) == []
    assert_same_run(out, tmp_path / "run")


def test_a_new_run_touches_nothing_that_exists(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thing").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(ValueError, match=f"{name} exists already.*--out.*--resume"):
            trained(tmp_path / name)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thing"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".config.toml.writing").write_text("half")  # killed in its first moment
    trained(tmp_path / "empty", dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, epochs=1)))
    assert not list((tmp_path / "empty").glob(".*"))


def test_one_process_trains_in_a_folder_at_a_time(whole, tmp_path):
    out = tmp_path / "run"
    events = train_run(out, CONFIG)
    next(event for event in events if isinstance(event, Epoch))
    for second, said in ((train_run(out), "run is in use"), (train_run(out, CONFIG), "exists already")):
        with pytest.raises(ValueError, match=said):
            next(second)
    events.close()
    resumed(out)
    assert_same_run(out, whole)
    more = train_run(out, epochs=4)
    next(more)
    with pytest.raises(ValueError, match="run is in use"):
        next(train_run(out))


def test_a_new_run_refuses_what_cannot_be_trained_and_leaves_nothing(tmp_path):
    for config in (
        dataclasses.replace(CONFIG, data=Data(str(tmp_path / "nowhere"))),
        dataclasses.replace(CONFIG, data=Data("synthetic:huge")),
        dataclasses.replace(CONFIG, loss=Loss("neural_ndgc")),
    ):
        with pytest.raises(ValueError, match="nowhere|huge|neural_ndgc"):
            trained(tmp_path / "run", config)
        assert not (tmp_path / "run").exists()


def test_what_is_no_run_is_said_to_be_none(tmp_path):
    with pytest.raises(ValueError, match="is not a run: it has no config.toml"):
        list(train_run(tmp_path))
    with pytest.raises(ValueError, match="is not a run: it has no model.safetensors"):
        Run.open(tmp_path)
    children.begin(tmp_path / "run", CONFIG)
    with pytest.raises(ValueError, match="has not finished: it has no model.safetensors"):
        Run.open(tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text("[trian]")
    with pytest.raises(ValueError, match=r"config.toml: unknown key 'trian'"):
        list(train_run(tmp_path / "run"))


def test_a_run_goes_on_from_another_folder(tmp_path, monkeypatch):
    synthetic("tiny", "train").save(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    children.begin(tmp_path / "run", dataclasses.replace(CONFIG, data=Data("data")))
    monkeypatch.chdir("/")
    assert len(resumed(tmp_path / "run")) > 0
    assert report(tmp_path / "run")["data"] == str(tmp_path / "data")


def test_a_changed_configuration_does_not_fit_the_model(whole, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("model.safetensors", "config.toml"):
        (folder / name).write_bytes((whole / name).read_bytes())
    (folder / "config.toml").write_text(without_seal(whole / "config.toml").replace("hidden = [6]", "hidden = [7]"))
    with pytest.raises(ValueError, match=r"model.safetensors do not fit \[model\]"):
        Run.open(folder)


def test_nothing_in_the_library_loads_a_pickle():
    for path in Path(rankgrad.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"torch\.load\(|^\s*(import|from) (pickle|cPickle|dill|joblib|shelve)", text, re.M), path
        assert not re.search(
            r"torch\.save\(|_object_list|(gather|scatter)_object\(|allow_pickle=True|weights_only=False", text
        ), path


def test_history_and_report_are_strict_json(tmp_path):
    """Where no list counts there is no loss, and where all are empty no mean without them: null, not NaN."""
    data = RankingDataset(np.random.default_rng(0).normal(size=(8, 3)), np.zeros(8), [0, 2, 4, 6, 8], [1, 2, 3, 4])
    data.save(tmp_path / "data")
    out = tmp_path / "run"
    trained(out, dataclasses.replace(CONFIG, data=Data(str(tmp_path / "data"))))
    texts = [*(out / "history.jsonl").read_text().splitlines(), (out / "report.json").read_text()]
    said = [json.loads(text, parse_constant=lambda name: pytest.fail(name)) for text in texts]
    assert said[0]["loss"] is None
    assert said[-1]["metrics"]["vali"]["map"] == {"empty=1": 1.0, "empty=0": 0.0, "skipped": None}


# --- what is trained --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(loss, tmp_path):
    config = dataclasses.replace(CONFIG, loss=Loss(loss), train=dataclasses.replace(CONFIG.train, epochs=2))
    epochs = trained(tmp_path / "run", config)
    assert len(epochs) == 2 and all(math.isfinite(e.loss) and e.skipped == 0 for e in epochs)
    opened = Run.open(tmp_path / "run")
    assert summarise(opened.evaluate(opened.read("synthetic:tiny"))) == report(tmp_path / "run")["metrics"]["test"]
    assert opened.ranker.model.output.out_features == (4 if loss == "ordinal" else 1)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("kind", ["transformer", "linear"])
def test_every_model_and_precision_trains(precision, kind, tmp_path):
    config = dataclasses.replace(
        CONFIG,
        model=Model(kind=kind, width=8, layers=1, feedforward=8),
        train=dataclasses.replace(CONFIG.train, precision=precision, epochs=1),
    )
    before = torch.get_float32_matmul_precision()
    (epoch,) = trained(tmp_path / "run", config)
    assert math.isfinite(epoch.loss) and epoch.skipped == 0
    assert torch.get_float32_matmul_precision() == before


def saved_splits(folder, **changes):
    for split in ("train", "vali", "test"):
        data = synthetic("tiny", split)
        dataclasses.replace(data, **changes.get(split, {})).save(folder / split)
    return dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, path=str(folder)))


def test_the_test_split_changes_nothing_but_its_own_numbers(whole, tmp_path):
    rng = np.random.default_rng(0)
    test = synthetic("tiny", "test")
    poison = {"features": rng.normal(size=test.features.shape) * 1e6, "labels": rng.permutation(test.labels)}
    out = tmp_path / "run"
    trained(out, saved_splits(tmp_path / "data", test=poison))
    own, expected = weights(out), weights(whole)
    assert all(torch.equal(own[name], expected[name]) for name in expected)
    assert history(out) == history(whole)
    assert report(out)["metrics"]["test"] != report(whole)["metrics"]["test"]


def test_without_a_validation_split_a_part_of_train_is_held_out(tmp_path):
    synthetic("tiny", "train").save(tmp_path / "data")
    data = Data(str(tmp_path / "data"), validation=0.3)
    trained(tmp_path / "run", dataclasses.replace(CONFIG, data=data))
    counts = {split: counts["queries"] for split, counts in report(tmp_path / "run")["splits"].items()}
    assert counts == {"train": 21, "vali": 9}
    assert read_per_query(tmp_path / "run").split == "vali"
    for share, expected in ((0.01, {"train": 1, "vali": 1}), (0.99, {"train": 1, "vali": 1})):
        out = tmp_path / f"two{share}"
        synthetic("tiny", "train").select([0, 1]).save(tmp_path / f"data{share}")
        trained(out, dataclasses.replace(CONFIG, data=Data(str(tmp_path / f"data{share}"), validation=share)))
        assert {split: counts["queries"] for split, counts in report(out)["splits"].items()} == expected
    synthetic("tiny", "train").select([0]).save(tmp_path / "single")
    with pytest.raises(ValueError, match="one query.*at least two"):
        trained(tmp_path / "single_run", dataclasses.replace(CONFIG, data=Data(str(tmp_path / "single"))))
    assert not (tmp_path / "single_run").exists()  # the same command can be given again


def test_query_weights_are_part_of_the_data(tmp_path):
    weight = np.ones(30)
    weight[3] = 0.0
    trained(tmp_path / "weighted", saved_splits(tmp_path / "data", train={"weights": weight}))
    plain = weights(tmp_path / "weighted")
    trained(tmp_path / "plain", saved_splits(tmp_path / "data2"))
    assert any(not torch.equal(plain[name], t) for name, t in weights(tmp_path / "plain").items())


def test_a_run_that_meets_nan_stops_with_names_or_counts(tmp_path, monkeypatch):
    original = build.make_model

    def make_model(*arguments, **options):
        model = original(*arguments, **options)
        model.count = 0

        def spoil(module, inputs, output):
            if module.training:
                model.count += 1
                if model.count == 6:
                    return output * torch.tensor([math.nan] + [1.0] * (len(output) - 1))[:, None]
            return None

        model.register_forward_hook(spoil)
        return model

    monkeypatch.setattr(build, "make_model", make_model)
    with pytest.raises(NonFiniteError, match=r"step 2 in epoch 2 .*not finite.* query \d+, "):
        trained(tmp_path / "stop")
    assert Checkpoints(tmp_path / "stop").load()[1]["epoch"] == 1
    skip = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, nonfinite="skip"))
    trained(tmp_path / "skip", skip)
    assert [line["skipped"] for line in history(tmp_path / "skip")] == [0, 1, 0]
    assert all(tensor.isfinite().all() for name, tensor in weights(tmp_path / "skip").items() if "model." in name)


def test_tensorboard_gets_the_curves(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append((Path(folder).name, purge_step))

        def add_scalar(self, *values):
            written.append(values)

        def close(self):
            written.append("closed")

    fake = type(sys)("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake)
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, tensorboard=True, epochs=1))
    (epoch,) = trained(tmp_path / "run", config)
    assert written == [("tensorboard", 1), ("loss", epoch.loss, 1), ("ndcg@10", epoch.metric, 1), "closed"]


def test_selecting_the_last_epoch_keeps_its_weights_whatever_validation_says(tmp_path):
    config = Config(
        data=Data(path="synthetic:tiny"),
        model=Model(width=8, feedforward=16, layers=1),
        optimiser=Optimiser(lr=0.1, schedule="constant"),
        train=Train(epochs=6, batch_size=8, select="last", threads=1, device="cpu"),
    )
    epochs = trained(tmp_path / "last", config)
    said = json.loads((tmp_path / "last" / "report.json").read_text())
    kept_value, best = said["metrics"]["vali"]["ndcg@10"]["empty=1"], max(epoch.metric for epoch in epochs)
    assert epochs[-1].metric < best, "the case needs a last epoch that is not the best"
    assert kept_value == pytest.approx(epochs[-1].metric, abs=1e-9)
    assert (said["best_epoch"], said["epochs"]) == (6, 6)
    assert "last epoch" in said["convention"]


def test_early_stopping_does_not_go_with_the_last_epoch(tmp_path):
    with pytest.raises(ValueError, match="patience.*select the best"):
        trained(tmp_path / "r", Config(train=Train(select="last", patience=3)))


@pytest.mark.parametrize("source", ["synthetic:tiny", "one file"])
def test_the_scores_that_were_measured_are_kept(tmp_path, source):
    if source == "one file":
        synthetic("tiny", "train").save(tmp_path / "one")
        source = str(tmp_path / "one")
    trained(tmp_path / "run", dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, path=source)))
    kept, of_queries = read_per_document(tmp_path / "run"), read_per_query(tmp_path / "run")
    ends = np.cumsum(of_queries.documents)
    lists = RankingDataset(np.zeros((len(kept.labels), 1)), kept.labels, [0, *ends], of_queries.query_ids)
    for metric, values in measure(kept.scores, lists, list(of_queries.metrics)).items():
        np.testing.assert_allclose(values, of_queries.metrics[metric], atol=1e-12)
    run = Run.open(tmp_path / "run")
    everything = run.read(source)
    np.testing.assert_allclose(run.score(everything)[kept.rows], kept.scores, atol=1e-5)


@pytest.mark.parametrize("members", [1, 2])
def test_a_table_of_gains_is_that_of_the_loss_and_of_every_metric(members, tmp_path):
    gain = (0.0, 1.0, 2.0, 20.0, 21.0)
    config = dataclasses.replace(
        CONFIG,
        data=dataclasses.replace(CONFIG.data, gain=gain),
        loss=Loss("lambdarank"),
        members=Members(count=members, keep=members),
    )
    trained(tmp_path / "run", config)
    run = Run.open(tmp_path / "run", "cpu")
    data = synthetic("tiny", "test")
    metric = parse_metric("ndcg@10", gain)
    values = measure(run.score(data), data, [metric])["ndcg@10"]
    assert not np.array_equal(values, measure(run.score(data), data, ["ndcg@10"])["ndcg@10"], equal_nan=True)
    assert np.allclose(run.evaluate(data)["ndcg@10"], values, equal_nan=True)
    found = report(tmp_path / "run")
    assert found["metrics"]["test"]["ndcg@10"] == pytest.approx(summarise({"a": values})["a"])
    assert "gains 0, 1, 2, 20, 21 of the grades 0 to 4" in found["convention"]
    vali = synthetic("tiny", "vali")
    of_best = np.nan_to_num(measure(run.score(vali), vali, [metric])["ndcg@10"], nan=1.0).mean()
    chosen = found["validation_of_average"] if members > 1 else max(e["metric"] for e in history(tmp_path / "run"))
    assert chosen == pytest.approx(of_best, abs=1e-6)
    other = dataclasses.replace(config, data=dataclasses.replace(CONFIG.data, gain=gain[:3]))
    with pytest.raises(ValueError, match=r"label . of query .* has no gain.*0 to 2"):
        trained(tmp_path / "short", other)
