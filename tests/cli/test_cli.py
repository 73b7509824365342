import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import rankgrad
from rankgrad.cli import main
from rankgrad.data.dataset import RankingDataset
from rankgrad.errors import InterruptedRunError, OtherProcessError
from rankgrad.runs.run import Run
from rankgrad.training.config import Config, Loss, Train, loads

COMMAND = [sys.executable, "-m", "rankgrad"]
COMMANDS = ["demo", "train", "evaluate", "rank", "compare", "report", "prepare", "info", "reproduce"]
REPRODUCED = ["table1", "table2", "figure1", "figure2", "ablations", "dasalc"]
ESCAPE = re.compile(r"\x1b")


def lists(first, count, features=3):
    """Queries first, first + 1, ...: the label is the sign of a sum of features; every fifth query is empty."""
    rng = np.random.default_rng(first)
    for query in range(first, first + count):
        x = rng.normal(size=(4, features)).round(3)
        labels = np.zeros(4, int) if query % 5 == 0 else (x.sum(1) > 0) + (x.sum(1) > 1)
        yield from ((int(label), query, row.tolist()) for label, row in zip(labels, x))


def letor(rows):
    return "".join(f"{y} qid:{q} {' '.join(f'{i}:{v}' for i, v in enumerate(x, 1))}\n" for y, q, x in rows)


def csv(rows):
    return "label,qid,a,b,c\n" + "".join(f"{y},{q},{','.join(map(str, x))}\n" for y, q, x in rows)


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


