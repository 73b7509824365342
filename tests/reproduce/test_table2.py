"""`rankgrad reproduce table2`: what a table holds, its text, and the data it takes."""

import importlib
import inspect
import json
import math
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from rankgrad.reproduce import data, tables, trials
from rankgrad.reproduce.rows import TABLE2
from rankgrad.reproduce.tables import describe, make_table2, write
from rankgrad.reproduce.trials import Request
from rankgrad.runs.compare import compare_runs
from rankgrad.runs.folder import read_config, read_per_query, read_report
from rankgrad.runs.run import Run

TINY = Request(
    "synthetic:tiny", rows="listnet,approx_ndcg,neural_ndcg@10", seeds=2, recipe="small", epochs=2, device="cpu"
)
MINE = replace(TINY, dataset=None, rows="listnet", seeds=1, epochs=1)


def make(request):
    return write(make_table2(request, quiet=True), "none")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A finished table of three rows, two seeds."""
    request = replace(TINY, out=tmp_path_factory.mktemp("tables") / "tiny")
    return request, make(request)


# --- a table from end to end ------------------------------------------------------------------------------------------


def test_a_table_holds_what_its_runs_report(tiny):
    request, result = tiny
    lines = [json.loads(line) for line in (request.out / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and {(line["row"], line["seed"]) for line in lines} == {
        (row, seed) for row in ("listnet", "approx_ndcg", "neural_ndcg@10") for seed in (0, 1)
    }
    reports = [read_report(request.out / "runs" / "listnet" / f"fold1-seed{seed}") for seed in (0, 1)]
    seeds = [report["metrics"]["test"]["ndcg@10"]["empty=0"] for report in reports]
    shown = result["rows"]["listnet"]["metrics"]["ndcg@10"]["empty=0"]
    assert shown["mean"] == pytest.approx(sum(seeds) / 2)
    assert shown["deviation"] == pytest.approx(abs(seeds[0] - seeds[1]) / math.sqrt(2))
    assert result["rows"]["listnet"]["seconds"] == pytest.approx(np.mean([report["seconds"] for report in reports]))
    assert result["queries"] == 10
    assert json.loads((request.out / "table2.json").read_text())["rows"].keys() == result["rows"].keys()


def test_a_trial_is_an_ordinary_run(tiny):
    request, _ = tiny
    folders = [request.out / "runs" / row / "fold1-seed0" for row in ("listnet", "approx_ndcg")]
    assert compare_runs(*folders, "ndcg@10")["queries"] > 0
    run = Run.open(folders[0], "cpu")
    values = run.evaluate(run.read("synthetic:tiny"))
    np.testing.assert_allclose(values["ndcg@10"], read_per_query(folders[0]).metrics["ndcg@10"])
    assert read_config(folders[0]).data.path == "synthetic:tiny"


def test_the_text_names_what_a_reader_must_know(tiny):
    request, result = tiny
    text = describe(result)
    for words in (
        "recipe small: Transformer of width 32, feed-forward 64",
        "at most 2 epochs, stopped early",
        "model selection: on validation only",
        "synthetic:tiny, fold 1, 10 test queries; seeds 0, 1",
        f"commit {result['commits'][0]}",
        "count 1",
        "count 0",
        "left out",
        "Holm-corrected",
        "transposed loss is its plain one",
        '"every NeuralNDCG row beats ApproxNDCG"',
        '"the best row is a NeuralNDCG"',
        "5 of the 6 rows it speaks of were not run",
    ):
        assert words in text, words
    assert "paper  differs" not in text  # the paper did not use these lists
    assert "\x1b" not in text
    page = (request.out / "table2.md").read_text()
    assert "| ListNet |" in page and "| trained with |" in page
    assert all(line.strip("| -:") in page for line in text.splitlines() if "claim" in line or "commit" in line)


def test_the_papers_numbers_stand_beside_ours_where_it_used_the_data(tiny):
    result = dict(tiny[1])
    result["rows"] = {"listnet": {**result["rows"]["listnet"], "paper": TABLE2["listnet"].paper["web30k"]}}
    ours = 100 * result["rows"]["listnet"]["metrics"]["ndcg@5"]["empty=1"]["mean"]
    line = next(line for line in describe(result).splitlines() if line.startswith("ListNet"))
    assert line.split()[1] == f"{ours:.2f}" and line.split()[3:5] == ["50.75", f"{ours - 50.75:+.2f}"]


@pytest.mark.slow
def test_the_command_writes_the_report_of_the_same_trials(tiny, call):
    request, result = tiny
    words = "--dataset synthetic:tiny --recipe small --rows listnet --epochs 2 --device cpu"
    code, out, err = call("table2", *words.split(), "--seeds", 2, "--out", request.out, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and found["rows"].keys() == result["rows"].keys()
    page = Path(found["report"]).read_text()
    assert Path(found["report"]) == request.out / "report.html" and all(row in page for row in found["rows"])


def test_a_report_that_cannot_be_written_leaves_the_table_and_says_why(tiny, call, monkeypatch):
    from rankgrad import report

    def refuse(*_, **__):
        raise ImportError("a report needs jinja2")

    monkeypatch.setattr(report, "write", refuse)
    request, _ = tiny
    (request.out / "report.html").write_text("of other trials")
    words = "--dataset synthetic:tiny --recipe small --rows listnet --epochs 2 --device cpu"
    code, out, _ = call("table2", *words.split(), "--seeds", 2, "--out", request.out)
    assert code == 0 and out.endswith("report: none: a report needs jinja2\n")
    assert not (request.out / "report.html").exists()


def test_more_seeds_and_rows_join_what_is_there(tiny, monkeypatch, tmp_path):
    shutil.copytree(tiny[0].out, tmp_path / "t")
    before = (tmp_path / "t" / "results.jsonl").read_text().splitlines()
    trained = []
    train = trials.train_trial
    monkeypatch.setattr(trials, "train_trial", lambda trial: (trained.append(str(trial)), train(trial))[1])
    result = make(replace(TINY, out=tmp_path / "t", rows="listnet,approx_ndcg,rmse", seeds=1))
    assert trained == ["rmse fold 1 seed 0"]
    after = (tmp_path / "t" / "results.jsonl").read_text().splitlines()
    assert set(before) < set(after) and len(after) == len(before) + 1
    assert set(result["rows"]) == {"listnet", "approx_ndcg", "rmse", "neural_ndcg@10"}  # the last was there before
    assert result["seeds"] == [0]


def test_a_row_that_fails_is_reported_and_the_others_are_finished(tmp_path, monkeypatch, call):
    train = trials.train_run

    def fragile(folder, *arguments, **options):
        if folder.parent.name == "listnet":
            raise ValueError("the loss was not finite")
        return train(folder, *arguments, **options)

    monkeypatch.setattr(trials, "train_run", fragile)
    request = replace(TINY, out=tmp_path / "t", rows="listnet,rmse", seeds=1)
    result = make(request)
    assert set(result["rows"]) == {"rmse"}
    assert result["failed"] == ["listnet fold 1 seed 0: the loss was not finite"]
    assert "failed: listnet fold 1 seed 0: the loss was not finite" in describe(result)
    words = "--dataset synthetic:tiny --recipe small --rows listnet --epochs 2 --device cpu --seeds 1 --quiet"
    code, _, err = call("table2", *words.split(), "--out", request.out)
    assert code == 2 and "listnet fold 1 seed 0: the loss was not finite" in err
    with pytest.raises(ValueError, match=r"no row .*listnet fold 1 seed 0: the loss was not finite"):
        make(replace(request, out=tmp_path / "u", rows="listnet"))


def test_the_defaults_are_those_of_the_command():
    command = importlib.import_module("rankgrad.cli.reproduce")
    ours = {field.name: field.default for field in fields(Request)}
    for name in ("table2", "ablations", "dasalc"):
        asked = inspect.signature(getattr(command, name)).parameters
        for key in ours.keys() & asked.keys():
            assert asked[key].default == ours[key], key


# --- libraries that are not installed ---------------------------------------------------------------------------------


def test_rows_of_missing_libraries_are_left_out_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "missing", lambda library: f"{library} is not installed")
    some = {name: TABLE2[name] for name in ("listnet", "xgboost", "lightgbm", "catboost")}
    monkeypatch.setattr(tables, "TABLE2", some)
    result = make(replace(TINY, out=tmp_path / "t", rows=None, seeds=1, epochs=1))
    assert set(result["rows"]) == {"listnet"} and set(result["skipped"]) == {"xgboost", "lightgbm", "catboost"}
    assert "skipped: CatBoost (YetiRank): catboost is not installed" in describe(result)


def test_a_missing_library_that_was_asked_for_by_name_is_an_error_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "missing", lambda library: f"{library} is not installed")
    with pytest.raises(ValueError, match="the row xgboost .*xgboost is not installed"):
        make(replace(TINY, out=tmp_path / "t", rows="listnet,xgboost"))
    assert not (tmp_path / "t").exists()


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_like_web30k_is_recognised_and_differs(tmp_path, write_letor):
    write_letor(tmp_path / "MSLR" / "Fold1")
    request = Request(
        "web30k", str(tmp_path / "MSLR"), tmp_path / "t", rows="listnet,approx_ndcg", seeds=1, epochs=1, device="cpu"
    )
    result = make(request)
    text = describe(result)
    for words in (
        "on MSLR-WEB30K",
        "these are NOT the published lists; the counts differ:",
        "train: 30 queries; published are 18,919",
        "batches of 64 lists, 1 epoch, float32",
        "the differences to the paper's numbers mean nothing",
    ):
        assert words in text, words
    assert result["rows"]["listnet"]["paper"] == (50.75, 52.80)
    config = read_config(tmp_path / "t" / "runs" / "listnet" / "fold1-seed0")
    assert (config.data.scaling, config.model.width) == ("web30k", 96)
    assert make(replace(request, dataset=None))["title"] == "MSLR-WEB30K"  # recognised by its 136 features
    assert data.choose_folds(str(tmp_path / "MSLR"), "web30k", "all") == [1]


def test_lists_of_ones_own_need_no_name_and_no_validation_file(tmp_path, write_letor):
    write_letor(tmp_path / "mine", ("train", "test"), features=7)
    result = make(replace(MINE, data=str(tmp_path / "mine"), out=tmp_path / "t", seeds=2))
    assert result["title"] is None
    assert result["folds"][0]["counts"]["vali"]["queries"] == 8
    runs = [tmp_path / "t" / "runs" / "listnet" / f"fold1-seed{seed}" for seed in (0, 1)]
    assert read_per_query(runs[0]).query_ids == read_per_query(runs[1]).query_ids
    text = describe(result)
    assert "not in the catalogue" in text and "a quarter of the train queries" in text


def test_the_papers_protocol_trains_on_what_was_set_aside_and_keeps_the_last_epoch(tmp_path, write_letor):
    write_letor(tmp_path / "mine", ("train", "test"), features=7)
    request = replace(MINE, data=str(tmp_path / "mine"), out=tmp_path / "t", epochs=3, paper_protocol=True)
    result = make(request)
    assert result["folds"][0]["counts"]["train"]["queries"] == 30
    report = read_report(tmp_path / "t" / "runs" / "listnet" / "fold1-seed0")
    assert report["best_epoch"] == report["epochs"] == 3 and report["splits"]["train"]["queries"] == 30
    assert "--paper-protocol" in describe(result)
    write_letor(tmp_path / "with-vali", features=7)
    result = make(replace(request, data=str(tmp_path / "with-vali"), out=tmp_path / "u"))
    assert result["folds"][0]["counts"]["train"]["queries"] == 30  # train.txt alone


def test_prepared_lists_are_trained_on_where_they_are(tmp_path, write_letor):
    from rankgrad.data.prepare import prepare

    write_letor(tmp_path / "mine", features=7)
    prepare(tmp_path / "mine", out=tmp_path / "prepared")
    make(replace(MINE, data=str(tmp_path / "prepared"), out=tmp_path / "t"))
    config = read_config(tmp_path / "t" / "runs" / "listnet" / "fold1-seed0")
    assert config.data.path == str(tmp_path / "prepared")
    assert sorted(path.name for path in (tmp_path / "t" / "data").iterdir()) == ["fold1-scaled", "fold1.json"]


def test_what_a_command_left_that_was_killed_while_it_read_is_no_data(tmp_path, write_letor):
    write_letor(tmp_path / "mine", features=7)
    for half_written in ("fold1/train", "fold1-scaled/train", ".fold1.0123abcd/train"):
        (tmp_path / "data" / half_written).mkdir(parents=True)
    made = data.open_fold(tmp_path / "data", str(tmp_path / "mine"), None, 1, full=False)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["fold1", "fold1-scaled", "fold1.json"]
    assert data.open_fold(tmp_path / "data", str(tmp_path / "mine"), None, 1, full=False) == made
    splits, _, _ = data.scaled_splits(data.scaled_folder(made, made.scaling))
    assert len(splits["test"]) == made.counts["test"]["queries"] == 10


def test_another_scaling_of_a_fold_is_made_once_and_apart(tmp_path, monkeypatch):
    fold = data.open_fold(tmp_path, "synthetic:tiny", None, 1, full=False)
    assert Path(data.scaled_folder(fold, fold.scaling)).name == "fold1-scaled"
    (tmp_path / "fold1-symlog").mkdir()  # of a command that was killed
    folder = data.scaled_folder(fold, "symlog")
    assert data.scaled_splits(folder)[1].kind == "symlog"
    monkeypatch.setattr(data, "load_splits", None)
    assert data.scaled_folder(fold, "symlog") == folder


def test_without_a_test_split_there_is_no_table(tmp_path, write_letor):
    write_letor(tmp_path / "mine", ("train", "vali"), features=7)
    with pytest.raises(ValueError, match=r"mine .*test split"):
        make(replace(MINE, data=str(tmp_path / "mine"), out=tmp_path / "runs" / "t"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_lists_without_a_relevant_test_document_are_refused_before_anything_is_trained(tmp_path, write_letor):
    write_letor(tmp_path / "mine", features=7)
    test = tmp_path / "mine" / "test.txt"
    test.write_text("".join(f"0 {line.partition(' ')[2]}" for line in test.read_text().splitlines(keepends=True)))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / ".keep").touch()
    with pytest.raises(ValueError, match="test split of .*mine .*labels"):
        make(replace(MINE, data=str(tmp_path / "mine"), out=tmp_path / "t"))
    assert [path.name for path in (tmp_path / "t").iterdir()] == [".keep"]
