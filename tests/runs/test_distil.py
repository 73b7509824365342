"""Small rankers that learn the scores of runs: of one, of networks and trees together, with labels and without."""

import json

import numpy as np
import pytest

import rankgrad
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.synthetic import synthetic
from rankgrad.runs.compare import compare_runs
from rankgrad.runs.distil import distil, student_config
from rankgrad.runs.ensemble import Ensemble, open_run
from rankgrad.runs.folder import read_history, read_per_query, read_report
from rankgrad.runs.run import Finished, Started, train_run
from rankgrad.runs.trees import grow_run
from rankgrad.training.config import Config, configure

DATA = "synthetic:tiny"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A linear run and a run of trees."""
    folder = tmp_path_factory.mktemp("teachers")
    options = {"model.kind": "linear", "train.epochs": 3, "optimiser.lr": 0.05, "train.device": "cpu"}
    [*train_run(folder / "linear", configure(DATA, options, []))]
    trees = {"model.kind": "xgboost", "loss.name": "native", "train.epochs": 10, "members.count": 1}
    [*grow_run(folder / "trees", configure(DATA, trees, []))]
    return folder


def finished(events):
    events = [*events]
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    return events[-1].report


def test_one_run_is_learned_almost_to_the_order_and_kept_like_any_other(teachers, tmp_path):
    out = tmp_path / "small"
    settings = ["train.epochs=40", "optimiser.lr=0.02", "train.device=cpu", "data.scaling=auto"]
    report = finished(distil([teachers / "linear"], DATA, "linear", out, settings=settings))
    found = report["distilled"]
    assert (found["from"], found["split"], found["measured_by"]) == (["linear"], "test", "labels")
    assert found["quality_low"] <= found["quality_difference"] <= found["quality_high"] and found["times_faster"] > 0
    assert report == {"run": str(out), **read_report(out)} and len(read_history(out)) == 40
    # measured by the labels of the test split, like every run
    of_teacher, of_student = read_per_query(teachers / "linear"), read_per_query(out)
    assert of_student.query_ids == of_teacher.query_ids and of_student.split == "test"
    assert compare_runs(out, teachers / "linear", "ndcg@10")["difference"] == pytest.approx(found["quality_difference"])
    lists = synthetic("tiny", "test")
    np.testing.assert_array_equal(open_run(out, "cpu").evaluate(lists)["ndcg@10"], of_student.metrics["ndcg@10"])
    for split, least in (("train", 0.9), ("test", 0.8)):
        some = synthetic("tiny", split)
        taught, learned = (rankgrad.load(folder, "cpu").score_lists(some) for folder in (teachers / "linear", out))
        places = zip(some.offsets, some.offsets[1:], strict=False)
        assert np.mean([np.corrcoef(taught[a:b], learned[a:b])[0, 1] for a, b in places]) > least


def test_networks_and_trees_together_become_trees(teachers, tmp_path):
    out = tmp_path / "both"
    folders = [teachers / "linear", teachers / "trees"]
    report = finished(distil(folders, DATA, "xgboost", out, given={"train.epochs": 30}))
    assert report["distilled"]["from"] == ["linear", "trees"] and report["epochs"] <= 30
    train = synthetic("tiny", "train")
    taught, learned = Ensemble.open(folders).score(train), open_run(out).score(train)
    assert np.corrcoef(taught, learned)[0, 1] > 0.8
    assert json.loads((out / "trees.json").read_text())["objective"] == "reg:squarederror"
    values = Ensemble.open(folders).evaluate(synthetic("tiny", "test"))["ndcg@10"]
    assert report["distilled"]["quality_mean_b"] == pytest.approx(np.nanmean(values))


def test_lists_without_labels_teach_and_are_measured_by_the_order(teachers, tmp_path):
    data = synthetic("tiny")
    names = ",".join(f"column{number}" for number in range(136))
    rows = [
        f"{query},{','.join(map(repr, row.tolist()))}"
        for query, (a, b) in enumerate(zip(data.offsets, data.offsets[1:], strict=False))
        for row in data.features[a:b]
    ]
    (tmp_path / "lists.csv").write_text("\n".join([f"qid,{names}", *rows]) + "\n")
    out = tmp_path / "small"
    report = finished(
        distil([teachers / "linear"], str(tmp_path / "lists.csv"), "linear", out, settings=["train.epochs=2"])
    )
    found = report["distilled"]
    assert found["measured_by"] == "the order of what was distilled" and "quality_difference" not in found
    assert report["metrics"]["vali"]["ndcg@10"]["skipped"] > 0.4 and found["split"] == "vali"
    assert rankgrad.load(out, "cpu").features == 136


def test_labels_do_not_matter_to_what_is_learned(teachers, tmp_path):
    scores = []
    for name, labels in (("as they are", None), ("other", 1)):
        data = synthetic("tiny")
        other = data.labels if labels is None else (np.arange(len(data.labels)) % 3).astype(np.float32)
        RankingDataset(data.features, other, data.offsets, data.query_ids).save(tmp_path / name)
        out = tmp_path / f"run {name}"
        finished(
            distil(
                [teachers / "linear"],
                str(tmp_path / name),
                "mlp:8",
                out,
                settings=["train.epochs=2", "train.device=cpu"],
            )
        )
        scores.append(rankgrad.load(out, "cpu").score_lists(data))
    np.testing.assert_array_equal(*scores)


def test_a_mistake_leaves_nothing_behind(teachers, tmp_path):
    out = tmp_path / "small"
    (tmp_path / "wide.txt").write_text("".join(f"{y} qid:{q} 1:0.5 200:1\n" for q in (1, 2) for y in (0, 1)))
    (tmp_path / "one.txt").write_text("1 qid:1 1:0.5 136:1\n0 qid:1 1:0.2\n")
    for data, into, settings, words in (
        (DATA, "forest", [], "'forest'.*mlp:64,32"),
        (DATA, "mlp:64,x", [], "'mlp:64,x'"),
        (DATA, "linear:3", [], "'linear:3'"),
        (DATA, "mlp:0", [], "every size"),
        (DATA, "mlp:4", ["train.epoch=1"], "'epoch' in"),
        (DATA, "mlp:4", ["optimiser.lr=-1"], "optimiser.lr"),
        (str(tmp_path / "absent"), "mlp:4", [], "absent"),
        (str(tmp_path / "wide.txt"), "mlp:4", [], "200 features.*136 features"),
        (str(tmp_path / "one.txt"), "mlp:4", [], "one query"),
    ):
        with pytest.raises(ValueError, match=words):
            finished(distil([teachers / "linear"], data, into, out, settings=settings))
        assert not out.exists()
    (tmp_path / "narrow.txt").write_text("".join(f"{y} qid:{q} 1:0.5 2:{y}\n" for q in range(6) for y in (0, 1)))
    finished(distil([teachers / "linear"], str(tmp_path / "narrow.txt"), "linear", out, settings=["train.epochs=1"]))
    assert rankgrad.load(out, "cpu").features == 136


def test_an_interruption_leaves_nothing_behind(teachers, tmp_path):
    events = distil([teachers / "linear"], DATA, "mlp:4", tmp_path / "small", settings=["train.epochs=9"])
    for _ in range(4):
        next(events)
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt())
    assert not (tmp_path / "small").exists()


def test_the_student_reads_lists_as_its_teacher_does():
    teacher = configure("data", {"data.qid": "query", "data.fold": 3, "data.weight": "w"}, ['data.missing="nan"'])
    config = student_config(teacher, "more", "mlp:7,5", {"train.seed": 4}, ["model.inputs=list"])
    assert (config.data.path, config.data.qid, config.data.fold, config.data.missing) == ("more", "query", 3, "nan")
    assert config.data.weight is None and config.model.hidden == (7, 5) and config.model.inputs == "list"
    assert config.train.seed == 4 and student_config(Config(), "x", "mlp", {}, ()).model.hidden == (64, 32)
