"""Categories are known by their texts: whatever frame holds them, in whatever order of levels, they get the same vectors."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from rankgrad import NeuralRanker, load
from rankgrad.data import read_table
from rankgrad.data.categories import code_map, encoded, look_like_numbers, split_frame, text_of
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import RARE, Scaling, fit_scaling
from rankgrad.metrics import ndcg

ROWS = 60
BRANDS = np.array(["acme", "", "Žižka", "3M", "acme "])[np.random.default_rng(0).integers(0, 5, ROWS)]


def columns(seed=0):
    """Numbers, texts (the empty one is missing), truth values, whole numbers that are categories, texts that are numbers."""
    rng = np.random.default_rng(seed)
    brands = [brand or None for brand in BRANDS]
    return {
        "price": rng.standard_normal(ROWS).tolist(),
        "brand": brands,
        "new": [None if n == 7 else n % 3 == 0 for n in range(ROWS)],
        "shop": (np.arange(ROWS) % 4 + 10).tolist(),
    }


def polars_frame(of, kind):
    pl = pytest.importorskip("polars", reason="polars is not installed")
    return pl.DataFrame(of).with_columns(pl.col("shop").cast(pl.String).cast(kind(pl)))


FRAMES = {
    "pandas": lambda c: pd.DataFrame(c).assign(shop=lambda f: f["shop"].astype("category")),
    "pandas, other levels": lambda c: pd.DataFrame(c).assign(
        brand=lambda f: pd.Categorical(f["brand"], ["zzz", "3M", "acme ", "acme", "Žižka"]),
        new=lambda f: f["new"].astype("boolean"),
        shop=lambda f: pd.Categorical(f["shop"], [13, 10, 12, 11]),
    ),
    "pandas of objects": lambda c: pd.DataFrame(c, dtype=object).assign(
        price=c["price"], shop=pd.Series(c["shop"]).astype("category")
    ),
    "polars": lambda c: polars_frame(c, lambda pl: pl.Categorical),
    "polars enums": lambda c: polars_frame(c, lambda pl: pl.Enum(["13", "12", "11", "10"])),
    "pyarrow": lambda c: pa.table(c | {"shop": pa.array(c["shop"]).dictionary_encode()}),
}


def labels_and_ids():
    return np.arange(ROWS) % 4, np.repeat(np.arange(ROWS // 6), 6)


SMALL = {"model": "mlp", "hidden": (8,), "epochs": 3, "batch_size": 4, "random_state": 0, "device": "cpu"}


@pytest.mark.parametrize("name", FRAMES)
def test_every_frame_means_the_same(name):
    y, qid = labels_and_ids()
    expected = NeuralRanker(**SMALL).fit(FRAMES["pandas"](columns()), y, qid=qid)
    scores = expected.predict(FRAMES["pandas"](columns()), qid=qid)
    assert expected.scaling_.levels == {
        1: ("3M", "acme", "acme ", "Žižka"), 2: ("false", "true"), 3: ("10", "11", "12", "13"),
    }  # fmt: skip
    frame = FRAMES[name](columns())
    np.testing.assert_array_equal(expected.predict(frame, qid=qid), scores)
    again = NeuralRanker(**SMALL).fit(frame, y, qid=qid)
    np.testing.assert_array_equal(again.predict(frame, qid=qid), scores)
    ranker = expected.ranker_
    np.testing.assert_allclose(ranker.score(frame, sizes=[6] * 10), scores, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ranker.score(frame[:6]), scores[:6], rtol=1e-5, atol=1e-6)


def test_columns_of_an_array_are_named_by_place(tmp_path):
    y, qid = labels_and_ids()
    numbers = np.stack([np.random.default_rng(1).standard_normal(ROWS), np.arange(ROWS) % 5 + 100.0], 1)
    ranker = NeuralRanker(categorical=[1], **SMALL).fit(numbers, y, qid=qid, eval_set=(numbers, y, qid))
    assert ranker.scaling_.levels == {1: ("100", "101", "102", "103", "104")}
    assert ranker.config_.data.categorical == ("1",)
    scores = ranker.predict(numbers, qid=qid)
    for same in (numbers.astype(np.float32), numbers.tolist(), numbers.astype(object)):
        np.testing.assert_array_equal(ranker.predict(same, qid=qid), scores)
        np.testing.assert_allclose(ranker.ranker_.score(same, sizes=[6] * 10), scores, atol=1e-6)
    assert ranker.score(numbers, y, qid=qid) == ranker.score(numbers.tolist(), y, qid=qid)
    ranker.save(tmp_path / "r.safetensors")
    np.testing.assert_array_equal(NeuralRanker.load(tmp_path / "r.safetensors").predict(numbers, qid=qid), scores)
    frame = pd.DataFrame(numbers, columns=["price", "shop_id"])
    named = NeuralRanker(categorical=["shop*"], **SMALL).fit(frame, y, qid=qid)
    np.testing.assert_array_equal(
        named.predict(frame, qid=qid),
        NeuralRanker(categorical=[1], **SMALL).fit(numbers, y, qid=qid).predict(numbers, qid=qid),
    )


def test_places_are_whole_numbers_of_any_type_and_names_may_look_like_patterns():
    y, qid = labels_and_ids()
    numbers = np.stack([np.random.default_rng(1).standard_normal(ROWS), np.arange(ROWS) % 5 + 100.0], 1)
    for places in (np.array([1]), [np.int64(1)], (1,)):
        assert list(NeuralRanker(categorical=places, **SMALL).fit(numbers, y, qid=qid).scaling_.levels) == [1]
    frame = pd.DataFrame(numbers, columns=["price", "shop[1]"])
    assert list(NeuralRanker(categorical=["shop[1]"], **SMALL).fit(frame, y, qid=qid).scaling_.levels) == [1]


@pytest.mark.parametrize("given", [["shp_id"], ["brand*"], [2], [-1], [True], [None], "shop_id"], ids=str)
def test_categories_that_are_no_column_are_refused(given):
    y, qid = labels_and_ids()
    frame = pd.DataFrame({"price": np.random.default_rng(1).standard_normal(ROWS), "shop_id": np.arange(ROWS) % 5})
    with pytest.raises(ValueError, match="categorical .*expected"):
        NeuralRanker(categorical=given, **SMALL).fit(frame, y, qid=qid)


def test_numbers_with_a_word_among_them_are_no_categories():
    y, qid = labels_and_ids()
    values = [*np.random.default_rng(1).standard_normal(ROWS - 1).tolist(), "unknown"]
    frame = pd.DataFrame({"price": pd.Series(values, dtype=object)})
    with pytest.raises(ValueError, match="column 'price'.*no numbers.*name it in categorical"):
        NeuralRanker(**SMALL).fit(frame, y, qid=qid)
    assert list(NeuralRanker(categorical=["price"], **SMALL).fit(frame, y, qid=qid).scaling_.levels) == [0]


@pytest.mark.parametrize(
    "make", [lambda f: f, lambda f: pytest.importorskip("polars").DataFrame(f), pa.Table.from_pandas]
)
def test_a_ranker_names_the_column_that_is_not_there_or_holds_words(make):
    y, qid = labels_and_ids()
    x = np.random.default_rng(1).standard_normal((ROWS, 2))
    frame = pd.DataFrame({"price": x[:, 0], "shop": BRANDS.astype(object), "clicks": x[:, 1]})
    ranker = NeuralRanker(**SMALL).fit(frame, y, qid=qid).ranker_
    scores = ranker.score(frame)
    np.testing.assert_array_equal(ranker.score(make(frame[["clicks", "shop", "price"]].assign(more=1))), scores)
    for renamed in (frame.drop(columns="clicks"), frame.rename(columns={"clicks": "click"})):
        with pytest.raises(ValueError, match="no column 'clicks'.*expected 'price', 'shop', 'clicks'"):
            ranker.score(make(renamed))
    with pytest.raises(ValueError, match="column 'clicks'.*no numbers"):
        ranker.score(make(frame.assign(clicks="many")))


HOW = {
    "linear": {"model": "linear", "epochs": 2},
    "transformer": {"recipe": "small", "width": 8, "feedforward": 8, "epochs": 2},
    "members": {"members": 2, "hidden": (8,), "epochs": 2},
    "shared": {"members": 2, "share": True, "hidden": (8,), "epochs": 2, "loss": "softmax"},
}


@pytest.mark.filterwarnings("ignore:.* queries are too few")
@pytest.mark.parametrize("how", HOW)
def test_every_model_takes_categories_and_keeps_them(how, tmp_path):
    y, qid = labels_and_ids()
    frame = FRAMES["pandas"](columns())
    ranker = NeuralRanker(random_state=0, device="cpu", **HOW[how]).fit(frame, y, qid=qid)
    scores = ranker.predict(frame, qid=qid)
    assert np.isfinite(scores).all()
    ranker.save(tmp_path / "r.safetensors")
    np.testing.assert_array_equal(NeuralRanker.load(tmp_path / "r.safetensors").predict(frame, qid=qid), scores)
    other = frame.assign(brand=frame["brand"].map(lambda b: "never seen" if b == "acme" else b))
    strange = frame.assign(brand=frame["brand"].map(lambda b: "nor this" if b == "acme" else b))
    unknown = ranker.predict(other, qid=qid)
    assert not np.array_equal(unknown, scores)
    np.testing.assert_array_equal(ranker.predict(strange, qid=qid), unknown)  # all unknown ones are one
    missing = frame.assign(brand=frame["brand"].map(lambda b: None if b == "acme" else b))
    assert not np.array_equal(ranker.predict(missing, qid=qid), unknown)


@pytest.mark.filterwarnings("ignore:.* queries are too few")
@pytest.mark.parametrize("how", HOW)
def test_documents_of_categories_alone_and_no_documents(how):
    y, qid = labels_and_ids()
    frame = FRAMES["pandas"](columns())[["brand", "new"]]
    ranker = NeuralRanker(random_state=0, device="cpu", **HOW[how]).fit(frame, y, qid=qid)
    assert np.isfinite(ranker.predict(frame, qid=qid)).all()
    for none in (ranker.predict(frame[:0], qid=qid[:0]), ranker.ranker_.score(frame[:0])):
        assert none.shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:.* queries are too few")
@pytest.mark.parametrize("how", HOW)
def test_a_gpu_gives_the_same_scores(how):
    y, qid = labels_and_ids()
    frame = FRAMES["pandas"](columns())
    ranker = NeuralRanker(random_state=0, device="cuda", **HOW[how]).fit(
        frame, y, qid=qid
    )  # packed, and by CUDA graphs
    there = ranker.predict(frame, qid=qid)
    here = ranker.set_params(device="cpu").predict(frame, qid=qid)
    np.testing.assert_allclose(there, here, atol=1e-3)


@pytest.mark.slow
def test_a_category_of_many_levels_may_be_all_there_is_to_learn():
    """Beside LightGBM with the dtype `category`, which benchmarks/missing.py measures too."""
    lightgbm = pytest.importorskip("lightgbm", reason="lightgbm is not installed")
    effect = np.random.default_rng(9).standard_normal(200)

    def make(queries, seed):
        rng = np.random.default_rng(seed)
        level, x = rng.integers(0, 200, 10 * queries), rng.standard_normal((10 * queries, 2))
        y = np.digitize(effect[level] + 0.5 * rng.standard_normal(len(level)), [0.3, 1.0, 1.6, 2.2])
        frame = pd.DataFrame(x, columns=["a", "b"])
        frame["brand"] = pd.Categorical([f"b{i}" for i in level], [f"b{i}" for i in range(200)])
        return frame, y, np.repeat(np.arange(queries), 10)

    (frame, y, qid), (vali, vali_y, vali_qid), (test, test_y, test_qid) = make(300, 0), make(100, 1), make(200, 2)
    trees = lightgbm.LGBMRanker(n_estimators=300, learning_rate=0.05, verbose=-1, n_jobs=1).fit(
        frame, y, group=[10] * 300, eval_X=vali, eval_y=vali_y, eval_group=[[10] * 100],
        callbacks=[lightgbm.early_stopping(30, verbose=False)],
    )  # fmt: skip
    ranker = NeuralRanker(members=4, epochs=40, hidden=(32, 32), random_state=0, device="cpu")
    ranker.fit(frame, y, qid=qid, eval_set=(vali, vali_y, vali_qid))
    found, theirs = (
        ndcg(torch.from_numpy(np.asarray(s)).view(200, 10), torch.from_numpy(test_y).view(200, 10), k=10).mean()
        for s in (ranker.predict(test, qid=test_qid), trees.predict(test))
    )
    assert found > theirs - 0.01


# --- texts and codes --------------------------------------------------------------------------------------------------


def test_texts_of_values():
    values = (
        np.float32(2),
        np.int8(-3),
        np.bool_(True),
        np.str_("ü"),
        pd.NA,
        pd.NaT,
        np.float64("nan"),
        1e300,
        0.1,
        b"x",
    )
    assert [text_of(v) for v in values] == ["2", "-3", "true", "ü", None, None, None, str(int(1e300)), "0.1", "b'x'"]
    codes, levels = encoded([])
    assert codes.dtype == np.float32 and len(codes) == 0 and levels == ()


def test_texts_that_are_numbers_stay_numbers():
    frame = pd.DataFrame({"a": ["1.5", "2", "nan", None], "b": ["x", "2XL", "7up", "y"], "c": [1, 2, 3, 4]})
    rest, found = split_frame(frame, None)
    assert list(rest.columns) == ["a", "c"] and list(found) == [1]
    assert not look_like_numbers([]) and look_like_numbers(["0x10"]) and not look_like_numbers(["red"])
    assert list(split_frame(frame, ["a"])[1]) == [0, 1]


def lists(codes, texts, **other):
    features = np.stack([np.arange(len(codes), dtype=np.float32), np.float32(codes)], 1)
    return RankingDataset(features, np.zeros(len(codes)), [0, len(codes)], [1], categories={1: texts}, **other)


@pytest.mark.parametrize("kind", ["auto", "standard", "quantile", "quantile_auto", "none", "symlog"])
def test_rare_levels_are_unknown(kind):
    codes = [0] * RARE + [1] * (RARE - 1) + [2] * RARE + [np.nan, -1]
    scaling = fit_scaling(lists(codes, ("z", "rare", "a", "unused")), kind)
    assert scaling.levels == {1: ("a", "z")} and scaling.codes == {1: 4}
    assert scaling.inputs == 2 and len(scaling.indicators) == 0  # a missing category has a code, and no indicator
    back = Scaling.from_state(scaling.to_state())
    other = lists([0, 1, 2, 3, np.nan, -1, 7, 0.5], ("a", "ä", "z", "rare"))
    for one in (scaling, back):
        assert one.of(other).apply(other.features)[:, 1].tolist() == [0, 2, 1, 2, 3, 2, 2, 0]
        assert one.apply(np.float32([[0, 0], [0, 1], [0, 2]]))[:, 1].tolist() == [0, 1, 2]  # codes of its own levels


def test_a_model_of_numbers_does_not_take_categories_nor_the_other_way_round():
    codes = lists([0, 1, 0, 1, 0, 1], ("a", "b"), feature_names=("n", "brand"))
    numbers = RankingDataset(codes.features, codes.labels, codes.offsets, codes.query_ids, codes.feature_names)
    for fitted, other in ((codes, numbers), (numbers, codes)):
        with pytest.raises(ValueError, match="column 'brand' holds .* trained on .*data.categorical"):
            fit_scaling(fitted, "standard").of(other)


def test_datasets_keep_their_levels(tmp_path):
    data = lists([1, 0, np.nan], ("b", "ü\n"))
    data.save(tmp_path / "saved")
    assert RankingDataset.open(tmp_path / "saved").categories == {1: ("b", "ü\n")} == data.select([0]).categories
    both = RankingDataset.concatenate([data, lists([0, 1, 0], ("c", "b"))])
    assert both.categories == {1: ("b", "ü\n", "c")}
    np.testing.assert_array_equal(both.features[:, 1], np.float32([1, 0, np.nan, 2, 0, 2]))
    plain = RankingDataset([[1.0, 2.0]], [0], [0, 1], [1])
    with pytest.raises(ValueError, match="columns of categories"):
        RankingDataset.concatenate([data, plain])
    for wrong in ({2: ("a",)}, {0: ("a", "a")}, {0: (1,)}):
        with pytest.raises(ValueError, match="categories names column"):
            RankingDataset([[1.0, 2.0]], [0], [0, 1], [1], categories=wrong)


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        (("1", "2.10", "beta"), ("1.0", "2.10", "beta"), [0, 1, 2]),  # as a CSV file and a frame of texts have it
        (("1.0", "2.00"), ("1", "2"), [0, 1]),
        (("1.0", "1"), ("1", "1.0"), [1, 0]),
        (("2.1", "2.10"), ("2.10", "3"), [-1, 0]),  # versions
        (("16777217", "16777217.0"), ("16777216",), [-1, -1]),
        (("0.1", "0.25", "-.3"), ("0.10000000149011612", "0.25", "-0.30000001192092896"), [0, 1, 2]),
        (("0.10000000149011612",), ("0.1",), [0]),
        (("1", "a.0", "1e999", ".5e999"), ("v1.0", "a", "1"), [2, -1, -1, -1]),
    ],
)
def test_a_number_is_a_level_however_it_is_written(source, target, found):
    assert code_map(source, target).tolist() == found


@pytest.mark.parametrize(
    "values", [["1.0", "2.0", "2.10", "beta", "rc"], [0.1, 0.2, 0.3, 1.5]], ids=["texts", "float32"]
)
def test_rows_of_a_frame_are_ranked_alike_from_every_file(values, tmp_path):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"x": draw.standard_normal(200), "kind": np.array(values)[draw.integers(0, len(values), 200)]})
    frame["kind"] = frame["kind"].astype("float32" if isinstance(values[0], float) else "category")
    qid, y = np.repeat(np.arange(20), 10), (frame["kind"].astype(str) == str(values[1])).to_numpy().astype(int)
    ranker = NeuralRanker(model="linear", epochs=20, lr=0.1, categorical=["kind"], random_state=0).fit(
        frame, y, qid=qid
    )
    expected, told = ranker.predict(frame, qid=qid), frame.assign(qid=qid, label=y)
    assert ranker.score(frame, y, qid=qid) > 0.99
    if isinstance(values[0], float):
        wider = frame.assign(kind=np.array(values)[[values.index(round(float(one), 3)) for one in frame["kind"]]])
        np.testing.assert_array_equal(ranker.predict(wider, qid=qid), expected)
    ranker.save(tmp_path / "ranker")
    told.to_csv(tmp_path / "rows.csv", index=False)
    told.to_parquet(tmp_path / "rows.parquet")
    for file in ("rows.csv", "rows.parquet"):
        data = read_table(tmp_path / file, categorical=["kind"])
        np.testing.assert_allclose(load(tmp_path / "ranker").score_lists(data), expected, atol=1e-6)
