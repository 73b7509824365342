"""The script of docs/tuning.md, as it stands there: a search in several processes, pruned by the metric of an epoch."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rankgrad.runs.folder import is_finished, read_history
from rankgrad.training.build import validate
from rankgrad.training.config import RECIPES, configure

optuna = pytest.importorskip("optuna")

PAGE = Path(__file__).parents[1] / "docs" / "tuning.md"
(SCRIPT,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "tune.py DATA" in block)
TINY = ("train.epochs=2", "train.device=cpu", "train.threads=1")


def start(folder, *arguments):
    (folder / "tune.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "tune.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def opened(folder, name):
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "tune.journal")))
    return optuna.load_study(study_name=name, storage=storage)


@pytest.mark.slow
def test_two_processes_search_together(tmp_path):
    processes = [start(tmp_path, "synthetic:tiny", "small", "2", *TINY) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    study = opened(tmp_path, "small")
    finished = [trial for trial in study.trials if trial.state.is_finished()]
    assert 2 <= len(finished) <= 3  # each looks at the number after a trial of its own
    assert all(trial.state == optuna.trial.TrialState.COMPLETE for trial in finished)
    folders = sorted((tmp_path / "runs" / "tune-small").iterdir())
    assert {folder.name for folder in folders} == {f"trial-{trial.number}" for trial in finished}
    assert all(is_finished(folder) for folder in folders)
    best = tmp_path / "runs" / "tune-small" / f"trial-{study.best_trial.number}"
    report = json.loads((best / "report.json").read_text())
    assert study.best_value == report["metrics"]["vali"]["ndcg@10"]["empty=1"]
    assert any(f"trial-{study.best_trial.number} " in out for out, _ in said)
    for trial in finished:  # what was suggested is what was trained, and what was reported what the epochs were like
        folder = tmp_path / "runs" / "tune-small" / f"trial-{trial.number}"
        config = tomllib.loads((folder / "config.toml").read_text())
        assert config["optimiser"]["lr"] == trial.params["lr"] and config["model"]["width"] == trial.params["width"]
        assert [line["metric"] for line in read_history(folder)] == list(trial.intermediate_values.values())


def functions():
    """The script's functions, without its last lines, which search."""
    made = {"__name__": "tune"}
    head, _, _ = SCRIPT.partition("study = ")
    before, sys.argv = sys.argv, ["tune.py", "synthetic:tiny", "small", "2", *TINY]
    try:
        exec(compile(head, "tune.py", "exec"), made)
    finally:
        sys.argv = before
    return made


def test_every_recipe_has_a_space_whose_corners_are_configurations():
    spaces = functions()["SPACES"]
    assert spaces.keys() == RECIPES.keys()
    for recipe, space in spaces.items():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        for _ in range(6):
            validate(configure("synthetic:tiny", space(study.ask()), [], recipe))


def test_a_trial_that_falls_behind_is_pruned_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = functions()
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=2.0))
    study.optimize(made["objective"], n_trials=1)
    (trial,) = study.trials
    assert trial.state == optuna.trial.TrialState.PRUNED and list(trial.intermediate_values) == [1]
    assert list((tmp_path / "runs" / "tune-small").iterdir()) == []
