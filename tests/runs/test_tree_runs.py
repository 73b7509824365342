"""Trees as runs: growing, choosing, averaging, scoring alone and beside networks, and what goes wrong."""

import importlib.util
import json
import signal
from dataclasses import replace

import numpy as np
import pytest

from rankgrad.data import RankingDataset
from rankgrad.data.load import read_splits
from rankgrad.errors import InterruptedRunError
from rankgrad.runs import trees as growing
from rankgrad.runs.averaging import mean_of_standardised
from rankgrad.runs.compare import compare_runs, evaluate_runs
from rankgrad.runs.ensemble import Ensemble, open_run
from rankgrad.runs.folder import is_finished, is_run, read_config, read_per_document, read_per_query, read_report
from rankgrad.runs.run import Finished, Started, train_run
from rankgrad.runs.trees import Grown, TreeRun, grow_run
from rankgrad.training.config import Config, Data, Loss, Members, Model, Train, dumps, loads
from rankgrad.training.evaluate import mean, measure
from rankgrad.training.members import folds_of
from rankgrad.trees.settings import RANGES, Boosting, drawn

CONFIG = Config(
    data=Data("synthetic:tiny"),
    model=Model(kind="lightgbm"),
    loss=Loss("native"),
    members=Members(keep=1),
    train=Train(epochs=30, patience=10, seed=3, threads=1),
)


@pytest.fixture(autouse=True)
def _libraries():
    pytest.importorskip("lightgbm")
    pytest.importorskip("xgboost")


@pytest.fixture(scope="module")
def splits():
    return read_splits("synthetic:tiny")


def grow(folder, config=CONFIG, **changes):
    """The report of a run with some sections of its configuration changed."""
    events = list(grow_run(folder, replace(config, **changes)))
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    return events[-1].report


def facts_of(folder):
    return json.loads((folder / "trees.json").read_text())


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
@pytest.mark.parametrize("loss", ["native", "neural_ndcg@10"])
def test_a_run_of_trees_is_a_run_like_any_other(library, loss, splits, tmp_path):
    report = grow(tmp_path / "t", model=Model(kind=library), loss=Loss(loss))
    native = {"lightgbm": "lightgbm lambdarank", "xgboost": "xgboost rank:pairwise"}[library]
    assert report["loss"] == (native if loss == "native" else f"{library} with neural_ndcg@10")
    assert {"run": str(tmp_path / "t"), **read_report(tmp_path / "t")} == report
    assert is_run(tmp_path / "t") and is_finished(tmp_path / "t")
    config = read_config(tmp_path / "t")
    assert config.model.kind == library and loads(dumps(config)) == config
    run = open_run(tmp_path / "t")
    assert (run.features, run.names, run.config) == (136, None, config)
    test = run.read("synthetic:tiny")
    assert run.score(test).dtype == np.float32 and run.score(test).shape == test.labels.shape
    values = run.evaluate(test)
    np.testing.assert_allclose(read_per_query(tmp_path / "t").metrics["ndcg@10"], values["ndcg@10"])
    np.testing.assert_array_equal(read_per_document(tmp_path / "t").scores.astype(np.float32), run.score(test))
    assert mean(values["ndcg@10"], 0.0) > mean(measure(np.zeros(len(test.labels)), test, ["ndcg@10"])["ndcg@10"], 0.0)
    assert 1 <= report["best_epoch"] <= report["epochs"] <= 30


def test_trees_and_networks_score_together(splits, tmp_path):
    grow(tmp_path / "trees")
    network = replace(CONFIG, model=Model(kind="linear"), loss=Loss("softmax"), train=replace(CONFIG.train, epochs=1))
    list(train_run(tmp_path / "net", network))
    folders = [tmp_path / "net", tmp_path / "trees"]
    together, test = Ensemble.open(folders), splits["test"]
    alone = [open_run(folder).score(test) for folder in folders]
    np.testing.assert_array_equal(together.score(test), mean_of_standardised(alone, test.offsets).astype(np.float32))
    found = evaluate_runs(folders, "synthetic:tiny", "test", ["ndcg@10"])
    assert found["metrics"]["ndcg@10"]["empty=0"]["mean"] == pytest.approx(
        mean(measure(together.score(test), test, ["ndcg@10"])["ndcg@10"], 0.0)
    )
    assert compare_runs(*folders, "ndcg@10")["queries"] == 9


