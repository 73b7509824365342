"""The files of a run folder: two generations of checkpoints, a history that is cut, folders that are refused by name."""

import json
import os

import pytest
import torch

from rankgrad.files import load_tensors
from rankgrad.runs.folder import Checkpoints, HistoryFile, discard_unlearned, is_run, read_history, read_report


def tensors(value):
    return {"a": torch.full((3, 4), float(value)), "b": torch.tensor(value)}


def generation(folder):
    return Checkpoints(folder).load()[1]["epoch"]


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for epoch in (1, 2, 3):
        checkpoints.save(tensors(epoch), {"epoch": epoch})
    return checkpoints


def test_the_newest_good_generation_is_loaded(checkpoints, tmp_path):
    assert generation(tmp_path) == 3 and Checkpoints(tmp_path).load()[2] == []
    assert load_tensors(checkpoints.before)[1] == {"epoch": 2}


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_a_damaged_generation_is_named_and_the_one_before_used(checkpoints, tmp_path, damage):
    content = checkpoints.last.read_bytes()
    flipped = bytearray(content)
    flipped[-3] ^= 4
    checkpoints.last.write_bytes({"empty": b"", "cut": content[:-7], "flipped": bytes(flipped)}[damage])
    back, facts, complaints = Checkpoints(tmp_path).load()
    assert facts == {"epoch": 2} and torch.equal(back["a"], tensors(2)["a"])
    assert len(complaints) == 1 and str(checkpoints.last) in complaints[0]


def test_a_damaged_generation_never_replaces_a_good_one(checkpoints, tmp_path):
    checkpoints.last.write_bytes(b"")
    again = Checkpoints(tmp_path)
    again.load()
    again.save(tensors(3), {"epoch": 3})
    assert generation(tmp_path) == 3
    checkpoints.last.write_bytes(b"")
    assert generation(tmp_path) == 2


def test_no_good_generation_is_an_error_that_names_them(checkpoints, tmp_path):
    for path in (checkpoints.last, checkpoints.before):
        path.write_bytes(b"no")
    with pytest.raises(ValueError, match="checkpoint.safetensors .*checkpoint.previous.safetensors "):
        Checkpoints(tmp_path).load()
    with pytest.raises(ValueError, match="does not exist"):
        Checkpoints(tmp_path / "elsewhere").load()


@pytest.mark.parametrize("number", range(1, 7))
def test_a_crash_anywhere_in_saving_leaves_the_old_or_the_new(checkpoints, tmp_path, monkeypatch, number):
    class CrashError(Exception):
        pass

    count = 0

    def watched(function):
        def call(*arguments):
            nonlocal count
            count += 1
            if count == number:
                raise CrashError
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched(os.fsync))
        patch.setattr("pathlib.Path.replace", watched(type(tmp_path).replace))
        with pytest.raises(CrashError):
            checkpoints.save(tensors(4), {"epoch": 4})
    found, complaints = Checkpoints(tmp_path).load()[1:]
    assert found == {"epoch": 3 if number <= 2 else 4} and not complaints
    after = Checkpoints(tmp_path)
    after.load()
    after.save(tensors(5), {"epoch": 5})
    assert generation(tmp_path) == 5 and len(list(tmp_path.iterdir())) == 2
    after.last.write_bytes(b"")
    assert generation(tmp_path) in (3, 4)


# --- history, report, what is a run -----------------------------------------------------------------------------------


def test_the_history_is_cut_to_what_the_checkpoint_knows(tmp_path):
    history = HistoryFile(tmp_path)
    history.cut(0)
    for epoch in (1, 2, 3):
        history.add({"epoch": epoch, "loss": float("nan")})
    assert read_history(tmp_path) == [{"epoch": epoch, "loss": None} for epoch in (1, 2, 3)]
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"epoch": 4, "lo')
    with pytest.raises(ValueError, match="history.jsonl.*remove it"):
        read_history(tmp_path)
    again = HistoryFile(tmp_path)
    again.cut(2)
    again.add({"epoch": 3, "loss": 0.5})
    assert [line["loss"] for line in read_history(tmp_path)] == [None, None, 0.5]
    assert read_history(tmp_path / "elsewhere") == []


def test_what_is_not_a_run_or_not_finished_or_damaged_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="is not a run.*report.json"):
        read_report(tmp_path)
    (tmp_path / "config.toml").touch()
    assert not is_run(tmp_path)  # it may lie beside lists
    with pytest.raises(ValueError, match="has not finished.*report.json"):
        read_report(tmp_path)
    for text in ("", "[]", '{"los', "\xff"):
        (tmp_path / "report.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match="report.json is damaged"):
            read_report(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps({"loss": "rmse"}))
    assert read_report(tmp_path) == {"loss": "rmse"}
    (tmp_path / "history.jsonl").touch()
    assert is_run(tmp_path) and is_run(str(tmp_path))


def test_only_a_run_that_has_learned_nothing_is_discarded(checkpoints, tmp_path):
    (tmp_path / "config.toml").touch()
    discard_unlearned(tmp_path)
    assert (tmp_path / "config.toml").exists()
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.toml", "history.jsonl"):
        (other / name).touch()
    discard_unlearned(other)
    assert not other.exists()
    other.mkdir()
    for name in ("config.toml", "mine.txt"):
        (other / name).touch()
    discard_unlearned(other)  # what is not the run's stays, within a run that can be resumed
    assert sorted(path.name for path in other.iterdir()) == ["config.toml", "mine.txt"]
