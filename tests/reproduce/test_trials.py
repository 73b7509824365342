"""Trials: what must stay the same, damaged files, and interruptions, in one process and in several."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import children
from cases import without_seal
from rankgrad.errors import InterruptedRunError
from rankgrad.reproduce import data, trials
from rankgrad.reproduce.tables import make_table2
from rankgrad.reproduce.trials import Request, Trial, open_experiment, run_trials, trials_of
from rankgrad.runs.folder import is_finished, read_config
from rankgrad.training.loop import Epoch

TINY = Request("synthetic:tiny", rows="listnet,rmse", seeds=1, recipe="small", epochs=2, device="cpu")
LONGER = replace(TINY, epochs=6)


def make(request):
    return make_table2(request, quiet=True).result


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished table of two rows."""
    out = tmp_path_factory.mktemp("finished") / "t"
    make(replace(TINY, out=out))
    return out


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(finished, tmp_path / "t")


# --- what must stay the same ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": "paper"}, "recipe = 'small' .*'paper'"),
        ({"epochs": 3}, "epochs = 2 .*3"),
        ({"paper_protocol": True}, "paper_protocol = False"),
        ({"dataset": "synthetic:small"}, "dataset = 'synthetic:tiny'"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(finished, change, words):
    before = sorted(path.name for path in finished.iterdir())
    with pytest.raises(ValueError, match=f"{finished} .*{words}.*--out"):
        make(replace(TINY, out=finished, **change))
    assert sorted(path.name for path in finished.iterdir()) == before


def test_other_data_in_the_same_folder_are_refused(tmp_path, write_letor):
    for name in ("one", "other"):
        write_letor(tmp_path / name, features=7)
    request = replace(TINY, dataset=None, data=str(tmp_path / "one"), out=tmp_path / "t")
    open_experiment(request, "table2", ExitStack(), quiet=True)
    with pytest.raises(ValueError, match="data = '.*one' .*other"):
        open_experiment(replace(request, data=str(tmp_path / "other")), "table2", ExitStack(), quiet=True)
    shutil.rmtree(tmp_path / "t" / "data" / "fold1-scaled")  # nothing of the lists is read again
    open_experiment(request, "table2", ExitStack(), quiet=True)


def test_a_table_may_be_moved(tmp_path, write_letor):
    write_letor(tmp_path / "mine", features=7)
    request = replace(TINY, dataset=None, data=str(tmp_path / "mine"), out=tmp_path / "t", rows="listnet", epochs=1)
    make(request)
    shutil.move(tmp_path / "t", tmp_path / "elsewhere")
    assert set(make(replace(request, out=tmp_path / "elsewhere", rows="rmse"))["rows"]) == {"listnet", "rmse"}
    config = read_config(tmp_path / "elsewhere" / "runs" / "rmse" / "fold1-seed0")
    assert config.data.path == str(tmp_path / "elsewhere" / "data" / "fold1")
    assert not (tmp_path / "t").exists()


def test_a_trial_of_another_recipe_is_refused(copy):
    config = copy / "runs" / "listnet" / "fold1-seed0" / "config.toml"
    config.write_text(without_seal(config).replace("width = 32", "width = 16"))
    with pytest.raises(ValueError, match=r"fold1-seed0 .*other settings .*listnet"):
        make(replace(TINY, out=copy))


def test_settings_that_an_older_version_wrote_are_no_other_recipe(copy, recwarn):
    config = copy / "runs" / "listnet" / "fold1-seed0" / "config.toml"
    config.write_text(without_seal(config).replace("[train]\n", '[train]\ncompile = "auto"\n'))
    make(replace(TINY, out=copy))
    assert not list(recwarn)  # nothing of it is trained


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(), "--dataset synthetic.*--data FOLDER"),
        (Request("web30k"), "MSLR-WEB30K .*--data FOLDER"),
        (Request("web31k", "data"), "'web31k'.*web30k"),
        (Request("synthetic:tiny", "data"), "--dataset synthetic:tiny .*--data"),
        (Request("synthetic:tiny", folds="2"), "synthetic:tiny .*fold 2"),
        (Request("synthetic:tiny", folds="one"), "--folds one .*1,2"),
        (Request("synthetic:tiny", seeds=0), "--seeds .*1 or above"),
        (Request("synthetic:tiny", recipe="huge"), "--recipe .*small"),
        (Request("synthetic:tiny", device="tpu"), "'tpu' .*cpu"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(request_, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        make(replace(request_, out=tmp_path / "t"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="exists and holds no table.*--out"):
        make(replace(TINY, out=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# --- files that are lost or damaged -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b'{"row": "listnet"', b"\xff\0"])
def test_results_are_written_from_the_runs(copy, content):
    file = copy / "results.jsonl"
    whole = file.read_text()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    make(replace(TINY, out=copy))
    assert file.read_text() == whole


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("settings.json", b"{", r"settings.json is damaged.*--out"),
        ("settings.json", b"[1]", r"settings.json is damaged"),
        ("settings.json", b"[" * 100_000, r"settings.json is damaged"),
        ("data/fold1.json", b'{"fold": 1}', r"fold1.json is damaged.*--out"),
        ("runs/listnet/fold1-seed0/report.json", b"", r"report.json is damaged.*fold1-seed0 .*trained again"),
        ("runs/listnet/fold1-seed0/report.json", b"{}", r"report.json is damaged"),
    ],
)
def test_damaged_files_are_named_with_what_to_do(copy, name, content, words):
    (copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        make(replace(TINY, out=copy))


def test_scaled_lists_that_are_damaged(copy):
    (copy / "data" / "fold1-scaled" / "scaling.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"scaling.safetensors is cut .*another"):
        data.scaled_splits(str(copy / "data" / "fold1-scaled"))


# --- interruptions ----------------------------------------------------------------------------------------------------


class KilledAt:
    """Ends the process, as the machine would, while a trial is being trained."""

    def __init__(self, row, epoch, how="SIGKILL"):
        self.row, self.epoch, self.how = row, epoch, how


def table_in_a_process(request, killed=None):
    if killed is not None:
        train_run = trials.train_run

        def deadly(folder, *arguments, **options):
            for event in train_run(folder, *arguments, **options):
                yield event
                if killed.row == folder.parent.name and isinstance(event, Epoch) and event.epoch == killed.epoch:
                    os.kill(os.getpid(), getattr(signal, killed.how))

        trials.train_run = deadly
    try:
        make(request)
    except InterruptedRunError as error:
        request.out.with_suffix(".message").write_text(str(error))
        sys.exit(children.INTERRUPTED)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    return make(replace(LONGER, out=tmp_path_factory.mktemp("untouched") / "t"))["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -signal.SIGKILL), ("SIGINT", children.INTERRUPTED)])
def test_a_killed_table_goes_on_as_if_nothing_had_happened(untouched, tmp_path, how, code):
    request = replace(LONGER, out=tmp_path / "t")
    killed = children.start(table_in_a_process, request, KilledAt("rmse", 3, how))
    assert children.code(killed) == code
    runs = tmp_path / "t" / "runs"
    assert is_finished(runs / "listnet" / "fold1-seed0") and not is_finished(runs / "rmse" / "fold1-seed0")
    if how == "SIGINT":
        message = (tmp_path / "t.message").read_text()
        assert "1 of 2 trials" in message and "go on by giving the same command again" in message
    rows = make(request)["rows"]
    assert len((runs / "rmse" / "fold1-seed0" / "history.jsonl").read_text().splitlines()) == 6
    for row in ("listnet", "rmse"):
        assert rows[row]["metrics"] == untouched[row]["metrics"]


def test_two_processes_make_the_same_table(untouched, tmp_path):
    rows = make(replace(LONGER, out=tmp_path / "t", jobs=2))["rows"]
    for row in ("listnet", "rmse"):
        assert rows[row]["metrics"] == untouched[row]["metrics"]


def wait_for(histories):
    """Return when these trials have learned something; the moment by which all must be over."""
    deadline = time.monotonic() + 90
    while not all(file.exists() and file.read_text() for file in histories):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return deadline


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_stop_all_processes_and_the_same_command_goes_on(tmp_path, how):
    out = tmp_path / "t"
    words = "--dataset synthetic:tiny --rows listnet,rmse,listmle,soft_rank --seeds 1 --paper-protocol --device cpu --jobs 2"
    process = subprocess.Popen(
        [sys.executable, "-m", "rankgrad", "reproduce", "table2", *words.split(), "--epochs", "100000", "--out", out],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    histories = [out / "runs" / row / "fold1-seed0" / "history.jsonl" for row in ("listnet", "listmle")]
    try:
        wait_for(histories)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does: every process of the group gets it
        else:
            os.kill(process.pid, how)  # as a job scheduler does
        out_text, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + how and out_text == ""
    assert err.count("\n") == 1 and "0 of 4 trials" in err and "go on by giving the same command again" in err
    assert all((file.parent / "checkpoint.safetensors").exists() for file in histories)
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["listmle", "listnet"]  # nothing new was begun


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks for processes in /proc")
def test_the_processes_of_a_killed_command_end_with_it(tmp_path):
    request = replace(TINY, out=tmp_path / "t", epochs=100_000, paper_protocol=True, jobs=2)
    command = children.start(table_in_a_process, request)
    histories = [tmp_path / "t" / "runs" / row / "fold1-seed0" / "history.jsonl" for row in ("listnet", "rmse")]
    deadline = wait_for(histories)
    workers = readers_of(tmp_path / "t" / "data")
    assert len(workers) == 2
    command.kill()
    children.code(command)
    while readers_of(tmp_path / "t" / "data"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert all((file.parent / "checkpoint.safetensors").exists() for file in histories)


def readers_of(folder):
    """The processes that have mapped files below a folder."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if str(folder) in maps.read_text():
                found.append(maps.parent.name)
    return found


class DeadlyFolder:
    """Kills the process that looks into it."""

    def __truediv__(self, name):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_training_process_that_is_killed_stops_the_command(monkeypatch, tmp_path):
    trial = Trial("rmse", 1, 0, DeadlyFolder(), None, "")
    with pytest.raises(BrokenProcessPool):
        list(trials._train_all([trial, trial], 2))

    def broken(*_):
        yield from ()
        raise BrokenProcessPool

    monkeypatch.setattr(trials, "_train_all", broken)
    experiment = open_experiment(replace(TINY, out=tmp_path / "t"), "table2", ExitStack(), quiet=True)
    with pytest.raises(InterruptedRunError, match="killed.*memory.*0 of 2 trials.*same command"):
        run_trials(experiment, trials_of(experiment, ["listnet", "rmse"]), quiet=True)
