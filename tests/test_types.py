"""What type checkers see of the package: right calls pass, wrong ones are found, and nothing is Any."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rankgrad

# Checkers must report the lines marked `# wrong`, and no others.
CALLS = """\
import rankgrad
import torch
from typing_extensions import assert_type
from rankgrad import LOSS_TABLE, LOSSES, LossSpec, NeuralRanker, Ranker, RankingDataset, RankingLoss, RankingMetric
from rankgrad import load, ndcg, neural_ndcg, neural_sort, pad_lists, read_svmlight, unpad_lists
from rankgrad import neural_ndgc  # wrong
from rankgrad.losses import listnet

scores, labels = torch.zeros(2, 3), torch.zeros(2, 3)
mask = labels == 0

assert_type(neural_ndcg(scores, labels, mask, k=10, tau=0.5, gain="linear"), torch.Tensor)
assert_type(neural_ndcg(scores, labels, gain=lambda y: y, generator=torch.Generator()), torch.Tensor)
neural_ndcg(scores, labels, tua=0.5)  # wrong
neural_ndcg(scores, labels, tau="warm")  # wrong
neural_ndcg(scores, labels, mask, 10)  # wrong
neural_ndcg(scores)  # wrong
assert_type(listnet(scores, labels, reduction="none"), torch.Tensor)
assert_type(rankgrad.ndcg(scores, labels, k=10), torch.Tensor)
rankgrad.ndgc(scores, labels)  # wrong
ndcg(scores, labels, k="10")  # wrong
assert_type(neural_sort(scores, mask, tau=0.1), torch.Tensor)
assert_type(LOSSES["listnet"](scores, labels), torch.Tensor)
assert_type(LOSS_TABLE[0], LossSpec)
assert_type(LOSS_TABLE[0].name, str)

loss = RankingLoss("neural_ndcg@10", tau=0.5)
assert_type(loss(scores, labels, mask, generator=torch.Generator()), torch.Tensor)
loss(scores, labels, masks=mask)  # wrong
RankingLoss(10)  # wrong
assert_type(RankingMetric("ndcg@10", empty=0.0).compute(), torch.Tensor)
assert_type(pad_lists(scores, [1, 1]), tuple[torch.Tensor, torch.Tensor])
assert_type(unpad_lists(scores, mask), torch.Tensor)
pad_lists(scores)  # wrong

assert_type(load("runs/first"), Ranker)
assert_type(load("runs/first").features, int)
load("runs/first").rank([])  # wrong
assert_type(read_svmlight("train.txt"), RankingDataset)
NeuralRanker(loss="listnet", epochs=3)
NeuralRanker(loss="listnet", epoch=3)  # wrong
assert_type(rankgrad.__version__, str)
"""


def _with_mypy(file, cached):
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(cached), file.name]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    return {
        int(line) for line in re.findall(rf"^{file.name}:(\d+): error", done.stdout, re.M)
    }, done.stdout + done.stderr


def _with_pyright(file, _cached):
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, file.name]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {entry["range"]["start"]["line"] + 1 for entry in found if entry["severity"] == "error"}, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("checker", [_with_mypy, _with_pyright], ids=["mypy", "pyright"])
def test_type_checkers_find_the_wrong_calls_and_no_others(tmp_path, cache, checker):
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    wrong = {number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# wrong")}
    found, output = checker(file, cache.mkdir("mypy"))  # which knows what has changed: only the first run reads torch
    assert found == wrong, output


def test_checkers_and_interpreter_know_the_same_public_names():
    tree = ast.parse(Path(rankgrad.__file__).read_text())
    typed = {
        alias.asname: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    typed = {name: module for name, module in typed.items() if name}  # `import name as name` makes it public
    assert typed == rankgrad._HOME
    assert {*typed} == {*rankgrad.__all__}
