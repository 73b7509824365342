"""`rankgrad reproduce table2`: rows, cells, resuming, refusals, and the words around the numbers."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import children
from rankgrad.data.synthetic import synthetic
from rankgrad.losses import LOSSES
from rankgrad.reproduce import data as lists
from rankgrad.reproduce import table2
from rankgrad.reproduce import trials as campaign
from rankgrad.reproduce.cells import Cell
from rankgrad.reproduce.rows import ROWS, Setting, chosen
from rankgrad.reproduce.table2 import make_table
from rankgrad.reproduce.tables import as_markdown, as_text
from rankgrad.reproduce.trials import Order
from rankgrad.reproduce.workers import filled
from rankgrad.runs.folder import kept
from rankgrad.training.build import resolve
from rankgrad.training.config import Config, loads
from rankgrad.training.distributed import InterruptedRunError

SETTING = Setting(
    dataset="web30k",
    recipe="paper",
    path="synthetic:tiny",
    fold=1,
    seed=2,
    scaling="auto",
    levels=5,
    device="cpu",
    threads=1,
    epochs=None,
    paper_protocol=False,
)
TINY = Order(
    "synthetic:tiny", rows="listnet,approx_ndcg,neural_ndcg@10", seeds=2, recipe="small", epochs=2, device="cpu"
)
MINE = replace(TINY, dataset=None, rows="listnet", seeds=1, epochs=1)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """A report takes seconds of drawing: the table of the fixture `tiny`, which is made before this, has one."""
    monkeypatch.setattr(table2, "report_on", lambda *_: "none")


# --- rows -------------------------------------------------------------------------------------------------------------


def test_every_row_gives_a_configuration_that_can_be_trained():
    for name, row in ROWS.items():
        made = row.recipe(SETTING)
        if row.package is None:
            assert isinstance(made, Config) and resolve(made).loss.name.partition("@")[0] in LOSSES, name
        else:
            assert made.library == row.package and made.seed == 2


def test_the_rows_are_the_papers_seventeen_and_ours():
    of_the_paper = [name for name, row in ROWS.items() if row.paper]
    assert len(of_the_paper) == 17
    assert sum(ROWS[name].package is None for name in of_the_paper) == 16
    assert ROWS["neural_ndcg@max"].paper == {"web30k": (51.56, 53.46), "istella": (65.69, 70.55)}
    assert ROWS["lambdarank@10"].paper == {"web30k": (49.66, 51.34), "istella": (65.21, 69.82)}
    assert ROWS["ranknet@5"].paper == {"web30k": (49.14, 50.75), "istella": (64.45, 68.74)}
    assert ROWS["xgboost"].paper == {"web30k": (46.80, 49.17), "istella": (61.04, 65.74)}
    assert {"lightgbm", "catboost", "ndcg_loss2pp", "neural_map", "soft_rank", "lambdarank@10-any"} <= set(ROWS)


def test_the_papers_rows_with_a_cut_off_count_pairs_as_its_code_does():
    options = {name: ROWS[name].recipe(SETTING).loss for name in ROWS if ROWS[name].package is None}
    assert {options[f"{loss}@{k}"].options["pairs"] for loss in ("ranknet", "lambdarank") for k in (5, 10)} == {"both"}
    assert (
        options["lambdarank@10-any"].options == {"pairs": "any"}
        and options["lambdarank@10-any"].name == "lambdarank@10"
    )


def test_the_papers_recipe_is_its_model_and_schedule():
    web = ROWS["listnet"].recipe(SETTING)
    assert (web.model.width, web.model.feedforward, web.train.batch_size, web.train.epochs) == (96, 384, 64, 100)
    assert (web.optimiser.lr, web.optimiser.milestones, web.train.precision, web.train.select) == (
        1e-3,
        (50,),
        "float32",
        "best",
    )
    istella = ROWS["listnet"].recipe(replace(SETTING, dataset="istella"))
    assert (istella.model.width, istella.train.batch_size) == (128, 110)
    assert ROWS["listnet"].recipe(replace(SETTING, device="cuda")).train.precision == "bf16"
    small = ROWS["listnet"].recipe(replace(SETTING, recipe="small"))
    assert (small.model.width, small.model.feedforward) == (32, 64)
    assert small.train.epochs == 30 and small.train.patience is not None
    last = ROWS["listnet"].recipe(replace(SETTING, recipe="small", paper_protocol=True)).train
    assert (last.select, last.patience) == ("last", None)
    assert not ROWS["lightgbm"].recipe(replace(SETTING, paper_protocol=True)).tuned
    assert ROWS["rmse"].recipe(replace(SETTING, levels=3)).loss.options == {"levels": 3.0}


def test_rows_are_chosen_by_name():
    assert chosen(None) == list(ROWS)
    assert chosen("rmse, listnet") == ["listnet", "rmse"]
    with pytest.raises(ValueError, match="no row 'listnett'; expected some of neural_ndcg@5"):
        chosen("listnett")


# --- a table from end to end ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A finished table of three rows, two seeds."""
    order = replace(TINY, out=tmp_path_factory.mktemp("tables") / "tiny")
    return order, make_table(order, quiet=True)


