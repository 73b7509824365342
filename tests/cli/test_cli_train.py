"""`rankgrad train`: options, kinds of data, interruptions, what it says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from cli_cases import COMMAND, letor, lists

from cases import without_seal
from rankgrad.data.dataset import RankingDataset
from rankgrad.training.config import Config, Loss, Train, loads


def test_train_says_how_it_goes_on_stderr_and_what_came_out_on_stdout(run, data, tmp_path):
    code, out, err = run(
        "train", data / "letor", "--epochs", 2, "--model", "mlp", "--batch-size", 8, "--out", tmp_path / "r"
    )
    assert code == 0
    first, second = err.splitlines()
    assert re.fullmatch(r"epoch 1/2  loss -?\d\.\d{4}  vali ndcg@10 0\.\d{4} best  [\d,]+ lists/s  \d+ s left", first)
    assert second.startswith("epoch 2/2  ")
    assert "empty queries  count 1  count 0  left out\nndcg@5 " in out
    assert "test split, 8 queries; epoch" in out
    assert out.endswith(f"the run is in {tmp_path / 'r'}\n")
    assert "\x1b" not in out + err


def test_train_can_be_silent_or_speak_json_alone(run, data, tmp_path):
    base = "train", data / "letor", "--epochs", 1, "--model", "linear", "--quiet", "--out"
    assert run(*base, tmp_path / "a") == (0, "", "")
    code, out, err = run(*base, tmp_path / "b", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report.pop("run") == str(tmp_path / "b")
    assert report == json.loads((tmp_path / "b" / "report.json").read_text())


def test_options_become_the_configuration(run, data, tmp_path):
    options = (
        "--loss lambdarank@5 --model mlp --epochs 1 --seed 3 --lr 0.01 --batch-size 5 --list-size 7 --scaling standard "
    )
    options += "--patience 4 --metric ndcg@3 --device cpu --precision bf16 --fold 2 --set loss.options.gain=linear "
    options += "--set model.hidden=[8,4] --set optimiser.name=adamw --set optimiser.clip=1"
    assert run("train", data / "letor", *options.split(), "--quiet", "--out", tmp_path / "r") == (0, "", "")
    config = loads((tmp_path / "r" / "config.toml").read_text())
    assert config.loss == Loss("lambdarank@5", {"gain": "linear"})
    assert (config.model.kind, config.model.hidden) == ("mlp", (8, 4))
    assert (config.optimiser.name, config.optimiser.lr, config.optimiser.clip) == ("adamw", 0.01, 1.0)
    assert (config.data.path, config.data.fold) == (str(data / "letor"), 2)
    assert (config.data.list_size, config.data.scaling) == (7, "standard")
    expected = Train(
        epochs=1, seed=3, batch_size=5, patience=4, metric="ndcg@3", device="cpu", precision="bf16",
        threads=config.train.threads, metrics=(*Config().train.metrics, "ndcg@3"),
    )  # fmt: skip
    assert config.train == expected


def test_tables_whose_columns_have_other_names(run, data, tmp_path):
    text = (data / "one.csv").read_text()
    header, *lines = text.splitlines()
    assert header.split(",")[:2] == ["label", "qid"]
    names = ",".join(["relevance", "query_id", *header.split(",")[2:], "importance"])
    weights = [1 + int(line.split(",")[1]) % 3 for line in lines]
    rows = [f"{line},{weight}" for line, weight in zip(lines, weights, strict=True)]
    (tmp_path / "other.csv").write_text("\n".join([names, *rows]) + "\n")
    train = "train", "--epochs", 2, "--model", "linear", "--quiet", "--out"
    code, _, err = run(*train, tmp_path / "none", tmp_path / "other.csv")
    assert code == 2 and "no column 'label'" in err and "--set data.label=" in err
    named = "--set", "data.label=relevance", "--set", "data.qid=query_id", "--set", "data.weight=importance"
    assert run(*train, tmp_path / "other", tmp_path / "other.csv", *named) == (0, "", "")
    run(*train, tmp_path / "usual", data / "one.csv")
    first = [json.loads((tmp_path / name / "history.jsonl").read_text().splitlines()[0]) for name in ("other", "usual")]
    assert first[0]["loss"] != pytest.approx(first[1]["loss"], abs=1e-4)  # it was weighted
    (tmp_path / "new.csv").write_text("\n".join([names.removesuffix(",importance"), *lines]) + "\n")
    known, new = (run("rank", tmp_path / "other", tmp_path / name)[1] for name in ("other.csv", "new.csv"))
    assert known == new and len(new.splitlines()) == len(lines)
    assert run("evaluate", tmp_path / "other", tmp_path / "new.csv")[0] == 0


def test_members_are_what_trains_where_no_model_is_named(run, data, tmp_path):
    options = "--members 3 --bag 2 --epochs 2 --lr 0.01 --device cpu --out"
    code, out, err = run("train", data / "letor", *options.split(), tmp_path / "r")
    assert code == 0
    assert "epoch 1/2  loss" in err
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    average, best = (f"{report[f'validation_of_{name}']:.4f}" for name in ("average", "best"))
    assert f"3 of 3 members kept; validation of their average {average}, of the best {best}\n" in out
    assert "of 2 was the median of the members' best\n" in out
    assert all(len(line) <= 80 for line in out.splitlines() if "the run is in" not in line)
    config = loads((tmp_path / "r" / "config.toml").read_text())
    assert (config.members.count, config.members.bag, config.members.ranges.lr) == (3, 2, (0.01, 0.01))
    assert config.loss.names[0] == "softmax"


def test_members_that_share_their_weights_are_one_network(run, data, tmp_path):
    options = "--members 3 --loss query_rmse --set members.share=true --epochs 1 --device cpu --quiet --out"
    assert run("train", data / "letor", *options.split(), tmp_path / "r") == (0, "", "")
    assert "members" not in json.loads((tmp_path / "r" / "report.json").read_text())


def test_a_recipe_is_where_the_options_start_from(run, data, tmp_path):
    from rankgrad.training.config import dasalc

    options = "--recipe dasalc --epochs 1 --seed 2 --set model.width=8 --set model.layers=1 --device cpu --quiet --out"
    assert run("train", data / "letor", *options.split(), tmp_path / "r") == (0, "", "")
    config, recipe = loads((tmp_path / "r" / "config.toml").read_text()), dasalc()
    assert (config.loss, config.optimiser) == (recipe.loss, recipe.optimiser)
    assert config.model == replace(recipe.model, width=8, layers=1)
    assert config.data == replace(recipe.data, path=str(data / "letor"))
    assert (config.train.epochs, config.train.seed, config.train.batch_size) == (1, 2, 128)


def test_a_configuration_file_trains_and_options_override_it(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(data)
    (tmp_path / "c.toml").write_text(
        '[data]\npath = "letor"\n[loss]\nname = "listnet"\n[model]\nkind = "linear"\n[train]\nepochs = 9\nseed = 4\n'
    )
    assert run("train", tmp_path / "c.toml", "--epochs", 1, "--quiet", "--out", tmp_path / "r") == (0, "", "")
    config = loads((tmp_path / "r" / "config.toml").read_text())
    assert (config.loss.name, config.train.epochs, config.train.seed) == ("listnet", 1, 4)
    assert config.data.path == str(data / "letor")


def test_runs_get_a_folder_of_their_own(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run("train", data / "letor", "--epochs", 1, "--model", "linear", "--loss", "listnet", "--quiet")[0] == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 2
    assert all(re.fullmatch(r"listnet-\d{8}-\d{6}(-2)?", name) for name in names)


def test_every_kind_of_data_trains_and_is_ranked(run, data, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(lists(1, 24))
    columns = {"label": [y for y, _, _ in rows], "qid": [q for _, q, _ in rows]}
    columns |= {name: [x[i] for _, _, x in rows] for i, name in enumerate("abc")}
    pq.write_table(pa.table(columns), tmp_path / "one.parquet")
    assert run("prepare", data / "letor", "--out", tmp_path / "prepared", "--quiet") == (0, "", "")
    RankingDataset.open(tmp_path / "prepared" / "test").save(tmp_path / "saved")
    sources = data / "one.csv", tmp_path / "one.parquet", tmp_path / "prepared", tmp_path / "saved"
    for number, source in enumerate((*sources, data / "letor" / "train.txt")):
        out = tmp_path / f"run{number}"
        assert run("train", source, "--epochs", 1, "--model", "linear", "--quiet", "--out", out) == (0, "", "")
        code, scores, err = run("rank", out, source)
        assert (code, err, len(scores.splitlines())) == (0, "", 32 if source.name in ("prepared", "saved") else 96)


def test_a_run_that_never_began_leaves_nothing_behind(run, data, tmp_path):
    assert run("train", data / "broken.txt", "--out", tmp_path / "r")[0] == 2
    assert not (tmp_path / "r").exists()
    good = run("train", data / "letor", "--epochs", 1, "--model", "linear", "--quiet", "--out", tmp_path / "r")
    assert good == (0, "", "")


@pytest.mark.slow
def test_sigterm_saves_and_resume_goes_on(tmp_path):
    train = [*COMMAND, "train", "synthetic:tiny", "--model", "linear", "--epochs", "90000", "--out", "r"]
    process = subprocess.Popen(train, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("epoch 1/90000")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    last = err.splitlines()[-1]
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert re.fullmatch(r"rankgrad: stopped in epoch \d+ and saved; go on with: rankgrad train --resume r", last)
    done = len((tmp_path / "r" / "history.jsonl").read_text().splitlines())
    config = tmp_path / "r" / "config.toml"
    config.write_text(without_seal(config).replace("epochs = 90000", f"epochs = {done + 1}"))  # enough has been seen
    again = subprocess.run([*COMMAND, "train", "--resume", "r"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [line.split()[1] for line in again.stderr.splitlines()] == [f"{done + 1}/{done + 1}"]
    assert (tmp_path / "r" / "report.json").exists()


def test_a_finished_run_goes_on_with_more_epochs(run, trained, tmp_path):
    shutil.copytree(trained / "first", tmp_path / "r")
    code, out, err = run("train", "--resume", tmp_path / "r", "--epochs", 5)
    assert code == 0 and [line.split()[1] for line in err.splitlines()] == ["4/5", "5/5"]
    assert f"the run is in {tmp_path / 'r'}" in out
    assert "epochs = 5" in (tmp_path / "r" / "config.toml").read_text()


def test_a_cosine_that_begins_again_is_told_of_unless_quiet(run, data, tmp_path):
    cosine = (
        "--model",
        "linear",
        "--epochs",
        1,
        "--set",
        "optimiser.schedule=cosine",
        "--quiet",
        "--out",
        tmp_path / "r",
    )
    assert run("train", data / "letor", *cosine) == (0, "", "")
    _, _, err = run("train", "--resume", tmp_path / "r", "--epochs", 2)
    assert "cosine schedule begins again" in err.splitlines()[0] and len(err.splitlines()) == 2
    assert run("train", "--resume", tmp_path / "r", "--epochs", 3, "--quiet") == (0, "", "")


def test_trees_are_not_extended(run, data, tmp_path):
    pytest.importorskip("lightgbm")
    trees = ("--model", "lightgbm", "--epochs", 2, "--quiet", "--out", tmp_path / "r")
    assert run("train", data / "letor", *trees) == (0, "", "")
    code, _, err = run("train", "--resume", tmp_path / "r", "--epochs", 9)
    assert code == 2 and "lightgbm needs to grow more is not kept" in err and "new run" in err


@pytest.mark.slow
def test_torchrun_makes_one_run_and_speaks_once(data, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "rankgrad", "train", str(data / "letor"), "--model", "linear", "--epochs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *arguments], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert done.stdout.count("the run is in runs/") == 1
    assert done.stderr.count("epoch 2/2") == 1
    assert (folder / "report.json").exists()


def test_train_says_that_nothing_could_be_chosen_or_judged(run, data, tmp_path):
    code, out, err = run("train", data / "flat.txt", "--model", "linear", "--epochs", 2, "--out", tmp_path / "r")
    assert code == 0 and err.count("no list could be learned from  vali ndcg@10 1.0000") == 2
    assert re.search(r"^ndcg@10 +1.0000 +0.0000 +none$", out, re.M)
    assert re.search("vali split, 1 query; epoch 1 of 2 was kept.*no validation query has a relevant document", out)
    _, out, _ = run("evaluate", tmp_path / "r", data / "flat.txt")
    assert re.search(r"^ +left out +none$", out, re.M) and "nan" not in out
    _, _, err = run("compare", tmp_path / "r", tmp_path / "r")
    assert re.search(r"^rankgrad: no vali query of .*r and .*r has a relevant document", err)


def test_a_test_split_whose_labels_are_withheld_is_left_out_of_the_judgement(run, data, tmp_path):
    code, out, err = run("train", data / "no-test", "--model", "linear", "--epochs", 1, "--out", tmp_path / "r")
    first, *epochs = err.splitlines()
    assert code == 0 and len(epochs) == 1
    assert f"test split of {data}/no-test has a relevant document" in first and "validation alone" in first
    assert "vali split, 8 queries; epoch 1 of 1 was best" in out and "test split has no relevant document" in out
    assert run("compare", tmp_path / "r", tmp_path / "r")[1].startswith("ndcg@10 on the vali split")


def test_a_metric_that_chose_nothing_is_not_said_to_have_chosen(run, data, tmp_path):
    (tmp_path / "half.txt").write_text(re.sub("^[12]", "0.5", letor(lists(1, 8)), flags=re.M))
    line = ("--model", "linear", "--epochs", 2, "--loss", "listnet", "--out", tmp_path / "r")
    code, out, _ = run("train", tmp_path / "half.txt", *line, "--metric", "map")
    assert code == 0 and "epoch 1 of 2 was kept, as the first: no validation query has a relevant document" in out
    assert json.loads((tmp_path / "r" / "report.json").read_text())["selection"].startswith("first epoch")