# --- train ------------------------------------------------------------------------------------------------------------


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
    assert not ESCAPE.search(out + err)


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
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(r"rankgrad: stopped in epoch \d+ and saved; go on with: rankgrad train --resume r", last)
    done = len((tmp_path / "r" / "history.jsonl").read_text().splitlines())
    config = tmp_path / "r" / "config.toml"
    config.write_text(config.read_text().replace("epochs = 90000", f"epochs = {done + 1}"))  # enough has been seen
    again = subprocess.run([*COMMAND, "train", "--resume", "r"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [line.split()[1] for line in again.stderr.splitlines()] == [f"{done + 1}/{done + 1}"]
    assert (tmp_path / "r" / "report.json").exists()


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


# --- evaluate, rank, compare: a newcomer's path -----------------------------------------------------------------------


def test_evaluate_gives_every_metric_under_every_rule_and_says_the_conventions(run, data, trained):
    code, out, err = run("evaluate", trained / "first", data / "letor")
    assert (code, err) == (0, "")
    report = json.loads((trained / "first" / "report.json").read_text())
    for metric, rules in report["metrics"]["test"].items():
        count_1 = re.search(
            rf"^{metric} +count 1  (\S+)  \[(\S+), (\S+)\]\n +count 0  (\S+) .*\n +left out  (\S+) ", out, re.M
        )
        assert [count_1[1], count_1[4], count_1[5]] == [f"{mean:.4f}" for mean in rules.values()]
        assert float(count_1[2]) <= float(count_1[1]) <= float(count_1[3])
    assert "8 queries, 1 of them empty (no relevant document)" in out
    assert "gain 2^y - 1" in out
    assert "trained on" not in out


def test_evaluate_speaks_json_and_takes_metrics_and_splits(run, data, trained):
    code, out, _ = run("evaluate", trained / "first", data / "letor", "--split", "vali", "--metric", "err@3", "--json")
    result = json.loads(out)
    assert code == 0
    assert list(result["metrics"]) == ["err@3"]
    values = Run.open(trained / "first").evaluate(RankingDataset.concatenate([_read(data, "vali")]), ("err@3",))[
        "err@3"
    ]
    assert result["metrics"]["err@3"]["skipped"]["mean"] == pytest.approx(np.nanmean(values))
    assert result["queries"] == 8
    assert not result["trained_on"]


def _read(data, split):
    from rankgrad.data import read_svmlight

    return read_svmlight(data / "letor" / f"{split}.txt")


def test_evaluate_owns_up_to_lists_the_model_has_seen(run, data, trained, tmp_path):
    assert (
        "the model was trained on lists among these"
        in run("evaluate", trained / "first", data / "letor", "--split", "train")[1]
    )
    file = data / "letor" / "train.txt"
    run("train", file, "--epochs", 1, "--model", "linear", "--quiet", "--out", tmp_path / "r")
    assert "the model was trained on lists among these" in run("evaluate", tmp_path / "r", file)[1]


def test_json_has_null_where_there_is_no_number(run, trained, tmp_path):
    (tmp_path / "empty.txt").write_text("0 qid:1 1:1 3:2\n0 qid:1 2:1\n")
    code, out, _ = run("evaluate", trained / "first", tmp_path / "empty.txt", "--json")
    rules = json.loads(out, parse_constant=pytest.fail)["metrics"]["ndcg@10"]
    assert code == 0
    assert rules["skipped"] == {"mean": None, "low": None, "high": None}
    assert rules["empty=1"]["mean"] == 1.0


def test_rank_keeps_the_order_of_the_rows_however_queries_are_mixed(run, data, trained, tmp_path):
    rows = list(lists(1, 3))
    mixed = [rows[i] for i in (0, 4, 8, 1, 5, 2, 9, 10, 3, 6, 7, 11)]
    for name, content in (("plain", rows), ("mixed", mixed)):
        (tmp_path / f"{name}.txt").write_text(letor(content))
    plain, scores = (
        [float(line) for line in run("rank", trained / "first", tmp_path / f"{name}.txt")[1].splitlines()]
        for name in ("plain", "mixed")
    )
    assert scores == [plain[rows.index(row)] for row in mixed]
    code, out, _ = run("rank", trained / "first", tmp_path / "mixed.txt", "--format", "trec")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines] == ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    assert [line[3] for line in lines] == ["1", "2", "3", "4"] * 3
    assert {(line[1], line[5]) for line in lines} == {("Q0", "first")}
    for query, _, document, _, score, _ in lines:
        assert mixed[int(document) - 1][1] == int(query)
        assert float(score) == scores[int(document) - 1]
    assert all(float(a[4]) >= float(b[4]) for a, b in pairwise(lines) if a[0] == b[0])


def test_tables_to_be_ranked_need_no_labels(run, data, trained, tmp_path):
    rows = list(lists(1, 3))
    (tmp_path / "known.csv").write_text(csv(rows))
    header, *known_lines = csv(rows).splitlines()
    new = "".join(f"{','.join(line.split(',')[1:])}\n" for line in csv(rows).splitlines())
    (tmp_path / "new.csv").write_text(new)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "test.csv").write_text(new)
    run("train", data / "one.csv", "--epochs", 1, "--model", "linear", "--quiet", "--out", tmp_path / "named")
    for folder in (trained / "first", tmp_path / "named"):
        known = run("rank", folder, tmp_path / "known.csv")
        assert known[0] == 0 and known[1].count("\n") == 12
        assert run("rank", folder, tmp_path / "new.csv") == run("rank", folder, tmp_path / "folder") == known
        assert "no column 'label'" in run("evaluate", folder, tmp_path / "new.csv")[2]
        for unknown in ("?", "", "-1", "none"):
            text = "\n".join([header, *(f"{unknown},{line.partition(',')[2]}" for line in known_lines)])
            (tmp_path / "unknown.csv").write_text(f"{text}\n")
            assert run("rank", folder, tmp_path / "unknown.csv") == known
        (tmp_path / "late.csv").write_text("\n".join([header, *known_lines, "?,9,1,2,3\n"]))
        assert run("rank", folder, tmp_path / "late.csv")[1].startswith(known[1])
    (tmp_path / "semicolons.csv").write_text(new.replace(",", ";"))
    err = run("rank", trained / "first", tmp_path / "semicolons.csv")[2]
    assert "no column 'qid'" in err and "separator" in err and "'qid;a;b;c'" in err


def test_rank_writes_a_file_and_replaces_one_only_when_told(run, data, trained, tmp_path):
    file = tmp_path / "scores.txt"
    base = "rank", trained / "first", data / "letor", "--out", file
    assert run(*base) == (0, "", "")
    assert file.read_text() == run("rank", trained / "first", data / "letor", "--out", "-")[1]
    before = file.read_text()
    assert run(*base, "--split", "vali")[0] == 2
    assert file.read_text() == before
    assert run(*base, "--split", "vali", "--overwrite") == (0, "", "")
    assert file.read_text() != before


