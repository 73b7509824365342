"""Sparse features score as dense ones do, and are never dense as a whole."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sparse

from rankgrad import NeuralRanker
from rankgrad.data import read_svmlight
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.data.load import read_splits
from rankgrad.data.scaling import KINDS, fit_scaling
from rankgrad.data.sparse import SparseRows
from rankgrad.runs.run import Run, train_run
from rankgrad.training.config import Config, Data, Loss, Model, Train
from rankgrad.training.data import scaled

FORMATS = {
    "csr": sparse.csr_array,
    "csr matrix": sparse.csr_matrix,
    "csc": sparse.csc_array,
    "coo": sparse.coo_array,
    "lil": sparse.lil_matrix,
}
SMALL = {"epochs": 2, "batch_size": 4, "random_state": 0, "device": "cpu"}
HOW = {
    "linear": {"model": "linear"},
    "members": {"members": 2, "hidden": (4,)},
    "transformer": {"width": 8, "feedforward": 8, "layers": 1},
}


def documents(rows=60, columns=30, seed=0):
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((rows, columns)) < 0.1, rng.standard_normal((rows, columns)) * 100, 0.0)
    x[3, 4] = x[7, 4] = x[50, 9] = np.nan
    x[:, 5] = 0  # constant
    x[2] = 0  # a document without entries
    return x.astype(np.float32), rng.integers(0, 3, rows), np.repeat(np.arange(rows // 6), 6)


@pytest.mark.filterwarnings("ignore:.* queries are too few")
@pytest.mark.parametrize("how", HOW)
def test_estimators_take_them_as_dense_ones(how):
    x, y, qid = documents()
    shuffled = np.random.default_rng(1).permutation(len(x))
    x, y, qid = x[shuffled], y[shuffled], qid[shuffled]
    dense = NeuralRanker(**HOW[how], **SMALL).fit(x, y, qid=qid, eval_set=(x, y, qid))
    expected = dense.predict(x, qid=qid)
    for name in FORMATS if how == "linear" else ("csr",):
        matrix = FORMATS[name](x)
        np.testing.assert_allclose(dense.predict(matrix, qid=qid), expected, atol=1e-6)
        again = NeuralRanker(**HOW[how], **SMALL).fit(matrix, y, qid=qid, eval_set=(matrix, y, qid))
        np.testing.assert_allclose(again.predict(matrix, qid=qid), expected, atol=1e-5)
        assert again.score(matrix, y, qid=qid) == pytest.approx(dense.score(x, y, qid=qid), abs=1e-6)
        ranker = dense.ranker_
        np.testing.assert_allclose(
            ranker.score(matrix[:10]) if hasattr(matrix, "indptr") else ranker.score(x[:10]),
            ranker.score(x[:10]),
            atol=1e-6,
        )
        np.testing.assert_allclose(ranker.score(matrix, sizes=[20, 40]), ranker.score(x, sizes=[20, 40]), atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "web30k"])
@pytest.mark.parametrize("missing", [0.0, np.nan])
def test_scaling_is_the_same_to_the_bit(kind, missing):
    x, y, _ = documents()
    x = np.where(x == 0, missing, x).astype(np.float32)
    given = ~np.isnan(x) if np.isnan(missing) else x != 0
    starts = np.concatenate([[0], np.cumsum(given.sum(1))])
    rows = SparseRows(starts, np.nonzero(given)[1], x[given], 30, missing)
    lists = np.arange(0, 61, 6), np.arange(10)
    dense, thin = RankingDataset(x, y, *lists), RankingDataset(FeatureRows([rows]), y, *lists)
    np.testing.assert_array_equal(thin.features[:], x)
    scaling = fit_scaling(dense, kind)
    found, expected = fit_scaling(thin, kind).to_state(), scaling.to_state()
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    of = scaled(thin, scaling)
    assert isinstance(of.features, FeatureRows) and of.features.shape == (60, scaling.inputs)
    whole = scaling.apply(x)
    np.testing.assert_array_equal(np.asarray(of.features), whole)
    np.testing.assert_array_equal(of.select([4, 1]).features[:], whole[[*range(24, 30), *range(6, 12)]])
    np.testing.assert_array_equal(of.features[np.array([], int)], whole[:0])


def test_statistics_of_many_blocks_agree(monkeypatch):
    x, y, _ = documents(rows=600, columns=50, seed=2)
    lists = np.arange(0, 601, 6), np.arange(100)
    monkeypatch.setattr("rankgrad.data.scaling.WIDE_BLOCK", 1000)  # 20 rows, or 1 column of the sample
    for kind in ("auto", "quantile", "standard"):
        thin = fit_scaling(RankingDataset(sparse.csr_array(x), y, *lists), kind)
        dense = fit_scaling(RankingDataset(x, y, *lists), kind)
        np.testing.assert_allclose(thin.apply(x), dense.apply(x), atol=1e-5)


def test_datasets_of_sparse_features(tmp_path):
    x, y, _ = documents()
    data = RankingDataset(sparse.coo_array(x), y, np.arange(0, 61, 6), np.arange(10))
    data.save(tmp_path / "saved")
    np.testing.assert_array_equal(RankingDataset.open(tmp_path / "saved").features, x)
    both = RankingDataset.concatenate([data, data.select([3])])
    np.testing.assert_array_equal(np.asarray(both.features), np.concatenate([x, x[18:24]]))
    twice = sparse.coo_array((np.float32([1, 2]), ([0, 0], [1, 1])), shape=(1, 3))
    assert RankingDataset(twice, [0], [0, 1], [1]).features[:].tolist() == [[0, 3, 0]]


def test_infinity_and_wrong_shapes_are_refused():
    x, y, qid = documents()
    ranker = NeuralRanker(model="linear", **SMALL).fit(x, y, qid=qid)
    x[8, 7] = np.inf
    for call in (
        lambda: ranker.predict(sparse.csr_array(x), qid=qid),
        lambda: ranker.ranker_.score(sparse.csc_array(x)),
        lambda: NeuralRanker().fit(sparse.csr_array(x), y, qid=qid),
    ):
        with pytest.raises(ValueError, match="infinity at row 8, column 7"):
            call()
    with pytest.raises(ValueError, match=r"\(60, 29\)"):
        ranker.ranker_.score(sparse.csr_array(x[:, 1:]))
    with pytest.raises(ValueError, match="sparse.*categories"):
        NeuralRanker(categorical=[1]).fit(sparse.csr_array(x), y, qid=qid)
    huge = sparse.csr_array(np.float64([[1.797e308] * 30]))
    assert np.isfinite(ranker.ranker_.score(huge)).all()


RANK = Path(__file__).resolve().parents[3] / "shared" / "data" / "lightgbm-rank"


@pytest.mark.skipif(not RANK.is_dir(), reason="LightGBM's rank example is not here")
def test_the_rank_example_of_lightgbm():
    data = read_svmlight(RANK / "rank.train.gz", groups=RANK / "rank.train.query", features=300)
    test = read_svmlight(RANK / "rank.test.gz", groups=RANK / "rank.test.query", features=300)
    qid, later = (np.repeat(one.query_ids, one.lengths) for one in (data, test))
    how = {"members": 2, "hidden": (8,), "epochs": 2, "random_state": 0, "device": "cpu"}
    dense = NeuralRanker(**how).fit(data.features, data.labels, qid=qid)
    thin = NeuralRanker(**how).fit(sparse.csr_array(data.features), data.labels, qid=qid)
    expected = dense.predict(test.features, qid=later)
    np.testing.assert_allclose(dense.predict(sparse.csr_array(test.features), qid=later), expected, atol=1e-6)
    np.testing.assert_allclose(thin.predict(sparse.csr_array(test.features), qid=later), expected, atol=1e-5)


CHILD = """
import threading, time
import numpy as np
import scipy.sparse as sparse
from rankgrad import NeuralRanker

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

