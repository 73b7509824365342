"""`rankgrad synthetic` writes files that the other commands take, and commands are printed as they must be typed."""

import json
import os
import sys

import numpy as np
import pytest

from rankgrad.cli.options import as_typed
from rankgrad.data import read_splits, synthetic


@pytest.mark.parametrize("kind", ["letor", "parquet"])
def test_what_is_written_reads_as_the_lists_themselves(run, tmp_path, kind):
    out = tmp_path / "data"
    code, text, err = run("synthetic", "--out", out, "--size", "tiny", "--format", kind, "--seed", "3", "--json")
    assert (code, err) == (0, "")
    assert json.loads(text)["splits"]["test"]["queries"] == 10
    for split, data in read_splits(str(out)).items():
        expected = synthetic("tiny", split, seed=3)
        for name in ("features", "labels", "offsets", "query_ids"):
            np.testing.assert_array_equal(getattr(data, name), getattr(expected, name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_train_takes_the_folder(run, tmp_path):
    assert run("synthetic", "--out", tmp_path / "data", "--size", "tiny", "--quiet") == (0, "", "")
    train = ["train", tmp_path / "data", "--model", "linear", "--epochs", "1", "--quiet", "--out", tmp_path / "run"]
    assert run(*train) == (0, "", "")


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("synthetic", "--out", tmp_path / "empty", "--size", "tiny", "--quiet")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    code, out, err = run("synthetic", "--out", tmp_path / "mine", "--size", "tiny")
    assert (code, out) == (2, "")
    assert "mine exists already" in err and "--out" in err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_mistakes_leave_nothing_behind(run, tmp_path, monkeypatch):
    code, _, err = run("synthetic", "--out", tmp_path / "data", "--size", "huge")
    assert code == 2 and "'huge'" in err and "web30k" in err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = run("synthetic", "--out", tmp_path / "data", "--size", "tiny", "--format", "parquet")
    assert code == 2 and "pip install 'rankgrad[tables]'" in err
    assert not any(tmp_path.iterdir())


def test_commands_are_printed_as_they_must_be_typed(run, tmp_path, monkeypatch):
    (tmp_path / "rankgrad").touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "rankgrad"), "demo"])
    monkeypatch.setenv("PATH", os.defpath)
    assert as_typed() == str(tmp_path / "rankgrad")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert as_typed() == "rankgrad"
    monkeypatch.setattr(sys, "argv", ["somewhere/rankgrad/__main__.py", "demo"])
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m", "rankgrad", "demo"])
    assert as_typed() == ".venv/bin/python -m rankgrad"
    monkeypatch.setattr(sys, "argv", [".venv/bin/rankgrad"])
    assert as_typed() == ".venv/bin/rankgrad"