def test_a_query_id_with_a_space_cannot_be_written_as_trec(run, trained, tmp_path):
    (tmp_path / "names.csv").write_text("label,qid,a,b,c\n1,red shoes,1,2,3\n0,red shoes,2,2,3\n")
    code, out, err = run("rank", trained / "first", tmp_path / "names.csv", "--format", "trec")
    assert (code, out) == (2, "")
    assert "'red shoes'" in err and "TREC" in err and "--format scores" in err


def test_several_runs_are_judged_and_rank_as_one(run, data, trained, tmp_path):
    from rankgrad.runs.ensemble import mean_of_standardised
    from rankgrad.training.evaluate import measure

    both = trained / "first", trained / "second"
    test = _read(data, "test")
    together = mean_of_standardised([Run.open(folder).score(test) for folder in both], test.offsets).astype(np.float32)
    code, out, err = run("rank", *both, data / "letor")
    assert (code, err) == (0, "")
    assert [float(line) for line in out.splitlines()] == pytest.approx(together.tolist(), rel=1e-8)
    lines = run("rank", *both, data / "letor", "--format", "trec")[1].splitlines()
    assert {line.split()[5] for line in lines} == {"ensemble-of-2"}
    expected = measure(together, test, ["ndcg@10"])["ndcg@10"]
    result = json.loads(run("evaluate", *both, data / "letor", "--json")[1])
    assert result["metrics"]["ndcg@10"]["skipped"]["mean"] == pytest.approx(np.nanmean(expected))
    assert result["runs"] == [str(folder) for folder in both] and "run" not in result
    assert not result["trained_on"]
    code, out, _ = run("evaluate", *both, data / "letor", "--split", "train", "--metric", "map")
    assert "2 runs together: mean of scores standardised within each list\n" in out
    assert "the model was trained on lists among these" in out
    other = tmp_path / "other"  # trained on a file: one of the two has seen the folder
    run("train", data / "letor" / "train.txt", "--model", "linear", "--epochs", 1, "--quiet", "--out", other)
    out = run("evaluate", other, both[0], data / "letor", "--split", "train", "--json")[1]
    assert json.loads(out)["trained_on"]
    alone = run("evaluate", both[0], data / "letor", "--json")[1]
    assert json.loads(alone)["run"] == str(both[0])


def test_runs_that_cannot_rank_together_are_refused(run, data, trained, tmp_path):
    train = "train", "--model", "linear", "--epochs", 1, "--quiet", "--out"
    run(*train, tmp_path / "wide", data / "wide.txt")
    code, out, err = run("rank", trained / "first", tmp_path / "wide", data / "letor")
    assert (code, out) == (2, "")
    assert "different features (3 and 5 of them)" in err
    run(*train, tmp_path / "fold2", data / "letor", "--fold", 2)
    code, out, err = run("evaluate", trained / "first", tmp_path / "fold2", data / "letor")
    assert (code, out) == (2, "")
    assert "first is of fold 1" in err and "fold2 of fold 2" in err
    assert run("evaluate", trained / "first", tmp_path / "fold2", data / "letor" / "test.txt")[0] == 0


def test_compare_pairs_the_queries_and_leaves_out_empty_ones(run, trained):
    from rankgrad.runs.folder import read_per_query
    from rankgrad.runs.significance import compare

    code, out, err = run("compare", trained / "first", trained / "second")
    assert (code, err) == (0, "")
    assert "ndcg@10 on the test split, 7 queries (1 empty one left out)" in out
    a, b = (read_per_query(trained / name).metrics["map"] for name in ("first", "second"))
    expected = compare(a, b)
    found = json.loads(run("compare", trained / "first", trained / "second", "--metric", "map", "--json")[1])
    for key in ("mean_a", "difference", "low", "high", "p_value", "wins", "ties", "losses", "queries"):
        assert found[key] == getattr(expected, key)
    assert found["empty_queries"] == 1


def test_compare_refuses_runs_judged_on_other_queries(run, data, trained, tmp_path):
    run("train", data / "one.csv", "--epochs", 1, "--model", "linear", "--quiet", "--out", tmp_path / "r")
    code, out, err = run("compare", trained / "first", tmp_path / "r")
    assert (code, out) == (2, "")
    assert "8 test queries" in err and "5 vali queries" in err


