"""`rankgrad train --model lightgbm` and what comes after it, typed by a person."""

import json
import re

import pytest

from rankgrad.runs import trees as growing


@pytest.fixture(autouse=True)
def _libraries():
    pytest.importorskip("lightgbm")
    pytest.importorskip("xgboost")


def test_trees_are_grown_measured_ranked_and_mixed_with_networks(run, data, trained, tmp_path):
    trees = tmp_path / "trees"
    code, out, err = run(
        "train", data / "letor", "--model", "lightgbm", "--trials", "7", "--epochs", "20", "--out", trees
    )
    assert code == 0 and re.search(r"round \d+ of \d+ was best on validation", out)
    assert [line.split()[1] for line in err.splitlines()] == [f"{number}/7" for number in range(1, 8)]
    assert re.fullmatch(r"settings 1/7  vali ndcg@10 [01]\.\d{4} best  \d+ trees", err.splitlines()[0])
    facts = json.loads((trees / "trees.json").read_text())
    assert len(facts["tried"]) == 7 and len(facts["kept"]) == 5
    code, out, _ = run("evaluate", trained / "first", trees, data / "letor", "--metric", "ndcg@10", "--json")
    assert code == 0 and json.loads(out)["runs"] == [str(trained / "first"), str(trees)]
    code, out, _ = run("rank", trees, data / "letor" / "test.txt")
    assert code == 0 and len(out.splitlines()) == 32
    assert run("compare", trees, trained / "first")[0] == 0
    assert run("report", trees, trained / "first", "--out", tmp_path / "page.html")[0] == 0
    assert "lightgbm lambdarank" in (tmp_path / "page.html").read_text()


def test_a_loss_of_ours_a_bag_and_a_configuration_file(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--loss", "neural_ndcg@5", "--bag", "2", "--epochs", "5", "--quiet"]
    assert run("train", data / "letor", "--model", "xgboost", *options) == (0, "", "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("xgboost-neural_ndcg@5-")
    assert len(json.loads((folder / "trees.json").read_text())["models"]) == 2
    code, out, _ = run("train", folder / "config.toml", "--trials", "2", "--out", "again", "--json", "--quiet")
    report = json.loads(out)
    assert code == 0 and report["loss"] == "xgboost with neural_ndcg@5"
    assert (report["trees"]["settings"], report["trees"]["kept"], report["trees"]["bag"]) == (2, 1, 2)


def test_ctrl_c_says_what_was_kept(run, data, tmp_path, monkeypatch):
    whole, calls = growing.fit_trees, []

    def fit(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(growing, "fit_trees", fit)
    options = ["--model", "lightgbm", "--trials", "9", "--epochs", "5", "--out", tmp_path / "t", "--quiet"]
    code, _, err = run("train", data / "letor", *options)
    assert code == 130 and "stopped after 2 of 9 settings" in err
    assert run("evaluate", tmp_path / "t", data / "letor")[0] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--model lightgbm --lr 0.1", "--lr is for networks"),
        ("--model lightgbm --recipe small", "--recipe is for networks"),
        ("--model lightgbm --list-size 5", "--list-size is for networks"),
        ("--model mlp --trials 4", "--trials is for boosted trees, and the model is mlp"),
        ("--model lightgbm --trials 0", "members.count must be a whole number, 1 or above"),
        ("--model xgboost --loss native:yeti", "xgboost has no objective 'native:yeti'"),
        ("--model lightgbm --loss neural_ndgc", "did you mean 'neural_ndcg'"),
    ],
)
def test_mistakes(run, data, tmp_path, options, sentence):
    code, out, err = run("train", data / "letor", *options.split(), "--out", tmp_path / "t")
    assert (code, out) == (2, "") and sentence in err and len(err.splitlines()) == 1
    assert not (tmp_path / "t").exists()