def test_the_best_settings_by_validation_are_averaged(splits, tmp_path):
    report = grow(tmp_path / "t", members=Members(count=6, keep=3))
    facts, vali = facts_of(tmp_path / "t"), splits["vali"]
    values = [entry["validation"] for entry in facts["tried"]]
    assert len(values) == 6 and [entry["number"] for entry in facts["tried"]] == list(range(6))
    assert facts["kept"] == np.argsort([-value for value in values], kind="stable")[:3].tolist()
    assert facts["chosen"]["validation"] == max(values) == report["trees"]["validation_of_best"]
    files = [model["file"] for model in facts["models"]]
    assert files == ["model-1.txt", "model-2.txt", "model-3.txt"]
    lightgbm = pytest.importorskip("lightgbm")
    scores = [lightgbm.Booster(model_file=tmp_path / "t" / file).predict(vali.features) for file in files]
    for number, of_one in zip(facts["kept"], scores):
        assert mean(measure(of_one, vali, ["ndcg@10"])["ndcg@10"], 1.0) == pytest.approx(values[number])
    expected = mean_of_standardised(scores, vali.offsets)
    np.testing.assert_allclose(open_run(tmp_path / "t").score(vali), expected, atol=1e-6)
    value = mean(measure(expected, vali, ["ndcg@10"])["ndcg@10"], 1.0)
    assert report["trees"]["validation_of_average"] == pytest.approx(value)
    assert report["metrics"]["vali"]["ndcg@10"]["empty=1"] == pytest.approx(value)


def test_bagged_trees_are_validated_on_what_they_have_not_seen(splits, tmp_path):
    report = grow(tmp_path / "t", members=Members(count=1, keep=1, bag=4))
    everything = RankingDataset.concatenate([splits["train"], splits["vali"]])
    folds = folds_of(everything, 4, 3)
    lightgbm = pytest.importorskip("lightgbm")
    held_out = np.empty(len(everything.labels))
    for fold, model in enumerate(facts_of(tmp_path / "t")["models"]):
        part = np.repeat(folds == fold, everything.lengths)
        held_out[part] = lightgbm.Booster(model_file=tmp_path / "t" / model["file"]).predict(everything.features)[part]
    value = mean(measure(held_out, everything, ["ndcg@10"])["ndcg@10"], 1.0)
    assert report["metrics"]["vali"]["ndcg@10"]["empty=1"] == pytest.approx(value)
    assert report["splits"]["vali"]["queries"] == 40 and report["trees"]["models"] == 4
    assert value < mean(open_run(tmp_path / "t").evaluate(everything, ("ndcg@10",))["ndcg@10"], 1.0)


def test_settings_follow_from_the_seed_and_their_number():
    how = Boosting("lightgbm", "lambdarank", seed=0, threads=1, rounds=1, patience=1)
    some = [drawn(how, number, large=False) for number in range(8)]
    assert some[0] == {"num_leaves": 7, "min_data_in_leaf": 20}
    assert len({json.dumps(settings) for settings in some}) > 6
    assert drawn(how, 5, large=False) == some[5] != drawn(replace(how, seed=1), 5, large=False)
    for library, ranges in RANGES.items():
        for own in (False, True) if library != "catboost" else (False,):
            how = Boosting(library, "query_rmse", seed=0, threads=1, rounds=1, patience=1, own=own)
            for large in (False, True):
                assert set(drawn(how, 1, large=large)) == set(ranges)
    assert drawn(how, 1, large=True)["depth"] >= 6