def test_a_table_holds_what_its_runs_report(tiny):
    order, result = tiny
    lines = [json.loads(line) for line in (order.out / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and {(line["row"], line["seed"]) for line in lines} == {
        (row, seed) for row in ("listnet", "approx_ndcg", "neural_ndcg@10") for seed in (0, 1)
    }
    reports = [
        json.loads((order.out / "runs" / "listnet" / f"fold1-seed{s}" / "report.json").read_text()) for s in (0, 1)
    ]
    seeds = [report["metrics"]["test"]["ndcg@10"]["empty=0"] for report in reports]
    shown = result["rows"]["listnet"]["metrics"]["ndcg@10"]["empty=0"]
    assert shown["mean"] == pytest.approx(sum(seeds) / 2)
    assert shown["deviation"] == pytest.approx(abs(seeds[0] - seeds[1]) / math.sqrt(2))
    assert result["queries"] == 10
    assert json.loads((order.out / "table2.json").read_text())["rows"].keys() == result["rows"].keys()
    page = Path(result["report"]).read_text()
    assert Path(result["report"]) == order.out / "report.html" and all(row in page for row in result["rows"])


def test_a_cell_is_an_ordinary_run(tiny, tmp_path):
    from rankgrad.runs.compare import compare_runs
    from rankgrad.runs.run import Run

    order, _ = tiny
    folders = [order.out / "runs" / row / "fold1-seed0" for row in ("listnet", "approx_ndcg")]
    assert compare_runs(*folders, "ndcg@10")["queries"] > 0
    run = Run.open(folders[0], "cpu")
    judged = run.evaluate(run.read("synthetic:tiny"))
    np.testing.assert_allclose(judged["ndcg@10"], kept(folders[0]).metrics["ndcg@10"])
    assert loads((folders[0] / "config.toml").read_text()).data.path == "synthetic:tiny"


def test_the_text_names_what_a_reader_must_know(tiny):
    order, result = tiny
    text = as_text(result)
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
    page = (order.out / "table2.md").read_text()
    assert page == as_markdown(result)
    assert "| ListNet |" in page and "| trained with |" in page


def test_the_papers_numbers_stand_beside_ours_where_it_used_the_data(tiny):
    result = dict(tiny[1])
    result["rows"] = {
        name: {**row, "paper": ROWS[name].paper["web30k"]} for name, row in result["rows"].items() if name == "listnet"
    }
    ours = 100 * result["rows"]["listnet"]["metrics"]["ndcg@5"]["empty=1"]["mean"]
    line = next(line for line in as_text(result).splitlines() if line.startswith("ListNet"))
    assert line.split()[1] == f"{ours:.2f}" and line.split()[3:5] == ["50.75", f"{ours - 50.75:+.2f}"]


def test_more_seeds_and_rows_join_what_is_there(tiny, monkeypatch, tmp_path):
    shutil.copytree(tiny[0].out, tmp_path / "t")
    order = replace(TINY, out=tmp_path / "t", rows="listnet,approx_ndcg,rmse", seeds=1)
    before = (tmp_path / "t" / "results.jsonl").read_text()
    trained = []
    fill = campaign.filled
    monkeypatch.setattr(campaign, "filled", lambda cells, jobs: (trained.extend(cells), fill(cells, jobs))[1])
    result = make_table(order, quiet=True)
    assert [str(cell) for cell in trained] == ["rmse fold 1 seed 0"]
    after = (tmp_path / "t" / "results.jsonl").read_text()
    assert after.startswith(before) and after.count("\n") == before.count("\n") + 1
    assert set(result["rows"]) == {"listnet", "approx_ndcg", "rmse", "neural_ndcg@10"}  # the last was there before
    assert result["seeds"] == [0]


def test_a_cell_that_ended_as_the_command_was_killed_gets_its_line(tiny, tmp_path):
    shutil.copytree(tiny[0].out, tmp_path / "t")
    file = tmp_path / "t" / "results.jsonl"
    whole = file.read_text()
    file.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    make_table(replace(tiny[0], out=tmp_path / "t"), quiet=True)
    assert sorted(file.read_text().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": "paper"}, "begun with recipe = 'small' and now 'paper' was asked for"),
        ({"epochs": 3}, "begun with epochs = 2 and now 3"),
        ({"paper_protocol": True}, "begun with paper_protocol = False"),
        ({"dataset": "synthetic:small"}, "begun with dataset = 'synthetic:tiny'"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(tiny, change, words):
    before = sorted(path.name for path in tiny[0].out.iterdir())
    with pytest.raises(ValueError, match=words):
        make_table(replace(tiny[0], **change), quiet=True)
    assert sorted(path.name for path in tiny[0].out.iterdir()) == before


def test_a_cell_made_by_another_recipe_is_refused(tiny, tmp_path):
    shutil.copytree(tiny[0].out, tmp_path / "t")
    config = tmp_path / "t" / "runs" / "listnet" / "fold1-seed0" / "config.toml"
    config.write_text(config.read_text().replace("width = 32", "width = 16"))
    with pytest.raises(ValueError, match="made with other settings than this version's recipe for listnet"):
        make_table(replace(tiny[0], out=tmp_path / "t"), quiet=True)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (Order(), "there is no data; expected --dataset synthetic, or your lists as --data FOLDER"),
        (Order("web30k"), "expected the folder of MSLR-WEB30K as --data FOLDER"),
        (Order("web31k", "data"), "no dataset 'web31k' in the catalogue"),
        (Order("synthetic:tiny", "data"), "leave one of them out"),
        (Order("synthetic:tiny", folds="2"), "synthetic:tiny has no fold 2"),
        (Order("synthetic:tiny", folds="one"), "names no folds"),
        (Order("synthetic:tiny", seeds=0), "--seeds must be a whole number, 1 or above"),
        (Order("synthetic:tiny", recipe="huge"), "--recipe"),
        (Order("synthetic:tiny", device="tpu"), "'tpu' is not a device"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(order, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        make_table(replace(order, out=tmp_path / "t"), quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="exists and holds no table"):
        make_table(replace(TINY, out=tmp_path), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_row_that_fails_is_said_and_the_others_stand(tmp_path, monkeypatch):
    from rankgrad.reproduce import workers

    fill = workers.fill

    def fragile(cell):
        if cell.row == "listnet":
            raise ValueError("the loss was not finite")
        return fill(cell)

    monkeypatch.setattr(workers, "fill", fragile)
    result = make_table(replace(TINY, out=tmp_path / "t", rows="listnet,rmse", seeds=1), quiet=True)
    assert set(result["rows"]) == {"rmse"}
    assert result["failed"] == ["listnet fold 1 seed 0: the loss was not finite"]
    assert "failed: listnet fold 1 seed 0: the loss was not finite" in as_text(result)


# --- data -------------------------------------------------------------------------------------------------------------


def write_letor(folder, splits, features=None):
    folder.mkdir(parents=True)
    for split in splits:
        data = synthetic("tiny", split)
        query = np.repeat(data.query_ids, data.lengths)
        width = features or data.features.shape[1]
        lines = (
            f"{int(y)} qid:{q} {' '.join(f'{i}:{v:.6g}' for i, v in enumerate(x[:width], 1))}\n"
            for y, q, x in zip(data.labels, query, data.features)
        )
        (folder / f"{split}.txt").write_text("".join(lines))


def test_a_folder_like_web30k_is_recognised_and_said_to_differ(tmp_path):
    write_letor(tmp_path / "MSLR" / "Fold1", ("train", "vali", "test"))
    order = Order(
        "web30k",
        str(tmp_path / "MSLR"),
        tmp_path / "t",
        rows="listnet,approx_ndcg",
        seeds=1,
        epochs=1,
        recipe="paper",
        device="cpu",
    )
    result = make_table(order, quiet=True)
    text = as_text(result)
    assert "on MSLR-WEB30K" in text
    assert "these are NOT the published lists; the counts differ:" in text
    assert "train: 30 queries; published are 18,919" in text
    assert "batches of 64 lists, 1 epoch, float32" in text
    assert "the differences to the paper's numbers mean nothing" in text
    assert result["rows"]["listnet"]["paper"] == (50.75, 52.80)
    config = loads((tmp_path / "t" / "runs" / "listnet" / "fold1-seed0" / "config.toml").read_text())
    assert (config.data.scaling, config.model.width) == ("web30k", 96)
    without_name = make_table(replace(order, dataset=None), quiet=True)  # recognised by its 136 features
    assert without_name["title"] == "MSLR-WEB30K"
    assert lists.folds_of(str(tmp_path / "MSLR"), "web30k", "all") == [1]


def test_lists_of_ones_own_need_no_name_and_no_validation_file(tmp_path):
    write_letor(tmp_path / "mine", ("train", "test"), features=7)
    order = replace(MINE, data=str(tmp_path / "mine"), out=tmp_path / "t", seeds=2)
    result = make_table(order, quiet=True)
    assert result["title"] is None
    assert result["folds"][0]["counts"]["vali"]["queries"] == 8
    ids = {kept(tmp_path / "t" / "runs" / "listnet" / f"fold1-seed{seed}").query_ids[0] for seed in (0, 1)}
    assert len(ids) == 1
    text = as_text(result)
    assert "not in the catalogue" in text and "a quarter of the train queries" in text


def test_the_papers_protocol_trains_on_what_was_set_aside_and_keeps_the_last_epoch(tmp_path):
    write_letor(tmp_path / "mine", ("train", "test"), features=7)
    order = replace(MINE, data=str(tmp_path / "mine"), out=tmp_path / "t", epochs=3, paper_protocol=True)
    result = make_table(order, quiet=True)
    assert result["folds"][0]["counts"]["train"]["queries"] == 30
    report = json.loads((tmp_path / "t" / "runs" / "listnet" / "fold1-seed0" / "report.json").read_text())
    assert report["best_epoch"] == report["epochs"] == 3 and report["splits"]["train"]["queries"] == 30
    assert "--paper-protocol" in as_text(result)
    write_letor(tmp_path / "with-vali", ("train", "vali", "test"), features=7)
    order = replace(order, data=str(tmp_path / "with-vali"), out=tmp_path / "u")
    assert make_table(order, quiet=True)["folds"][0]["counts"]["train"]["queries"] == 30  # train.txt alone


def test_what_a_command_left_that_was_killed_while_it_read_is_no_data(tmp_path):
    write_letor(tmp_path / "mine", ("train", "vali", "test"), features=7)
    for half_written in ("fold1/train", "fold1-scaled/train", ".fold1.0123abcd/train"):
        (tmp_path / "data" / half_written).mkdir(parents=True)
    made = lists.ready(tmp_path / "data", str(tmp_path / "mine"), None, 1, full=False)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["fold1", "fold1-scaled", "fold1.json"]
    assert lists.ready(tmp_path / "data", str(tmp_path / "mine"), None, 1, full=False) == made
    assert len(lists.scaled_splits(made.scaled)[0]["test"]) == made.counts["test"]["queries"] == 10


def test_without_a_test_split_there_is_no_table(tmp_path):
    write_letor(tmp_path / "mine", ("train", "vali"), features=7)
    with pytest.raises(ValueError, match="has no test split"):
        make_table(replace(MINE, data=str(tmp_path / "mine"), out=tmp_path / "runs" / "t"), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_lists_with_nothing_relevant_to_judge_by_are_refused_before_anything_is_trained(tmp_path):
    write_letor(tmp_path / "mine", ("train", "vali", "test"), features=7)
    test = tmp_path / "mine" / "test.txt"
    test.write_text("".join(f"0 {line.partition(' ')[2]}" for line in test.read_text().splitlines(keepends=True)))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / ".keep").touch()
    with pytest.raises(ValueError, match="no query in the test split of .*mine has a relevant document"):
        make_table(replace(MINE, data=str(tmp_path / "mine"), out=tmp_path / "t"), quiet=True)
    assert [path.name for path in (tmp_path / "t").iterdir()] == [".keep"]


# --- what must stay as it was -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A finished table of one's own lists, and the lists beside it."""
    folder = tmp_path_factory.mktemp("mine")
    write_letor(folder / "lists", ("train", "vali", "test"), features=7)
    make_table(replace(MINE, data=str(folder / "lists"), out=folder / "t"), quiet=True)
    return folder


def again(folder, data="lists"):
    return make_table(replace(MINE, data=str(folder / data), out=folder / "t"), quiet=True)


def test_a_changed_file_is_refused_and_a_copy_is_not(mine, tmp_path):
    shutil.copytree(mine / "lists", tmp_path / "lists")
    again(tmp_path)
    test = tmp_path / "lists" / "test.txt"
    content = test.read_text()
    test.write_text(content)  # touched
    again(tmp_path)
    test.write_text(("1" if content[0] == "2" else "2") + content[1:])  # of the same length
    with pytest.raises(
        ValueError,
        match=r"^the lists in .*lists changed since the table in .*t was begun: test.txt differs; .*put the old",
    ):
        again(tmp_path)
    test.write_text(content)
    shutil.move(tmp_path / "lists", tmp_path / "moved")
    again(tmp_path, "moved")
    (tmp_path / "moved" / "vali.txt").unlink()
    with pytest.raises(
        ValueError, match=r"data = '.*lists' and now '.*moved' was asked for, where vali.txt is lacking; "
    ):
        again(tmp_path, "moved")


def test_copied_files_are_read_through_once(mine, tmp_path, monkeypatch):
    shutil.copytree(mine, tmp_path / "mine")
    shutil.move(tmp_path / "mine" / "lists", tmp_path / "mine" / "moved")
    for file in (tmp_path / "mine" / "moved").iterdir():
        file.touch()
    read = []
    monkeypatch.setattr(lists, "_seen", lambda file, seen=lists._seen: read.append(file.name) or seen(file))
    again(tmp_path / "mine", "moved")
    assert sorted(read) == ["test.txt", "train.txt", "vali.txt"]
    again(tmp_path / "mine", "moved")
    assert len(read) == 3


def test_a_table_may_be_moved(mine, tmp_path):
    shutil.copytree(mine / "lists", tmp_path / "lists")
    again(tmp_path)
    before = (tmp_path / "t" / "results.jsonl").read_text()
    shutil.move(tmp_path / "t", tmp_path / "elsewhere")
    order = replace(MINE, data=str(tmp_path / "lists"), out=tmp_path / "elsewhere", rows="listnet,rmse")
    assert set(make_table(order, quiet=True)["rows"]) == {"listnet", "rmse"}
    assert (tmp_path / "elsewhere" / "results.jsonl").read_text().startswith(before)
    config = loads((tmp_path / "elsewhere" / "runs" / "rmse" / "fold1-seed0" / "config.toml").read_text())
    assert config.data.path == str(tmp_path / "elsewhere" / "data" / "fold1")
    assert not (tmp_path / "t").exists()


def test_prepared_lists_may_be_moved_but_not_changed(mine, tmp_path):
    from rankgrad.data.prepare import prepare

    prepare(mine / "lists", out=tmp_path / "lists")
    again(tmp_path)
    shutil.move(tmp_path / "lists", tmp_path / "moved")
    order = replace(MINE, data=str(tmp_path / "moved"), out=tmp_path / "t", rows="listnet,rmse", seeds=1)
    assert set(make_table(order, quiet=True)["rows"]) == {"listnet", "rmse"}
    config = loads((tmp_path / "t" / "runs" / "rmse" / "fold1-seed0" / "config.toml").read_text())
    assert config.data.path == str(tmp_path / "moved")
    write_letor(tmp_path / "other", ("train", "vali", "test"), features=5)
    prepare(tmp_path / "other", out=tmp_path / "lists")
    words = "test/manifest.json, train/manifest.json, vali/manifest.json differ"
    with pytest.raises(ValueError, match=f"^the lists in .*lists changed since the table in .*t was begun: {words}; "):
        again(tmp_path)


def test_files_of_tables_and_of_synthetic_lists(tmp_path):
    from rankgrad.data.load import files_of

    (tmp_path / "train.csv").write_text("label,qid,a\n1,1,0.5\n")
    (tmp_path / "test.csv").write_text("label,qid,a\n1,1,0.5\n")
    assert files_of(str(tmp_path)) == [tmp_path / "train.csv", tmp_path / "test.csv"]
    assert files_of(str(tmp_path / "test.csv")) == [tmp_path / "test.csv"]
    assert files_of("synthetic:tiny") == []


def test_a_line_that_was_cut_short_is_left_out_and_written_again(mine, tmp_path, capsys):
    shutil.copytree(mine, tmp_path / "mine")
    file = tmp_path / "mine" / "t" / "results.jsonl"
    whole = file.read_text()
    file.write_text(whole[:50])
    again(tmp_path / "mine")
    assert file.read_text() == whole
    assert capsys.readouterr().err == f"the last line of {file} was cut short and is left out\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("results.jsonl", b"{}\n", r"results.jsonl, line 1, is damaged; expected .*; take the line out"),
        ("results.jsonl", b"\n\xff\0\n{}", r"results.jsonl, line 2, is damaged"),
        ("results.jsonl", b'{"row": "listnet", "fold": 1, "seed": 0}\n', r"results.jsonl, line 1, is damaged"),
        (
            "settings.json",
            b"{",
            r"settings.json is damaged; expected .* put a copy of it back, or choose another --out",
        ),
        ("settings.json", b"[1]", r"settings.json is damaged"),
        ("data/fold1.json", b'{"fold": 1}', r"fold1.json is damaged; .* put a copy of it back, or choose another"),
        ("runs/listnet/fold1-seed0/report.json", b"", r"report.json is damaged; .* and the cell is trained again"),
    ],
    ids=["a line", "garbage", "half a line", "cut settings", "other settings", "fold", "report"],
)
def test_damaged_files_are_named_and_it_is_said_what_to_do(mine, tmp_path, name, content, words):
    shutil.copytree(mine, tmp_path / "mine")
    (tmp_path / "mine" / "t" / "results.jsonl").unlink()  # so that the report is read
    (tmp_path / "mine" / "t" / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        again(tmp_path / "mine")


def test_scaled_lists_that_are_damaged(mine, tmp_path):
    shutil.copytree(mine / "t" / "data" / "fold1-scaled", tmp_path / "scaled")
    (tmp_path / "scaled" / "scaling.safetensors").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"scaling.safetensors is cut .*; put a copy of it back, or begin again in another"
    ):
        lists.scaled_splits(str(tmp_path / "scaled"))


def test_a_table_that_forgot_its_lists_keeps_its_cells_and_takes_no_others(mine, tmp_path):
    shutil.copytree(mine, tmp_path / "mine")
    folder = tmp_path / "mine"
    write_letor(folder / "other", ("train", "vali", "test"), features=5)
    facts, before = folder / "t" / "data" / "fold1.json", (folder / "t" / "results.jsonl").read_text()
    kept_back = facts.read_text()
    facts.unlink()
    for data in ("other", "lists"):
        with pytest.raises(ValueError, match=r"fold1.json is gone, .* of fold 1 .*; put a copy of it back, or choose"):
            again(folder, data)
    facts.write_text(kept_back)
    again(folder)
    assert (folder / "t" / "results.jsonl").read_text() == before


def test_the_defaults_are_those_of_the_command():
    import importlib
    import inspect

    command = importlib.import_module("rankgrad.cli.reproduce")

    ours = {field.name: field.default for field in fields(Order)}
    for name in ("table2", "ablations", "dasalc"):
        asked = inspect.signature(getattr(command, name)).parameters
        for key in ours.keys() & asked.keys():
            assert asked[key].default == ours[key], key


# --- interruptions ----------------------------------------------------------------------------------------------------


class KilledAt:
    """Ends the process, as the machine would, while a cell is being trained."""

    def __init__(self, row, epoch, how="SIGKILL"):
        self.row, self.epoch, self.how = row, epoch, how


def order_of(out, jobs=1):
    return replace(TINY, out=out, rows="listnet,rmse", seeds=1, epochs=6, jobs=jobs)


def table_in_a_process(out, jobs, killed, endless=False):
    from rankgrad.reproduce import cells
    from rankgrad.training.loop import Epoch

    if killed is not None:
        advance = cells.advance

        def deadly(folder, **options):
            for event in advance(folder, **options):
                yield event
                if killed.row == folder.parent.name and isinstance(event, Epoch) and event.epoch == killed.epoch:
                    os.kill(os.getpid(), getattr(signal, killed.how))

        cells.advance = deadly
    table2.report_on = lambda *_: "none"
    try:
        order = order_of(out, jobs)
        make_table(replace(order, epochs=100_000, paper_protocol=True) if endless else order, quiet=True)
    except InterruptedRunError as error:
        out.with_suffix(".message").write_text(str(error))
        sys.exit(children.INTERRUPTED)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    out = tmp_path_factory.mktemp("untouched") / "t"
    return make_table(order_of(out), quiet=True)


@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -signal.SIGKILL), ("SIGINT", children.INTERRUPTED)])
def test_a_killed_table_goes_on_as_if_nothing_had_happened(untouched, tmp_path, how, code):
    out = tmp_path / "t"
    killed = children.start(table_in_a_process, out, 1, KilledAt("rmse", 3, how))
    assert children.code(killed) == code
    assert (out / "runs" / "listnet" / "fold1-seed0" / "report.json").exists()
    assert not (out / "runs" / "rmse" / "fold1-seed0" / "report.json").exists()
    if how == "SIGINT":
        said = out.with_suffix(".message").read_text()
        assert "1 of 2 cells are finished and kept; go on by giving the same command again" in said
    result = make_table(order_of(out), quiet=True)
    assert len((out / "runs" / "rmse" / "fold1-seed0" / "history.jsonl").read_text().splitlines()) == 6
    assert result["rows"]["rmse"]["metrics"] == untouched["rows"]["rmse"]["metrics"]
    assert result["rows"]["listnet"]["metrics"] == untouched["rows"]["listnet"]["metrics"]


def test_only_one_command_at_a_time_works_on_a_table(tiny):
    import fcntl

    with (tiny[0].out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another command is at work on the table"):
            make_table(tiny[0], quiet=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_stop_all_processes_and_say_how_to_go_on(untouched, tmp_path, how):
    out = tmp_path / "t"
    words = "reproduce table2 --dataset synthetic:tiny --rows listnet,rmse --seeds 1 --epochs 100000 --paper-protocol --device cpu --jobs 2"
    process = subprocess.Popen(
        [sys.executable, "-m", "rankgrad", *words.split(), "--out", out],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    histories = [out / "runs" / row / "fold1-seed0" / "history.jsonl" for row in ("listnet", "rmse")]
    deadline = time.monotonic() + 90
    while not all(file.exists() and file.read_text() for file in histories):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: every process of the group gets it
    else:
        os.kill(process.pid, how)  # as a job scheduler does
    out_text, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out_text == ""
    assert err == ("rankgrad: stopped; 0 of 2 cells are finished and kept; go on by giving the same command again\n")
    assert all((file.parent / "checkpoint.safetensors").exists() for file in histories)


class DeadlyFolder:
    """Kills whoever looks into it."""

    def __truediv__(self, name):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_said():
    cell = Cell("rmse", 1, 0, DeadlyFolder(), "", None)
    with pytest.raises(InterruptedRunError, match=r"the process at rmse fold 1 seed 0 was killed \(exit code -9\)"):
        list(filled([cell, cell], 2))


def test_the_processes_of_a_killed_command_follow_it(tmp_path):
    out = tmp_path / "t"
    command = children.start(table_in_a_process, out, 2, None, True)
    histories = [out / "runs" / row / "fold1-seed0" / "history.jsonl" for row in ("listnet", "rmse")]
    deadline = time.monotonic() + 90
    while not all(file.exists() for file in histories):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    command.kill()
    children.code(command)
    seen = -1
    while (now := sum(file.stat().st_size for file in histories)) != seen:  # they save, and are gone
        assert time.monotonic() < deadline
        seen = now
        time.sleep(1)


def test_two_processes_make_the_same_table(untouched, tmp_path):
    result = make_table(order_of(tmp_path / "t", jobs=2), quiet=True)
    for row in ("listnet", "rmse"):
        assert result["rows"][row]["metrics"] == untouched["rows"][row]["metrics"]