rows, columns, filled = 5_000, 20_000, 100
rng = np.random.default_rng(0)
apart = columns // filled  # scipy's own random matrix would shuffle the numbers of all cells, for seconds
places = apart * np.arange(filled) + rng.integers(0, apart, (rows, filled))
values = rng.random(places.size, np.float32)
x = sparse.csr_matrix((values, places.ravel(), np.arange(0, places.size + 1, filled)), shape=(rows, columns))
y = rng.integers(0, 3, rows)
NeuralRanker(model="linear", epochs=1, device="cpu").fit(x[:20, :50], y[:20], qid=np.repeat(np.arange(5), 4))  # loads all there is to load
before, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
how = dict(model="linear", scaling="standard", epochs=1, batch_size=16, random_state=0, device="cpu")
ranker = NeuralRanker(**how).fit(x, y, qid=np.repeat(np.arange(500), 10))
ranker.predict(x, qid=np.repeat(np.arange(500), 10))
done = True
watcher.join()
print((peak - before) / (4 * rows * columns))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_wide_features_are_never_dense_as_a_whole():
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert float(child.stdout.splitlines()[-1]) < 0.5  # of what a dense copy takes


def wide_text(path, rows=60, columns=3_000, seed=0, zero_based=False):
    """Lines of ten features each, in lists of six that are not all together; and the features."""
    rng = np.random.default_rng(seed)
    x = np.zeros((rows, columns), np.float32)
    lines = []
    for row in range(rows):
        chosen = np.sort(rng.choice(columns, 10, replace=False))
        chosen[-1] = columns - 1
        x[row, chosen] = rng.integers(1, 100, 10) / 4
        entries = " ".join(f"{column + (not zero_based)}:{x[row, column]}" for column in chosen)
        lines.append(f"{row % 3} qid:{(row // 6) % 9} {entries}")
    path.write_text("\n".join(lines))
    return x