def test_the_same_seed_grows_the_same_run(splits, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        grow(tmp_path / name, members=Members(count=2, keep=2), train=replace(CONFIG.train, seed=seed))
    a, b, c = (open_run(tmp_path / name).score(splits["test"]) for name in "abc")
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_options_of_the_loss_reach_the_trees(tmp_path, splits):
    grow(tmp_path / "a", loss=Loss("neural_ndcg"))
    grow(tmp_path / "b", loss=Loss("neural_ndcg", {"tau": 0.1}))
    a, b = (open_run(tmp_path / name).score(splits["test"]) for name in "ab")
    assert not np.array_equal(a, b)


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
@pytest.mark.parametrize("loss", ["native", "softmax"])
def test_weights_of_queries_decide_what_is_learned(library, loss, tmp_path, splits):
    pytest.importorskip("pyarrow")
    train = splits["train"]
    documents = RankingDataset([[-4.0], [4.0]], [0, 0], [0, 2], [1], feature_names=("a",))
    for heavy, sign in ((0, -1), (1, 1)):  # of odd queries a high feature is good, of even ones a low feature
        (tmp_path / str(heavy)).mkdir()
        for split in ("train", "vali"):  # validation holds the heavy kind alone
            rows = [
                f"{int(y)},{query},{1 + 50 * (query % 2 == heavy)},{int(y) * (1 if query % 2 else -1)}"
                for query, y in zip(np.repeat(np.arange(len(train)), train.lengths), train.labels)
                if split == "train" or query % 2 == heavy
            ]
            (tmp_path / str(heavy) / f"{split}.csv").write_text("\n".join(["label,qid,w,a", *rows]) + "\n")
        data = Data(str(tmp_path / str(heavy)), weight="w")
        once = replace(CONFIG.train, epochs=1, patience=1)
        grow(tmp_path / f"t{heavy}", model=Model(kind=library), loss=Loss(loss), data=data, train=once)
        run = open_run(tmp_path / f"t{heavy}")
        assert run.names == ("a",)
        assert np.sign(np.diff(run.score(documents))) == sign


# --- interruptions ----------------------------------------------------------------------------------------------------


def interrupt(monkeypatch, at, number=signal.SIGINT):
    count = iter(range(1, 1_000))
    whole = growing.fit_trees

    def fit(*arguments):
        if next(count) == at:
            signal.raise_signal(number)
        return whole(*arguments)

    monkeypatch.setattr(growing, "fit_trees", fit)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_grown_and_says_so(splits, tmp_path, monkeypatch, number):
    interrupt(monkeypatch, 4, number)
    seen = []
    with pytest.raises(InterruptedRunError, match=r"after 3 of 8 settings.*finished with the best"):
        seen.extend(grow_run(tmp_path / "t", replace(CONFIG, members=Members(count=8, keep=5))))
    assert len(facts_of(tmp_path / "t")["tried"]) == 3 and read_report(tmp_path / "t")["trees"]["kept"] == 3
    assert np.isfinite(open_run(tmp_path / "t").score(splits["test"])).all()


def test_ctrl_c_before_the_first_trees_leaves_nothing(tmp_path, monkeypatch):
    interrupt(monkeypatch, 1)
    with pytest.raises(InterruptedRunError, match="before the first trees.*nothing was kept"):
        list(grow_run(tmp_path / "t", CONFIG))
    assert not (tmp_path / "t").exists()


def test_a_run_that_was_killed_begins_again(tmp_path):
    events = grow_run(tmp_path / "t", CONFIG)
    next(events)
    events.close()
    assert (tmp_path / "t" / "config.toml").is_file() and not is_finished(tmp_path / "t")
    *_, last = grow_run(tmp_path / "t")
    assert isinstance(last, Finished)
    grow(tmp_path / "whole")
    np.testing.assert_array_equal(
        read_per_query(tmp_path / "t").metrics["map"], read_per_query(tmp_path / "whole").metrics["map"]
    )
    with pytest.raises(ValueError, match="is finished; there is nothing to resume"):
        list(grow_run(tmp_path / "t"))


def test_each_of_the_settings_is_an_event(tmp_path):
    events = list(grow_run(tmp_path / "t", replace(CONFIG, members=Members(count=3, keep=1))))[1:-1]
    assert all(isinstance(event, Grown) for event in events) and [event[:2] for event in events] == [
        (1, 3),
        (2, 3),
        (3, 3),
    ]
    best = -1.0
    for event in events:
        assert event.best == (event.validation > best)
        best = max(best, event.validation)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss": Loss("native:pairwise")},
            "lightgbm has no objective 'native:pairwise'.*native:rank_xendcg.*neural_ndcg",
        ),
        ({"loss": Loss("lamdarank")}, "'lamdarank' is not a loss.*lambdarank"),
        ({"loss": Loss("ordinal")}, "ordinal needs several outputs"),
        ({"loss": Loss("native", {"tau": 1.0})}, "loss.options are for losses of ours"),
        ({"loss": Loss("neural_ndcg", {"taux": 1.0})}, "no option 'taux'"),
        ({"members": Members(count=0)}, "members.count must be a whole number, 1 or above"),
        ({"members": Members(bag=50)}, "40 queries cannot be cut into 50 folds.*--bag"),
        ({"data": Data("nowhere")}, "nowhere does not exist"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_folder(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        grow(tmp_path / "t", **changes)
    assert not (tmp_path / "t").exists()


def test_what_a_library_refuses_is_said_in_a_sentence(tmp_path):
    rows = [f"{(row % 3) / 2},{row // 10},{row % 7}" for row in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(["label,qid,a", *rows]) + "\n")
    with pytest.raises(ValueError, match="lightgbm refused these lists.*int"):
        grow(tmp_path / "t", data=Data(str(tmp_path / "t.csv")))
    assert not (tmp_path / "t").exists()


def test_validation_without_a_relevant_document_cannot_choose(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "data").mkdir()
    for name, labels in (("train", "012"), ("vali", "000")):
        rows = [f"{labels[row % 3]},{row // 6},{row % 5}" for row in range(60)]
        (tmp_path / "data" / f"{name}.csv").write_text("\n".join(["label,qid,a", *rows]) + "\n")
    with pytest.raises(ValueError, match="no validation query.*--bag"):
        grow(tmp_path / "t", data=Data(str(tmp_path / "data")))
    grow(tmp_path / "t", data=Data(str(tmp_path / "data")), members=Members(keep=1, bag=2))


def test_a_damaged_run_is_not_opened(tmp_path):
    grow(tmp_path / "t")
    model = tmp_path / "t" / "model.txt"
    model.write_text(model.read_text().replace("leaf_value=", "leaf_value=9", 1))
    with pytest.raises(ValueError, match=r"model.txt is damaged or was changed.*copy"):
        TreeRun.open(tmp_path / "t")
    model.unlink()
    with pytest.raises(ValueError, match=r"no model\.txt"):
        TreeRun.open(tmp_path / "t")
    (tmp_path / "t" / "trees.json").write_text('{"library": "sklearn"}')
    with pytest.raises(ValueError, match=r"trees.json is damaged"):
        TreeRun.open(tmp_path / "t")


def test_without_the_library_the_line_that_installs_it_is_said(tmp_path, monkeypatch):
    grow(tmp_path / "t")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "lightgbm" else found(name, *rest)
    )
    for attempt in (lambda: TreeRun.open(tmp_path / "t"), lambda: grow(tmp_path / "other")):
        with pytest.raises(ValueError, match=r"lightgbm is not installed.*pip install 'rankgrad\[gbdt\]'"):
            attempt()
    assert not (tmp_path / "other").exists()


def test_catboost_grows_and_scores(tmp_path, splits):
    pytest.importorskip("catboost")
    for loss in ("native", "native:YetiRank"):
        folder = tmp_path / loss.replace(":", "-")
        grow(folder, model=Model(kind="catboost"), loss=Loss(loss), members=Members(count=2, keep=2))
        values = open_run(folder).evaluate(splits["test"])
        np.testing.assert_allclose(read_per_query(folder).metrics["ndcg@10"], values["ndcg@10"])
    with pytest.raises(ValueError, match="catboost has no objective 'neural_ndcg'.*native:QueryRMSE"):
        grow(tmp_path / "own", model=Model(kind="catboost"), loss=Loss("neural_ndcg"))