def test_report_says_where_it_wrote_and_how_much(run, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("report", trained / "first", trained / "second")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"report.html, \d+ KB: open it in a browser\n", out)
    page = (tmp_path / "report.html").read_text()
    assert "<title>2 runs compared" in page
    assert run("report", trained / "first")[0] == 2
    assert (tmp_path / "report.html").read_text() == page
    assert run("report", trained / "first", "--overwrite")[0] == 0
    assert "<title>first " in (tmp_path / "report.html").read_text()


def test_report_tells_a_machine_what_evaluate_and_compare_would(run, trained, data, tmp_path):
    code, out, err = run("report", trained / "first", trained / "second", "--out", tmp_path / "r.html", "--json")
    told = json.loads(out)
    assert (code, err, told["report"]) == (0, "", str(tmp_path / "r.html"))
    assert told["bytes"] == (tmp_path / "r.html").stat().st_size
    judged = json.loads(run("evaluate", trained / "first", data / "letor", "--json")[1])
    assert told["runs"]["first"] == judged["metrics"]
    assert (told["queries"], told["interval"]) == (judged["queries"], judged["interval"])
    compared = json.loads(run("compare", trained / "second", trained / "first", "--json")[1])
    against = told["runs"]["second"]["ndcg@10"].pop("against")
    assert told["runs"]["second"]["ndcg@10"].keys() == judged["metrics"]["ndcg@10"].keys()
    assert against.pop("p_corrected") == compared["p_value"]  # the only one
    assert against.items() <= compared.items()


