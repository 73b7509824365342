"""A finished run given more epochs is the run that had them from the start, and nothing of it is lost on the way."""

import dataclasses
import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch

import children
from children import REFUSED, Trap
from rankgrad.files import load_tensors
from rankgrad.runs.folder import Checkpoints, adopt_extension, extension, read_config, read_history, read_report
from rankgrad.runs.run import Finished, Run, Started, train_run
from rankgrad.training.config import Config, Data, Loss, Members, Model, Optimiser, Train
from rankgrad.training.loop import Epoch, Step
from rankgrad.training.state import Progress, learning_rate

CONFIG = Config(
    data=Data("synthetic:tiny", list_size=10),
    model=Model(kind="mlp", hidden=(6,), dropout=0.2, input_noise=0.1),
    loss=Loss("xe_ndcg"),
    optimiser=Optimiser(lr=0.02, schedule="constant", warmup=3),
    train=Train(epochs=5, batch_size=8, threads=1, device="cpu", seed=4),
)
STEPS, SHORT, LONG = 4, 3, 5  # steps of an epoch, epochs before and after
MEMBERS = dataclasses.replace(
    CONFIG,
    model=Model(kind="mlp", hidden=(4,)),
    loss=Loss(("softmax", "neural_ndcg@10")),
    members=Members(count=4, keep=2),
)


def with_(config, *, schedule=None, **train):
    optimiser = config.optimiser
    if schedule is not None:
        optimiser = dataclasses.replace(optimiser, schedule=schedule, milestones=(2, 4), plateau=1)
    return dataclasses.replace(config, optimiser=optimiser, train=dataclasses.replace(config.train, **train))


def finished(out, config):
    *_, last = train_run(out, config)
    assert isinstance(last, Finished)
    return out


def extended(out, epochs=LONG):
    """The events of the epochs that are added."""
    first, *events, last = train_run(out, epochs=epochs)
    assert isinstance(first, Started) and first.folder == out and first.config.train.epochs == LONG
    assert isinstance(last, Finished) and last.report == {"run": str(out), **read_report(out)}
    return events


