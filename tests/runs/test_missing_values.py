"""A missing value means the same through every door: arrays, frames, tables and text; in training and prediction; as before in old runs."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import rankgrad
from rankgrad import NeuralRanker
from rankgrad.cli.rank import rank
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import read_splits
from rankgrad.data.scaling import fit_scaling
from rankgrad.metrics import ndcg
from rankgrad.ranker import Ranker
from rankgrad.runs.compare import evaluate_runs
from rankgrad.runs.ensemble import Ensemble
from rankgrad.runs.folder import read_config, rewrite_config
from rankgrad.runs.run import Run, train_run
from rankgrad.training.build import make_scorer
from rankgrad.training.config import Config, Data, Loss, Members, Model, Train, dumps, loads, replaced
from rankgrad.training.data import columns_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "b0f1ce3"
NAMES = ("bm25", "age", "price")
EPOCHS = 3
CONFIGS = {
    "members": Config(
        model=Model(kind="mlp", hidden=(8,), inputs="list"),
        loss=Loss(("softmax", "query_rmse")),
        members=Members(count=2, keep=2),
        train=Train(epochs=EPOCHS, batch_size=8, device="cpu", threads=1, seed=3),
    ),
    "linear": Config(
        model=Model(kind="linear"), train=Train(epochs=EPOCHS, batch_size=8, device="cpu", threads=1, seed=3)
    ),
}


def documents(queries, seed):
    """Features with missing values, of which the first column's are the labels; labels; query ids."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((6 * queries, 3)).astype(np.float32)
    x[rng.random(x.shape) < 0.3] = np.nan
    x[:, 1] = np.nan_to_num(x[:, 1])  # this one is never missing
    labels = np.where(np.isnan(x[:, 0]), 2, 0) + (rng.random(len(x)) < 0.2)
    return x, labels, np.repeat(np.arange(queries) + 100 * seed, 6)


def write_parquet(path, x, labels, qid):
    columns = {"qid": qid, "label": labels} | {
        name: pa.array(x[:, j], from_pandas=True) for j, name in enumerate(NAMES)
    }
    pq.write_table(pa.table(columns), path)


def write_csv(path, x, labels, qid):
    frame = pd.DataFrame({"qid": qid, "label": labels} | {name: x[:, j] for j, name in enumerate(NAMES)})
    frame.to_csv(path, index=False)


def write_text(path, x, labels, qid):
    """One line names a missing value, the next leaves it out."""
    lines = []
    for number, row in enumerate(x):
        values = [(j, v) for j, v in enumerate(row, 1) if number % 2 or not math.isnan(v)]
        lines.append(f"{labels[number]} qid:{qid[number]} {' '.join(f'{j}:{v!s}' for j, v in values)}")
    path.write_text("\n".join(lines))


WRITERS = {"parquet": write_parquet, "csv": write_csv, "txt": write_text}


@pytest.fixture(scope="module", params=CONFIGS)
def trained(request, tmp_path_factory):
    """A run on the command line's path from each kind of file, and an estimator; all of the same rows and configuration."""
    place, config = tmp_path_factory.mktemp(request.param), CONFIGS[request.param]
    runs = {}
    for ending, write in WRITERS.items():
        (place / ending).mkdir()
        for split, of in {"train": (20, 1), "vali": (5, 2), "test": (5, 3)}.items():
            write(place / ending / f"{split}.{ending}", *documents(*of))
        data = Data(str(place / ending), missing="nan" if ending == "txt" else "zero")
        list(train_run(place / f"run-{ending}", replaced_data(config, data)))
        runs[ending] = place / f"run-{ending}"
    given = {"members": 2, "keep": 2, "hidden": (8,), "inputs": "list"} if request.param == "members" else {}
    ranker = NeuralRanker(
        recipe="paper", model=config.model.kind, loss=config.loss.name, epochs=EPOCHS, batch_size=8, random_state=3, device="cpu",
        **given,
    )  # fmt: skip
    x, labels, qid = documents(20, 1)
    ranker.fit(x, labels, qid=qid, eval_set=documents(5, 2))
    return place, runs, ranker


def replaced_data(config, data):
    return Config(data=data, model=config.model, loss=config.loss, members=config.members, train=config.train)


