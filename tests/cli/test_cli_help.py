"""`rankgrad info` and `demo`, help texts, the version."""

import json
import re

import pytest
import torch
from cli_cases import COMMANDS

import rankgrad

REPRODUCED = ["table1", "table2", "figure1", "figure2", "ablations", "dasalc"]


def test_info_names_every_loss_and_the_install_line_of_what_is_missing(run, monkeypatch):
    import rankgrad.cli.info
    from rankgrad.losses import LOSSES

    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert all(re.search(rf"\b{name}\b", out) for name in LOSSES)
    assert ("triton: " in out) if torch.cuda.is_available() else ("numba: compiled loops on the CPU" in out)
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setattr(rankgrad.cli.info.importlib.util, "find_spec", lambda name: None)
    assert "not installed; pip install 'rankgrad[tables]'" in run("info")[1]
    found = json.loads(run("info", "--json")[1])
    assert set(found["losses"]) == set(LOSSES)
    assert found["losses"]["neural_ndcg"]["backend"] == ("torch" if torch.cuda.is_available() else "numba")
    assert found["losses"]["lambdarank"]["backend"] == "torch"


@pytest.mark.slow
def test_demo_trains_the_rivals_and_says_where_they_are(run, monkeypatch, tmp_path):
    from rankgrad.cli import demo

    small = demo.recipes("synthetic:tiny", 1)
    monkeypatch.setattr(demo, "recipes", lambda: small)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("demo")
    assert code == 0
    assert err.count("vali ndcg@10") == 4
    rows = [re.split(r" {2,}", line) for line in out.splitlines()[:5]]
    assert rows[0] == ["trained with", "model", "ndcg@5", "ndcg@10", "map", "mrr", "seconds"]
    assert [row[:2] for row in rows[1:]] == [
        ["neural_ndcg@10", "transformer"], ["lambdarank@10", "transformer"], ["listnet", "transformer"],
        ["neural_ndcg@10", "linear"],
    ]  # fmt: skip
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("demo-")
    assert f"the runs are in runs/{folder.name}" in out
    assert sorted(path.name for path in folder.iterdir()) == sorted(small)
    assert max(map(len, out.splitlines())) <= 80
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    code, out, err = run("demo", "--out", tmp_path / "mine")
    assert (code, out) == (2, "")
    assert "mine exists already; expected a new folder" in err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


@pytest.mark.parametrize("command", ["", *COMMANDS, *(f"reproduce {name}" for name in REPRODUCED)])
def test_help_has_an_example_and_fits_a_narrow_terminal(run, command):
    code, out, err = run(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert re.search(r"Examples:\n +rankgrad ", out)
    assert max(map(len, out.splitlines())) <= 80


def test_the_version_is_told_and_nothing_else_is_done(run):
    assert run("--version") == run("--version", "train") == (0, f"rankgrad {rankgrad.__version__}\n", "")


def test_the_command_alone_shows_its_help(run):
    assert run() == run("--help")