PAGES = [
    *["docs/command-line.md", "docs/report.md", "docs/reproduce.md", "docs/practitioner.md", "docs/researcher.md"],
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
        code, _, err = run(*command.split())
        if command == "train --resume runs/first":  # as it was not interrupted
            assert "is finished; there is nothing to resume" in err
        else:
            assert code == 0, f"{command}: {err}"


# --- info, demo, help -------------------------------------------------------------------------------------------------


def test_info_names_every_loss_and_the_install_line_of_what_is_missing(run, monkeypatch):
    import rankgrad.cli.info
    from rankgrad.losses import LOSSES

    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert all(re.search(rf"\b{name}\b", out) for name in LOSSES)
    assert "torch: plain PyTorch" in out
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setattr(rankgrad.cli.info.importlib.util, "find_spec", lambda name: None)
    assert "not installed; pip install 'rankgrad[tables]'" in run("info")[1]
    found = json.loads(run("info", "--json")[1])
    assert set(found["losses"]) == set(LOSSES)
    assert found["losses"]["neural_ndcg"]["backend"] == "torch"


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


# --- mistakes ---------------------------------------------------------------------------------------------------------

# a command line, and facts that its one sentence must hold: what is wrong, and the word that helps
MISTAKES = [
    ("trian", "'trian'"),
    ("train", "nothing to train on", "DATA", "--resume"),
    ("train absent", "absent does not exist", "synthetic"),
    ("train synthetic:huge", "'huge'", "tiny, small"),
    ("train {data}/letor --los listnet", "no such option", "--los"),
    ("train {data}/letor more", "extra argument"),
    ("train {data}/letor --epochs", "'--epochs' requires an argument"),
    ("train {data}/letor --epochs many", "'--epochs'", "many"),
    ("train {data}/letor --epochs 0", "train.epochs", "1 or above", "got 0"),
    ("train {data}/letor --loss nural_ndcg", "'nural_ndcg' is not a loss", "did you mean 'neural_ndcg'"),
    ("train {data}/letor --loss listnet@5", "listnet has no cut-off", "write listnet"),
    ("train {data}/letor --loss neural_ndcg@0", "'neural_ndcg@0'", "1 or above"),
    ("train {data}/letor --model forest", "model.kind", "'mlp'", "'forest'"),
    ("train {data}/letor --metric ndgc", "'ndgc' is not a metric", "ndcg"),
    ("train {data}/letor --lr -1", "optimiser.lr", "above 0", "-1"),
    ("train {data}/letor --device tpu", "'tpu' is not a device", "cpu"),
    ("train {data}/letor --precision int8", "train.precision", "'bf16'", "'int8'"),
    ("train {data}/letor --scaling log", "data.scaling", "'symlog'", "'log'"),
    ("train {data}/letor --recipe large", "no recipe 'large'", "paper, small, dasalc"),
    ("train {data}/typo.toml --recipe small", "--recipe small", "typo.toml", "leave one of them out"),
    ("train --resume {runs}/first --recipe small", "--resume", "first/config.toml", "no other setting"),
    ("train {data}/letor --set epochs=3", "--set epochs=3", "SECTION.KEY=VALUE"),
    ("train {data}/letor --set train.epoch=3", "'epoch' in [train]", "did you mean 'epochs'?"),
    ("train {data}/letor --set train.epochs=few", "train.epochs", "int", "'few'"),
    ("train {data}/letor --set train.compile=true", "'compile' in [train]"),
    ("train {data}/letor --set loss.options.tua=1", "neural_ndcg has no option 'tua'", "tau"),
    ("train {data}/letor --set a.b.c=1", "'a' at the top"),
    ("train {data}/letor --out {data}", "exists already", "--out", "--resume"),
    ("train {data}/letor --out {data}/typo.toml/r", "typo.toml/r: Not a directory"),
    ("train {data}/typo.toml", "typo.toml", "'epoch' in [train]", "did you mean 'epochs'?"),
    ("train {data}/latin.toml", "latin.toml is not text", "TOML"),
    ("train absent.toml", "absent.toml does not exist"),
    ("train {data}/broken.txt", "broken.txt:2:9", "'1:x'"),
    ("train {data}/clicks.txt", "label 2000 of query 2", "NDCG", "overflows", "map your labels"),
    ("train --resume absent", "absent is not a run", "config.toml"),
    ("train --resume {runs}/first", "first is finished"),
    ("train --resume {runs}/first --epochs 9", "--resume", "first/config.toml", "no other setting"),
    ("train --resume {runs}/first --set train.epochs=9", "--resume", "first/config.toml", "no other setting"),
    ("train {runs}/first", "first is a run", "--resume"),
    ("evaluate", "'DATA'", "rankgrad evaluate --help"),
    ("evaluate {runs}/first", "RUN is missing before", "first", "DATA"),
    ("rank {data}/letor", "RUN is missing before", "letor", "DATA"),
    ("evaluate {runs}/first {runs}/first {data}/letor", "first is given twice", "leave one out"),
    ("rank {runs}/first {runs}/second", "second is a run", "DATA"),
    ("rank {runs}/first {runs}/second {runs}/second", "second is a run", "DATA"),
    ("evaluate absent {data}/letor", "absent is not a run"),
    ("evaluate {data} {data}/letor", "is not a run", "model.safetensors", "`rankgrad train`"),
    ("evaluate {runs}/first {data}/clicks.txt --metric ndcg@5", "label 2000 of query 1", "ndcg@5", "such as map"),
    ("train {data}", "one.csv", "or call it train"),
    ("evaluate {runs}/first absent", "absent does not exist"),
    ("evaluate {runs}/first {data}/wide.txt", "wide.txt:1", "3 features"),
    ("evaluate {runs}/first {data}/letor --split dev", "no split 'dev'", "train, vali, test"),
    ("evaluate {runs}/first {data}/letor --metric auc", "'auc' is not a metric"),
    ("rank {runs}/first {data}/letor --format csv", "no format 'csv'", "scores, trec"),
    ("rank {runs}/first {data}/letor --out {data}/one.csv", "one.csv exists already", "--overwrite"),
    ("rank {runs}/first {data}/letor --out absent/file", "absent is not a folder", "make it first"),
    ("prepare", "'FOLDER'"),
    ("report", "'RUN'"),
    ("report {data}", "is not a run", "report.json"),
    ("report {runs}/first {runs}/first", "first is given twice", "leave one out"),
    ("report {runs}/first --out {data}/one.csv", "one.csv exists already", "--overwrite"),
    ("report {runs}/first --out absent/file", "absent is not a folder", "make it first"),
    ("compare {runs}/first", "'RUN_B'"),
    ("compare {runs}/first {data}", "is not a run", "report.json"),
    ("compare {runs}/first {runs}/second --metric err@2", "'err@2'", "ndcg@5, ndcg@10", "--metric"),
]


@pytest.mark.parametrize(("line", "facts"), [(line, facts) for line, *facts in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_sentence_and_code_2(run, data, trained, tmp_path, monkeypatch, line, facts):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*(word.format(data=data, runs=trained) for word in line.split()))
    assert (code, out) == (2, ""), err
    assert err.startswith("rankgrad: ") and err.count("\n") == 1
    assert [fact for fact in facts if fact not in err] == []
    assert not list(tmp_path.glob("runs/*"))


def test_a_configuration_may_lie_beside_the_lists_it_is_for(run, data, trained, tmp_path, monkeypatch):
    shutil.copytree(data / "letor", tmp_path / "lists")
    (tmp_path / "lists" / "config.toml").write_text(
        '[data]\npath = "lists"\n[train]\nepochs = 1\n[model]\nkind = "linear"\n'
    )
    monkeypatch.chdir(tmp_path)
    assert run("train", "lists/config.toml", "--out", "first", "--quiet") == (0, "", "")
    assert run("train", "lists", "--out", "second", "--model", "linear", "--epochs", "1", "--quiet") == (0, "", "")
    code, scores, _ = run("rank", "first", "lists")
    assert code == 0 and scores == run("rank", "first", data / "letor")[1] != ""


@pytest.mark.parametrize("name", ["model.safetensors", "queries.safetensors"])
def test_a_damaged_file_of_a_run_is_named_and_it_is_said_what_to_do(run, data, trained, tmp_path, name):
    shutil.copytree(trained / "first", tmp_path / "torn")
    (tmp_path / "torn" / name).write_bytes(b"x")
    line = ("compare", tmp_path / "torn", trained / "first")
    code, _, err = run(*line) if name[0] == "q" else run("evaluate", tmp_path / "torn", data / "letor")
    assert code == 2 and re.search(
        rf"{name} is cut short or damaged.*put a copy of it back.*train the run again\n$", err
    )


def test_a_run_whose_configuration_is_torn_or_gone_is_said_to_be(run, data, trained, tmp_path):
    shutil.copytree(trained / "first", tmp_path / "torn")
    shutil.copy(data / "latin.toml", tmp_path / "torn" / "config.toml")
    code, out, err = run("evaluate", tmp_path / "torn", data / "letor")
    assert (code, out) == (2, "") and f"{tmp_path}/torn/config.toml is not text" in err and "TOML" in err
    (tmp_path / "torn" / "config.toml").unlink()
    assert "torn is not a run: it has no config.toml" in run("evaluate", tmp_path / "torn", data / "letor")[2]


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (MemoryError(), 2, "rankgrad: there is not enough memory; lower --batch-size or --list-size"),
        (OSError(28, "No space left on device", "there"), 2, "rankgrad: there: No space left on device\n"),
        (KeyboardInterrupt(), 130, "rankgrad: interrupted\n"),
        (ImportError("reading tables needs pyarrow; pip install it"), 2, "rankgrad: reading tables needs pyarrow"),
        (ValueError("two\nlines"), 2, "rankgrad: two lines\n"),
        (InterruptedRunError("stopped; go on with: ..."), 130, "rankgrad: stopped; go on with: ...\n"),
    ],
)
def test_what_goes_wrong_below_is_one_sentence_too(run, trained, monkeypatch, error, code, sentence):
    def fail(*_):
        raise error

    monkeypatch.setattr("rankgrad.runs.compare.compare_runs", fail)
    found, out, err = run("compare", trained / "first", trained / "second")
    assert (found, out) == (code, "")
    assert err.startswith(sentence)