def test_every_door_trains_and_scores_the_same(trained):
    place, runs, ranker = trained
    x, _, qid = documents(5, 3)
    expected = ranker.predict(x, qid=qid)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 10
    frame = pd.DataFrame(x, columns=NAMES)
    for given in (frame, frame.convert_dtypes(), pl.DataFrame(frame).fill_nan(None), x.astype(np.float64)):
        with pytest.warns(UserWarning, match="feature names") if hasattr(given, "columns") else _quiet():
            np.testing.assert_allclose(ranker.predict(given, qid=qid), expected, atol=1e-6)
    assert ranker.scaling_.indicators.tolist() == [0, 2] and ranker.scaling_.inputs == 5
    for ending, folder in runs.items():
        run = Run.open(folder, "cpu")
        assert run.names == (None if ending == "txt" else NAMES) and run.features == 3
        np.testing.assert_allclose(run.score(run.read(str(place / ending))), expected, atol=1e-6)
        file = str(place / ending / f"test.{ending}")
        np.testing.assert_allclose(run.score(run.read(file)), expected, atol=1e-6)
        loaded = rankgrad.load(folder, "cpu")
        np.testing.assert_allclose(loaded.score(x, sizes=[6] * 5), expected, atol=1e-6)
        np.testing.assert_allclose(loaded.score(x[:6]), expected[:6], atol=1e-6)


def test_one_ranker_reads_every_kind_of_file(trained, tmp_path):
    """Text is read as the run's lists were, unless it is said how it is written."""
    place, runs, ranker = trained
    x, _, qid = documents(5, 3)
    ranker.save(tmp_path / "r.safetensors")
    expected = ranker.predict(x, qid=qid)
    text = str(place / "txt" / "test.txt")
    for source in (tmp_path / "r.safetensors", runs["parquet"], runs["csv"]):
        rank([source], text, str(tmp_path / "scores.txt"), settings=["data.missing=nan"], overwrite=True)
        np.testing.assert_allclose(np.loadtxt(tmp_path / "scores.txt"), expected, atol=1e-6)
        with pytest.raises(ValueError, match=r"nan.*--set data.missing"):
            rank([source], text, str(tmp_path / "scores.txt"), overwrite=True)
        found = [evaluate_runs([source], text, "test", ["ndcg@5"], settings=["data.missing=nan"])]
        found.append(evaluate_runs([runs["txt"]], text, "test", ["ndcg@5"]))
        assert len({str(one["metrics"]) for one in found}) == 1
    one = Run.open(runs["parquet"], "cpu")
    for wrong in ("data.missing=none", "data.ignore=['age']", "train.epochs=3"):
        with pytest.raises(ValueError, match=r"data.missing must be one of|is not about how lists are read"):
            one.read(text, settings=[wrong])


class _quiet:  # noqa: N801
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_a_ranker_is_saved_with_its_indicators(trained, tmp_path):
    _, _, ranker = trained
    x, _, qid = documents(5, 3)
    ranker.save(tmp_path / "r.safetensors")
    again = NeuralRanker.load(tmp_path / "r.safetensors")
    assert again.n_features_in_ == 3
    assert (again.predict(x, qid=qid) == ranker.predict(x, qid=qid)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"members": 4, "epochs": 20, "hidden": (32, 32)}, {"model": "linear", "epochs": 60, "lr": 0.1}]
)
def test_what_is_missing_may_be_all_there_is_to_learn(how):
    """Where LightGBM has 1.00 (benchmarks/missing.py runs it beside the defaults)."""
    parts = []
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        x, gone = rng.standard_normal((800, 4)), rng.random((800, 4)) < 0.4
        parts.append((np.where(gone, np.nan, x), 2 * gone[:, 0] + gone[:, 1], np.repeat(np.arange(80), 10)))
    (x, y, qid), (later, labels, _) = parts
    ranker = NeuralRanker(random_state=0, device="cpu", **how).fit(x, y, qid=qid)
    scores = torch.from_numpy(ranker.predict(later, qid=qid)).view(80, 10)
    assert ndcg(scores, torch.from_numpy(labels).view(80, 10), k=10).mean() > 0.98


# --- what was trained before there were indicators --------------------------------------------------------------------