def contents(out):
    return {path.relative_to(out): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def without_seconds(entries):
    """Nor what depends on them: checksums of the history and of the report."""
    return [
        {key: value for key, value in entry.items() if key not in ("seconds", "history", "checksum")}
        for entry in entries
    ]


def assert_same_run(out, whole):
    assert contents(out).keys() == contents(whole).keys() and {p.name for p in out.iterdir()} == {
        p.name for p in whole.iterdir()
    }
    for name in ("config.toml", "model.safetensors", "queries.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert without_seconds(read_history(out)) == without_seconds(read_history(whole))
    assert without_seconds([read_report(out)]) == without_seconds([read_report(whole)])
    own, expected = (Checkpoints(folder).load() for folder in (out, whole))
    assert own[0].keys() == expected[0].keys() and all(torch.equal(own[0][name], expected[0][name]) for name in own[0])
    assert without_seconds([own[1]]) == without_seconds([expected[1]])


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run that had few epochs; to be copied."""
    return finished(tmp_path_factory.mktemp("short") / "run", with_(CONFIG, epochs=SHORT))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that had all epochs from the start."""
    return finished(tmp_path_factory.mktemp("whole") / "run", with_(CONFIG, epochs=LONG))


@pytest.fixture
def out(short, tmp_path):
    return Path(shutil.copytree(short, tmp_path / "run"))


# --- the same as from the start ---------------------------------------------------------------------------------------


def test_an_extended_run_is_the_run_that_had_these_epochs_from_the_start(out, whole):
    assert len(extended(out)) == (LONG - SHORT) * (STEPS + 1)
    assert_same_run(out, whole)


@pytest.mark.parametrize(
    ("base", "schedule"), [(CONFIG, "step"), (CONFIG, "plateau"), (MEMBERS, "step")], ids=["step", "plateau", "members"]
)
def test_schedules_that_do_not_know_the_end_go_on(base, schedule, tmp_path):
    config = with_(base, schedule=schedule)
    extended(finished(tmp_path / "a", with_(config, epochs=SHORT)))
    assert_same_run(tmp_path / "a", finished(tmp_path / "b", config))


@pytest.mark.parametrize("base", [CONFIG, MEMBERS], ids=["one network", "members"])
def test_a_cosine_begins_again_and_says_so(base, tmp_path):
    config = with_(base, schedule="cosine")
    out = finished(tmp_path / "a", with_(config, epochs=SHORT))
    started = next(events := train_run(out, epochs=LONG))
    assert "cosine" in started.note and "epochs 4 to 5" in started.note
    rates = [event.lr for event in events if isinstance(event, Epoch)]
    assert rates[0] > rates[1] and rates[0] > read_history(out)[SHORT - 1]["lr"]
    restarted = dataclasses.replace(
        config, optimiser=dataclasses.replace(config.optimiser, restarts=(SHORT,))
    )  # which a configuration may say, too
    assert_same_run(out, finished(tmp_path / "b", restarted))


def test_a_cosine_that_begins_again_falls_from_the_full_rate_to_zero():
    settings = Optimiser(lr=1.0, schedule="cosine", restarts=(2, 5))
    rates = [learning_rate(settings, Progress(epoch=epoch), 1, 9) for epoch in range(9)]
    expected = [1.0, 0.5, 1.0, 0.75, 0.25, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627]
    assert rates == pytest.approx(expected)
    for epoch in range(9):  # without restarts to the bit what it was before there were any
        rate = learning_rate(Optimiser(lr=0.7, schedule="cosine"), Progress(epoch=epoch, step=2), 3, 9)
        assert rate == 0.7 * (0.5 * (1 + math.cos(math.pi * (3 * epoch + 2) / 27)))


def test_a_run_is_extended_again(tmp_path):
    config = with_(CONFIG, schedule="cosine")
    out = finished(tmp_path / "a", with_(config, epochs=1))
    list(train_run(out, epochs=SHORT))
    list(train_run(out, epochs=LONG))
    assert read_config(out).optimiser.restarts == (1, SHORT) and len(read_history(out)) == LONG


def test_the_last_epoch_is_kept_where_that_was_asked_for(tmp_path):
    config = with_(CONFIG, select="last")
    extended(finished(tmp_path / "a", with_(config, epochs=SHORT)))
    assert_same_run(tmp_path / "a", finished(tmp_path / "b", config))


@pytest.mark.slow
def test_members_that_stopped_early_stay_as_they_are(tmp_path):
    config = with_(MEMBERS, epochs=SHORT, patience=1)
    out = finished(tmp_path / "a", config)
    before = Checkpoints(out).load()[0]
    stopped = ~before["members.active"]
    assert 0 < stopped.sum() < 4
    extended(out)
    after = Checkpoints(out).load()[0]
    assert torch.equal(after["members.best"][stopped], before["members.best"][stopped])
    assert not torch.equal(after["members.weights"][~stopped], before["members.weights"][~stopped])
    assert_same_run(out, finished(tmp_path / "b", with_(config, epochs=LONG)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("base", [CONFIG, MEMBERS], ids=["one network", "members"])
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu_it_goes_on_as_well(base, graph, tmp_path):
    config = with_(base, device="cuda", graph=graph)
    out = finished(tmp_path / "a", with_(config, epochs=SHORT))
    extended(out)
    whole = finished(tmp_path / "b", config)
    own, expected = (load_tensors(folder / "model.safetensors")[0] for folder in (out, whole))
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    assert [line["epoch"] for line in read_history(out)] == [1, 2, 3, 4, 5]


# --- nothing is lost --------------------------------------------------------------------------------------------------


def test_until_the_end_the_finished_run_stays_as_it_was(out, whole):
    before, ranker = contents(out), Run.open(out)
    for event in train_run(out, epochs=LONG):
        if isinstance(event, Step | Epoch):
            here = {name: content for name, content in contents(out).items() if ".extending" not in name.parts}
            assert here == before
            assert Run.open(out).config == ranker.config
    assert not extension(out).exists()
    assert_same_run(out, whole)


def test_an_extension_that_fails_at_its_very_end_leaves_the_run_as_it_was(out, whole, monkeypatch):
    before = contents(out)
    with monkeypatch.context() as patch:
        patch.setattr("rankgrad.runs.folder.write_per_query", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(train_run(out, epochs=LONG))
    assert {name: text for name, text in contents(out).items() if ".extending" not in name.parts} == before
    assert extended(out) == []
    assert_same_run(out, whole)


@pytest.mark.parametrize("again", [None, LONG])
def test_an_extension_that_was_stopped_goes_on(out, whole, again):
    events = train_run(out, epochs=LONG)
    next(event for event in events if isinstance(event, Epoch))
    events.close()
    assert read_report(out)["epochs"] == SHORT
    with pytest.raises(ValueError, match=f"being extended to {LONG} epochs.*--resume"):
        list(train_run(out, epochs=9))
    assert len(extended(out, again)) == STEPS + 1
    assert_same_run(out, whole)


def extend(out, trap):
    """In a process of its own."""
    trap()
    list(train_run(out, epochs=LONG))


@pytest.mark.slow
def test_killed_at_any_write_it_goes_on_exactly(short, whole, tmp_path):
    counter = Trap(0)
    fsync, replace = children.os.fsync, Path.replace
    out = Path(shutil.copytree(short, tmp_path / "counted"))
    try:
        extend(out, counter)
    finally:
        children.os.fsync, Path.replace = fsync, replace
    assert_same_run(out, whole)
    for number in {*range(2, counter.count - 12, 16), *range(counter.count - 10, counter.count + 1, 4)}:
        out = Path(shutil.copytree(short, tmp_path / f"run{number}"))
        assert children.code(children.start(extend, out, Trap(number))) == -signal.SIGKILL
        assert read_report(out)["epochs"] in (SHORT, LONG) and Run.open(out).features == 136  # usable at any moment
        if read_config(out).train.epochs != LONG:
            extended(out)
        assert {path.name for path in out.iterdir()} - {".extending"} == {path.name for path in whole.iterdir()}
        shutil.rmtree(extension(out), ignore_errors=True)  # an empty folder, of one killed when all was done
        assert_same_run(out, whole)


@pytest.mark.slow
def test_several_processes_extend_a_run(short, whole, tmp_path):
    out = Path(shutil.copytree(short, tmp_path / "run"))
    codes = [children.code(process) for process in children.group(extend, 2, out, no_trap)]
    assert codes == [0, 0]
    assert read_report(out)["epochs"] == LONG and read_report(out)["processes"] == 2
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    expected, own = (load_tensors(folder / "model.safetensors")[0] for folder in (whole, out))
    torch.testing.assert_close(own, expected, rtol=0.1, atol=0.1)  # noise and dropout are drawn by each process


def no_trap():
    """No trap."""


def test_folders_within_are_joined(tmp_path):
    """TensorBoard's: the events of the first epochs, and those of the others."""
    for folder, name in ((tmp_path, "first"), (extension(tmp_path), "second")):
        (folder / "tensorboard").mkdir(parents=True)
        (folder / "tensorboard" / name).write_text(name)
    adopt_extension(tmp_path)
    assert {str(name) for name in contents(tmp_path)} == {"tensorboard/first", "tensorboard/second"}
    assert not extension(tmp_path).exists()


# --- what cannot be done ----------------------------------------------------------------------------------------------


def refused(out, epochs, *words):
    before = contents(out)
    with pytest.raises(ValueError, match=words[0]) as caught:
        list(train_run(out, epochs=epochs))
    assert all(word in str(caught.value) for word in words), caught.value
    assert contents(out) == before and not extension(out).exists()


@pytest.mark.parametrize("epochs", [SHORT, 1, 0, -1, 2.5, True])
def test_fewer_epochs_than_it_had_are_refused(out, epochs):
    refused(out, epochs, "epochs")


def test_a_run_that_stopped_early_is_not_extended(tmp_path):
    out = finished(tmp_path / "run", with_(CONFIG, epochs=40, patience=1))
    assert read_report(out)["epochs"] < 40
    refused(out, 60, "stopped early", "--patience")


def test_a_run_without_a_checkpoint_is_not_extended(out):
    for path in out.glob("checkpoint*"):
        path.unlink()
    refused(out, LONG, "no checkpoint", "optimiser")


def test_a_damaged_checkpoint_is_made_good_by_the_one_before(out, whole, capsys):
    path = out / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert len(extended(out)) == (LONG - SHORT + 1) * (STEPS + 1)
    assert "checkpoint.safetensors" in capsys.readouterr().err
    assert_same_run(out, whole)


def test_other_data_are_refused_and_the_run_stays(tmp_path):
    letor = tmp_path / "lists.txt"
    letor.write_text("".join(f"{d % 2} qid:{q} 1:{q * d % 7} 2:{d}\n" for q in range(9) for d in range(4)))
    out = finished(tmp_path / "run", with_(dataclasses.replace(CONFIG, data=Data(str(letor))), epochs=SHORT))
    letor.write_text(letor.read_text().replace("2:3", "2:4"))
    refused(out, LONG, "changed since the run began")
    letor.unlink()
    refused(out, LONG, "lists.txt")


def test_a_run_that_is_not_finished_is_finished_first(tmp_path):
    events = train_run(tmp_path / "run", CONFIG)
    next(event for event in events if isinstance(event, Epoch))
    events.close()
    refused(tmp_path / "run", 9, "not finished", "--resume")


def test_epochs_do_not_go_with_a_configuration(tmp_path):
    with pytest.raises(ValueError, match="epochs= extends a finished run.*train.epochs"):
        list(train_run(tmp_path / "run", CONFIG, epochs=9))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_says_how_it_could_go_on(out):
    with pytest.raises(ValueError, match=f"is finished.*--epochs above {SHORT}"):
        list(train_run(out))


@pytest.mark.parametrize("number", [2, 4])
def test_a_full_disk_leaves_the_run_as_it_was(short, tmp_path, number):
    out = Path(shutil.copytree(short, tmp_path / "run"))
    before = contents(out)
    assert children.code(children.start(extend_quietly, out, Trap(number, what="full disk"))) == REFUSED
    assert contents(out) == before
    extended(out)


def extend_quietly(out, trap):
    try:
        extend(out, trap)
    except OSError:
        raise SystemExit(REFUSED) from None


def test_a_reader_of_reports_sees_how_long_it_trained(out):
    seconds = json.loads((out / "report.json").read_text())["seconds"]
    extended(out)
    assert json.loads((out / "report.json").read_text())["seconds"] > seconds