def test_of_several_processes_the_first_speaks_and_one_that_failed_says_which_it_is(run, trained, monkeypatch):
    failure = {}

    def fail(*_):
        raise failure["is"]

    monkeypatch.setattr("rankgrad.runs.compare.compare_runs", fail)
    line = "compare", trained / "first", trained / "second"
    monkeypatch.setenv("RANK", "1")
    for failure["is"], code, sentence in (
        (OtherProcessError(), 2, ""),
        (InterruptedRunError("stopped"), 130, ""),
        (KeyboardInterrupt(), 130, ""),
        (ValueError("no such file here"), 2, "rankgrad (process 1): no such file here\n"),
    ):
        assert run(*line) == (code, "", sentence)
    try:
        raise InterruptedRunError("another process ended") from RuntimeError("Connection closed by peer")
    except InterruptedRunError as error:
        failure["is"] = error
    assert run(*line) == (130, "", "rankgrad (process 1): another process ended\n")


def test_where_the_first_process_cannot_begin_the_others_leave_in_silence(monkeypatch):
    from rankgrad.training import distributed

    sent = []
    monkeypatch.setattr(distributed, "broadcast_bytes", lambda content: sent.append(content) or b"")
    with pytest.raises(ValueError, match="no"):
        distributed.from_first(lambda: (_ for _ in ()).throw(ValueError("no")), bytes, bytes)
    assert sent == [b""]
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    with pytest.raises(OtherProcessError):
        distributed.from_first(lambda: pytest.fail("only the first process makes the run"), bytes, bytes)