@pytest.mark.parametrize("missing", [0.0, np.nan])
@pytest.mark.parametrize("zero_based", [False, True])
def test_wide_text_stays_sparse_where_that_is_asked_for(missing, zero_based, tmp_path):
    x = wide_text(tmp_path / "wide.txt", zero_based=zero_based)
    options = {"missing": missing, "zero_based": zero_based, "features": 3_000}
    dense = read_svmlight(tmp_path / "wide.txt", **options)
    thin = read_svmlight(tmp_path / "wide.txt", sparse=True, **options)
    assert isinstance(dense.features, np.ndarray) and thin.features.sparse
    np.testing.assert_array_equal(thin.features[:], dense.features)
    np.testing.assert_array_equal(np.nan_to_num(thin.in_source_order(np.asarray(thin.features))), x)
    assert thin.rows.tolist() == dense.rows.tolist() and thin.provenance == dense.provenance
    assert read_svmlight(tmp_path / "wide.txt", sparse=True, **options | {"features": 1_000_000}).features.sparse
    (tmp_path / "full.txt").write_text("1 qid:1 " + " ".join(f"{i}:1" for i in range(1, 2_000)) + "\n")
    assert isinstance(read_svmlight(tmp_path / "full.txt", sparse=True).features, np.ndarray)


SIZES = {"train": 3_000, "vali": 2_900, "test": 2_950}


def test_a_run_on_wide_text_scores_as_one_on_the_same_features(tmp_path):
    (tmp_path / "text").mkdir()
    parts = {
        name: wide_text(tmp_path / "text" / f"{name}.txt", columns=width, seed=width) for name, width in SIZES.items()
    }
    splits = read_splits(str(tmp_path / "text"))
    assert all(split.features.sparse and split.features.shape[1] == 3_000 for split in splits.values())
    for name, split in splits.items():
        padded = np.pad(parts[name], ((0, 0), (0, 3_000 - parts[name].shape[1])))
        np.testing.assert_array_equal(split.in_source_order(np.asarray(split.features)), padded)
        dense = dataclasses.replace(split, features=np.asarray(split.features))
        dense.save(tmp_path / "dense" / name)
    scores = []
    for folder in ("text", "dense"):
        config = Config(
            data=Data(str(tmp_path / folder), scaling="standard"),
            model=Model(kind="mlp", hidden=(4,)),
            loss=Loss("softmax"),
            train=Train(epochs=2, batch_size=4, device="cpu", threads=1),
        )
        list(train_run(tmp_path / f"run-{folder}", config))
        run = Run.open(tmp_path / f"run-{folder}", "cpu")
        scores.append([run.score(run.read(str(tmp_path / source))) for source in ("text", "dense")])
    for found in scores:
        np.testing.assert_allclose(found, [scores[0][0]] * 2, atol=1e-5)
