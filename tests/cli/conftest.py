"""The command called in this process, data to give it, and two finished runs."""

import re
import shutil
import sys

import pytest
from cli_cases import csv, letor, lists

from rankgrad.cli import main


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A LETOR folder of one's own, and the same lists as files of other kinds."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "letor").mkdir()
    for split, first, count in (("train", 1, 24), ("vali", 101, 8), ("test", 201, 8)):
        (folder / "letor" / f"{split}.txt").write_text(letor(lists(first, count)))
    flat = re.sub("^[0-9]", "0", letor(lists(1, 4)), flags=re.M)  # nothing in it is relevant
    shutil.copytree(folder / "letor", folder / "no-test")
    (folder / "no-test" / "test.txt").write_text(flat)
    (folder / "flat.txt").write_text(flat)
    (folder / "clicks.txt").write_text(re.sub("^1", "2000", letor(lists(1, 8)), flags=re.M))
    (folder / "one.csv").write_text(csv(lists(1, 24)))
    (folder / "wide.txt").write_text(letor(lists(1, 4, features=5)))
    (folder / "broken.txt").write_text("1 qid:1 1:0.5\n0 qid:1 1:x\n")
    (folder / "typo.toml").write_text("[train]\nepoch = 3\n")
    (folder / "latin.toml").write_bytes(b"[data]\npath = '\xe9'\n")
    return folder


@pytest.fixture
def run(monkeypatch, capfd):
    """Call the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rankgrad", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capfd.readouterr()

    return call


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    """Two finished runs on the same folder."""
    folder = tmp_path_factory.mktemp("runs")
    for name, loss in (("first", "neural_ndcg@10"), ("second", "listnet")):
        arguments = ["train", str(data / "letor"), "--loss", loss, "--model", "linear", "--epochs", "3"]
        sys.argv = ["rankgrad", *arguments, "--lr", "0.05", "--quiet", "--out", str(folder / name)]
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
    return folder