@pytest.mark.filterwarnings("default")
def test_a_key_that_is_gone_is_ignored_in_a_run_with_one_warning(run, data, trained, tmp_path):
    shutil.copytree(trained / "first", tmp_path / "old")
    config = tmp_path / "old" / "config.toml"
    config.write_text(config.read_text().replace("[train]", '[train]\ncompile = "auto"'))
    code, out, err = run("rank", tmp_path / "old", data / "letor")
    assert (code, out) == (0, run("rank", trained / "first", data / "letor")[1])
    assert err.startswith(f"rankgrad: warning: {config}: train.compile") and err.count("\n") == 1
    code, out, err = run("train", config, "--out", tmp_path / "new")  # in a configuration to begin with it is a mistake
    assert (code, out) == (2, "") and "'compile' in [train]" in err


def test_a_defect_keeps_its_traceback(trained, monkeypatch):
    def fail(*_):
        raise RuntimeError("ours")

    monkeypatch.setattr("rankgrad.runs.compare.compare_runs", fail)
    monkeypatch.setattr(sys, "argv", ["rankgrad", "compare", str(trained / "first"), str(trained / "second")])
    with pytest.raises(RuntimeError, match="ours"):
        main()


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(trained, tmp_path):
    (tmp_path / "long.txt").write_text(letor(lists(1, 3_000)))
    command = [*COMMAND, "rank", str(trained / "first"), str(tmp_path / "long.txt"), "--format", "trec"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1
    process.stderr.close()


# --- the terminal -----------------------------------------------------------------------------------------------------


def _in_terminal(arguments, cwd, **environment):
    """Run the command with stdout and stderr on a terminal of 80 columns; all that it showed."""
    import fcntl
    import pty
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    settings = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    settings |= {"TERM": "xterm-256color", **environment}
    process = subprocess.Popen([*COMMAND, *arguments], stdout=follower, stderr=follower, cwd=cwd, env=settings)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65_536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert process.wait(60) == 0, shown
    return shown.decode()


@pytest.mark.slow
def test_a_terminal_gets_a_bar_that_fits_and_no_colour_where_none_is_wanted(data, tmp_path):
    arguments = ["train", str(data / "letor"), "--model", "linear", "--epochs", "3", "--batch-size", "4", "--out", "r"]
    shown = _in_terminal(arguments, tmp_path, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*[34]\d[0-9;]*m", shown)
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", shown)]
    assert any(re.search(r"epoch 3/3 ━+ loss \S+ ndcg@10 \S+ \S+ lists/s 0:00:00", line) for line in frames)
    assert max(map(len, frames)) <= 80


def test_lines_tell_of_skipped_steps_early_stopping_and_a_resumed_start(capsys):
    from rankgrad.training.loop import Epoch, Step
    from rankgrad.training.progress import watch

    config = replace(Config(), train=Train(epochs=9, metric="map"))
    epoch = Epoch(epoch=5, loss=0.5, metric=0.25, best=False, lr=0.1, skipped=2, stop=False)
    events = [Step(4, 2, 3, 0.5, 8), Step(4, 3, 3, 0.5, 8), epoch, epoch._replace(epoch=6, stop=True)]
    watch(events, config)
    out, err = capsys.readouterr()
    first, last = err.splitlines()
    assert out == ""
    assert re.fullmatch(r"epoch 5/9  loss 0.5000  vali map 0.2500  2 steps skipped  [\d,]+ lists/s  0 s left", first)
    assert last.startswith("epoch 6/9 ")
    assert last.endswith("stopped early")
    watch(events, config, quiet=True)
    assert capsys.readouterr() == ("", "")
    watch([*events[:2], epoch._replace(loss=math.nan, skipped=1)], config)
    assert "  no step was taken  vali map 0.2500  1 step skipped  " in capsys.readouterr().err