def test_empty_cells_stay_zero_for_runs_that_learned_so(trained, tmp_path):
    """An earlier run says nothing of what is missing: its readers gave 0, and its scaling has no indicators."""
    place, _, _ = trained
    x, labels, _ = documents(20, 1)
    data = RankingDataset(np.nan_to_num(x), labels, np.arange(0, 121, 6), np.arange(20), feature_names=NAMES)
    config = loads(dumps(Config(model=Model(kind="linear"))).replace('missing = "zero"\n', ""), of_run=True)
    assert config.data.missing == "all_zero"
    scaling = fit_scaling(data, "standard")
    ranker = Ranker.of(make_scorer(config, scaling.inputs, 1, tanh=True), scaling, config, data, torch.device("cpu"))
    (tmp_path / "old").mkdir()
    ranker.save(tmp_path / "old" / "model.safetensors")
    text = dumps(config).replace('missing = "all_zero"\n', "")
    (tmp_path / "old" / "config.toml").write_text(text)
    run = Run.open(tmp_path / "old", "cpu")
    later, *_ = documents(5, 3)
    expected = ranker.score(np.nan_to_num(later), sizes=[6] * 5)
    assert not np.allclose(expected, ranker.score(later, sizes=[6] * 5))  # there NaN is the mean, as it was
    for ending in ("parquet", "csv"):
        np.testing.assert_array_equal(run.score(run.read(str(place / ending))), expected)
    assert rankgrad.load(tmp_path / "old").config.data.missing == "all_zero"
    assert loads(dumps(run.config), of_run=True) == run.config and loads(text).data.missing == "zero"


@pytest.mark.filterwarnings("ignore:.*train.compile no longer exists")
def test_empty_cells_are_missing_to_an_estimator_of_any_age(tmp_path):
    """NaN was its mean then, as it is to `predict`; that readers of tables gave 0 it has never seen."""
    file = FIXTURE / "ranker.safetensors"
    ranker = NeuralRanker.load(file)
    x = np.random.default_rng(0).standard_normal((12, ranker.n_features_in_)).astype(np.float32)
    x[::2, :2] = np.nan
    qid = np.repeat([1, 2], 6)
    names = getattr(ranker, "feature_names_in_", [f"f{number}" for number in range(x.shape[1])])
    frame = pd.DataFrame(x, columns=names)
    expected = ranker.predict(frame if hasattr(ranker, "feature_names_in_") else x, qid=qid)
    run = Run.open(file, "cpu")
    for ending in ("csv", "parquet"):
        getattr(frame.assign(qid=qid), f"to_{ending}")(tmp_path / f"lists.{ending}", index=False)
        lists = run.read(str(tmp_path / f"lists.{ending}"), labelled=False)
        np.testing.assert_allclose(run.score(lists), expected, rtol=1e-5, atol=1e-6)


def test_truth_values_stay_numbers_for_runs_that_learned_so(tmp_path):
    table = pa.table({"qid": [1, 1], "label": [0, 1], "new": [True, False]})
    pq.write_table(table, tmp_path / "train.parquet")
    for missing, levels in (("all_zero", {}), ("zero", {0: ("false", "true")})):
        data = read_splits(str(tmp_path / "train.parquet"), columns=columns_of(Data(missing=missing)))["train"]
        assert data.categories == levels and data.features.tolist() == [[1], [0]]


def test_runs_of_two_meanings_do_not_rank_missing_values_together(trained, tmp_path):
    place, runs, _ = trained
    folders = []
    for number, missing in enumerate(("all_zero", "zero")):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in runs["parquet"].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        rewrite_config(folder, replaced(read_config(folder), "data.missing", missing))
        folders.append(folder)
    for both in (folders, folders[::-1]):
        with pytest.raises(ValueError, match="missing values.*rank with one of them"):
            Ensemble.open(both).read(str(place / "parquet"))
    whole, *_ = documents(5, 3)
    write_parquet(tmp_path / "whole.parquet", np.nan_to_num(whole), np.zeros(30, int), np.repeat(np.arange(5), 6))
    assert len(Ensemble.open(folders).read(str(tmp_path / "whole.parquet"))) == 5


# --- infinity ---------------------------------------------------------------------------------------------------------


def test_infinity_is_refused_by_row_and_column(trained):
    _, _, ranker = trained
    x, labels, qid = documents(5, 3)
    for bad in (np.inf, -np.inf):
        x[4, 2] = bad
        for call in (
            lambda: ranker.predict(x, qid=qid),
            lambda: ranker.score(x, labels, qid=qid),
            lambda: ranker.ranker_.score(x),
            lambda: ranker.ranker_.score(x.tolist()),
            lambda: NeuralRanker().fit(x, labels, qid=qid),
        ):
            with pytest.raises(ValueError, match=r"row 4, column 2 .*inf"):
                call()
    with pytest.raises(ValueError, match=r"row 4, column 'price' .*inf"):
        NeuralRanker().fit(pd.DataFrame(x, columns=NAMES), labels, qid=qid)
    x[4, 2] = np.nan
    huge = x.astype(np.float64)
    huge[4, 2] = 1.797e308  # as Istella writes it: clamped
    assert np.isfinite(ranker.ranker_.score(huge)).all() and np.isfinite(ranker.predict(huge, qid=qid)).all()
