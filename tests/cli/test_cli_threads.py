"""Threads of the command line: how they wait, how many there are."""

import os
import subprocess

import pytest
import torch
from cli_cases import COMMAND

import rankgrad.cli
from rankgrad.training.config import load
from rankgrad.training.openmp import WAITING


@pytest.fixture
def unset(monkeypatch):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "3"}])
def test_threads_wait_without_spinning_unless_the_user_has_said_how(given, unset):
    for name, value in given.items():
        unset.setenv(name, value)
    unset.setattr(rankgrad.cli, "app", lambda **_: 0)
    with pytest.raises(SystemExit):
        rankgrad.cli.main()
    assert {name: os.environ[name] for name in WAITING if name in os.environ} == given or not given
    assert given or (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "10000")


@pytest.mark.slow
@pytest.mark.skipif(torch.__config__.parallel_info().find("OpenMP") < 0, reason="torch without OpenMP")
def test_openmp_hears_of_it_in_time(unset):
    unset.setenv("OMP_DISPLAY_ENV", "TRUE")  # it tells what it has read, when torch is loaded
    said = subprocess.run([*COMMAND, "info"], capture_output=True, text=True).stderr
    assert "OMP_WAIT_POLICY" in said
    assert all("PASSIVE" in line for line in said.splitlines() if "OMP_WAIT_POLICY" in line)
    assert "GOMP_SPINCOUNT" not in said or "GOMP_SPINCOUNT = '10000'" in said


def test_threads_as_asked_for_and_one_for_a_small_model(run, data, tmp_path):
    options = ("--model", "linear", "--epochs", "1", "--quiet")
    before = torch.get_num_threads()
    assert run("train", data / "letor", *options, "--out", tmp_path / "small") == (0, "", "")
    assert load(tmp_path / "small" / "config.toml").train.threads == 1
    assert run("train", data / "letor", *options, "--threads", "2", "--out", tmp_path / "two")[0] == 0
    assert load(tmp_path / "two" / "config.toml").train.threads == 2
    assert torch.get_num_threads() == before
    try:
        code, of_two, _ = run("rank", tmp_path / "two", data / "letor", "--threads", "2")
        assert (code, torch.get_num_threads()) == (0, 2)
        assert run("rank", tmp_path / "two", data / "letor")[1] == of_two
        assert run("evaluate", tmp_path / "two", data / "letor", "--threads", "1")[0] == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    for command in ("train", "rank", "evaluate"):
        code, _, said = run(
            command, *([] if command == "train" else [tmp_path / "two"]), data / "letor", "--threads", "0"
        )
        assert code == 2 and "--threads must be a whole number, 1 or above" in said
