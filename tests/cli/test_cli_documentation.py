"""Every command in the documentation works."""

import re
import shutil
from pathlib import Path

import pytest
from cli_cases import COMMANDS

PAGES = [
    *[
        "docs/command-line.md",
        "docs/large-data.md",
        "docs/report.md",
        "docs/explain.md",
        "docs/reproduce.md",
        "docs/practitioner.md",
        "docs/researcher.md",
        "docs/trees.md",
        "docs/members.md",
    ],
    "README.md",
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_documentation_work(run, data, tmp_path, monkeypatch, page):
    text = (Path(__file__).parents[2] / page).read_text()
    commands = [command.partition("#")[0].strip() for command in re.findall(r"^rankgrad (.*)$", text, re.M)]
    named = {command.split()[0] for command in commands}
    assert named == set(COMMANDS) if "command-line" in page else len(named) > 1
    shutil.copytree(data / "letor", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        if command == "demo":  # a minute; it has a test of its own
            continue
        if command.startswith(("reproduce ablations", "reproduce dasalc")):  # tests/reproduce has them from end to end
            continue
        if command == "synthetic --out data/":  # 800 queries: the folder above stands for them
            continue
        made_up = command.startswith("synthetic --out data/")
        if made_up:
            shutil.rmtree("data")
        code, _, err = run(*command.split())
        if made_up and code == 0:  # the others go on with three features: to explain 136 takes most of a minute
            shutil.rmtree("data")
            shutil.copytree(data / "letor", "data")
        if command == "train --resume runs/first":  # as it was not interrupted
            assert "is finished; there is nothing to resume" in err
        else:
            assert code == 0, f"{command}: {err}"
