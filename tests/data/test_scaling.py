import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.data.scaling import BLOCK, KINDS, SAMPLE, Scaling, fit_scaling
from rankgrad.data.synthetic import synthetic

GENERAL = tuple(kind for kind in KINDS if kind != "web30k")


def dataset(features):
    features = np.asarray(features, np.float32)
    return RankingDataset(features, np.zeros(len(features)), [0, len(features)], [1])


@pytest.fixture(scope="module")
def train():
    return synthetic("tiny")


@pytest.fixture(scope="module")
def test():
    return synthetic("tiny", "test")


def test_web30k_is_the_papers_transform():
    rng = np.random.default_rng(3)
    train, test = (dataset(rng.exponential(5, (60, 136))) for _ in range(2))
    for data in (train, test):
        data.features[:, 110:125] *= -1  # language models
        data.features[:, 20:23] -= 5  # negative somewhere
        data.features[:, 44] = 3  # constant
    negated = [*range(110, 121), 123, 124]
    linear = {5, 6, 7, 8, 9, 15, 19, 57, 58, 62, 75, 79, 85, *range(95, 105), 121, 122, 127, 129, 130}
    fit, new = train.features.astype(np.float64), test.features.astype(np.float64)
    for x in (fit, new):
        x[:, negated] *= -1
    expected = np.zeros_like(new)
    logged = 0
    for j in range(136):
        a, b = fit[:, j], new[:, j]
        if j not in linear and not (a < 0).any():
            a, b = np.log(np.maximum(a, 0) + 0.01), np.log(np.maximum(b, 0) + 0.01)
            logged += 1
        if a.std() > 0:
            expected[:, j] = (b - a.mean()) / (a.std() + 1e-6)
    assert logged == 136 - len(linear) - 3
    np.testing.assert_allclose(fit_scaling(train, "web30k").apply(test.features), expected, rtol=1e-5, atol=1e-6)


def test_web30k_cuts_negative_values_that_train_did_not_have(train):
    row = train.features[:1].copy()
    row[0, 0] = -5.0
    zero = row.copy()
    zero[0, 0] = 0.0
    scaling = fit_scaling(train, "web30k")
    assert (scaling.apply(row) == scaling.apply(zero)).all()


@pytest.mark.parametrize(
    ("kind", "curve"), [("standard", lambda x: x), ("symlog", lambda x: np.sign(x) * np.log1p(abs(x)))]
)
def test_standardised_kinds(kind, curve, train, test):
    fit, new = curve(train.features.astype(np.float64)), curve(test.features.astype(np.float64))
    varies = np.ptp(fit, axis=0) > 0
    expected = np.where(varies, (new - fit.mean(0)) / np.where(varies, fit.std(0), 1), 0)
    np.testing.assert_allclose(fit_scaling(train, kind).apply(test.features), expected, rtol=1e-4, atol=1e-6)


def test_none_changes_nothing(train):
    assert (fit_scaling(train, "none").apply(train.features) == train.features).all()


def test_auto_takes_logarithms_of_heavy_tails_only():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((4000, 4))
    x = normal.copy()
    x[:, 0] = 1e-5 * np.exp(2 * normal[:, 0])  # heavy, positive, tiny unit
    x[:, 1] = np.floor(np.exp(2 * normal[:, 1]))  # counts with zeros
    x[:, 2] = np.sinh(3 * normal[:, 2])  # heavy on both sides
    x[:, 3] = 5 + normal[:, 3]
    y = fit_scaling(dataset(x), "auto").apply(x)
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(y.std(0), 1, atol=1e-3)
    assert ((y**4).mean(0) < 8).all()  # the raw columns have hundreds
    np.testing.assert_allclose(y[:, 3], (x[:, 3] - x[:, 3].mean()) / x[:, 3].std(), atol=1e-4)
    for column in range(4):
        order = np.argsort(x[:, column])
        assert (np.diff(y[order, column]) >= 0).all()


def test_auto_cuts_what_train_never_came_near():
    x = np.random.default_rng(0).standard_normal((100, 1))
    assert fit_scaling(dataset(x), "auto").apply(np.array([[1e9], [-1e9]])).tolist() == [[10.0], [-10.0]]


def test_quantile_gives_normal_scores_of_mid_ranks():
    rng = np.random.default_rng(1)
    x = np.stack([np.exp(5 * rng.standard_normal(5000)), rng.integers(0, 2, 5000)], axis=1)
    scaling = fit_scaling(dataset(x), "quantile")
    y = scaling.apply(x.astype(np.float32))
    order = np.argsort(x[:, 0])
    assert (np.diff(y[order, 0]) >= 0).all()
    assert abs(y[:, 0].mean()) < 0.01
    assert abs(y[:, 0].std() - 1) < 0.02
    for value, quarter in ((0, -0.674), (1, 0.674)):  # half of the values tie at each end
        assert abs(y[x[:, 1] == value, 1][0] - quarter) < 0.05
    between = scaling.apply(np.array([[1.0, 0.5], [1.0, -3.0], [1.0, 9.0]]))[:, 1]
    assert between[1] < between[0] < between[2]
    assert abs(between[0]) < 0.05


@pytest.mark.parametrize("kind", GENERAL)
def test_missing_constant_and_absurd_values_survive(kind):
    x = np.array(
        [
            [1.0, 5.0, np.nan, 1.0, 0.0, 3.4028235e38],
            [2.0, 5.0, np.nan, 3.4028235e38, np.nan, 3.4028235e38],
            [np.nan, 5.0, np.nan, 2.0, 0.0, 3.4028235e38],
            [4.0, 5.0, np.nan, 3.0, np.nan, 3.4028235e38],
        ],
        np.float32,
    )
    y = fit_scaling(dataset(x), kind).apply(x)
    assert np.isfinite(y).all()
    assert (y[:, :6][np.isnan(x)] == 0).all()
    assert (y[:, 6:] == np.isnan(x[:, [0, 2, 4]])).all()  # indicators of the columns with missing values
    if kind != "none":
        assert (y[:, [1, 2, 4, 5]] == 0).all()
        assert y[1, 3] == y[3, 3] == y[:, 3].max()  # absurd is as large as the largest ordinary value
        assert abs(y[:, 3]).max() < 10
        later = np.array([[9.0, 7.0, 1.0, -np.inf, 8.0, 1.0], [9.0, np.inf, 1.0, np.inf, 8.0, 1.0]])
        z = fit_scaling(dataset(x), kind).apply(later)
        assert np.isfinite(z).all()
        assert (z[:, [1, 2, 4, 5]] == 0).all()


@pytest.mark.parametrize("kind", GENERAL)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_value_gives_a_finite_number(kind, data):
    shape = st.tuples(st.integers(1, 8), st.just(3))
    values = st.floats(width=32)  # every float32: infinities, NaN, subnormals
    x = data.draw(hnp.arrays(np.float32, shape, elements=values))
    y = data.draw(hnp.arrays(np.float32, shape, elements=values))
    scaling = fit_scaling(dataset(x), kind)
    for features in (x, y):
        scaled = scaling.apply(features)
        assert scaled.dtype == np.float32
        assert np.isfinite(scaled).all()
        assert (scaled[:, :3][np.isnan(features)] == 0).all()
        assert (scaled[:, 3:] == np.isnan(features)[:, np.isnan(x).any(0)]).all()


@pytest.mark.parametrize("kind", GENERAL)
def test_indicators_follow_where_training_missed_values(kind):
    x = np.random.default_rng(3).standard_normal((3 * BLOCK, 3)).astype(np.float32)
    plain = fit_scaling(dataset(x), kind)
    assert plain.inputs == plain.columns == 3 and "indicators" not in plain.to_state()
    x[-1, 1] = np.nan  # in the last block
    scaling = fit_scaling(dataset(x), kind)
    assert (scaling.columns, scaling.inputs, scaling.indicators.tolist()) == (3, 4, [1])
    later = np.float32([[np.nan, 0, 0], [0, np.nan, 0], [np.nan] * 3, [0, 0, 0]])
    back = Scaling.from_state(scaling.to_state())
    for one in (scaling, back):
        assert one.apply(later)[:, 3].tolist() == [0, 1, 1, 0]
        assert (one.apply(later)[np.isnan(np.pad(later, ((0, 0), (0, 1))))] == 0).all()
    assert scaling.apply(later[:0]).shape == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_scaled_the_same_alone_and_in_any_batch(kind, train, test):
    scaling = fit_scaling(train, kind)
    together = scaling.apply(test.features)
    for rows in (slice(0, 1), slice(3, 10), slice(None, None, 7)):
        assert (scaling.apply(test.features[rows]) == together[rows]).all()
    assert scaling.apply(test.features[:0]).shape == (0, 136)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_gives_the_same_scaling_back(kind, train, test, tmp_path):
    scaling = fit_scaling(train, kind)
    np.savez(tmp_path / "state.npz", **scaling.to_state())
    back = Scaling.from_state(dict(np.load(tmp_path / "state.npz", allow_pickle=False)))
    assert back.kind == ("quantile" if kind == "quantile_auto" else kind)
    assert back.apply(test.features).tobytes() == scaling.apply(test.features).tobytes()


def test_the_state_fits_into_safetensors(train):
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    scaling = fit_scaling(train, "quantile")
    back = Scaling.from_state(safetensors.load(safetensors.save(scaling.to_state())))
    assert back.apply(train.features).tobytes() == scaling.apply(train.features).tobytes()


@pytest.mark.parametrize("kind", GENERAL)
def test_statistics_merge_over_blocks(kind):
    rng = np.random.default_rng(2)
    x = (1000 + rng.standard_normal((2 * BLOCK + 5, 2))).astype(np.float32)
    x[BLOCK : 2 * BLOCK, 1] = np.nan  # a block without a value
    x[0, 0] = 2000  # the extremes lie in the first block
    scaling = fit_scaling(dataset(x), kind)
    shuffled = fit_scaling(dataset(rng.permutation(x)), kind)
    assert (
        scaling.apply(np.array([[np.inf, 1.0]])) == scaling.apply(np.array([[2000.0, 1.0]]))
    ).all() or kind == "none"
    tolerance = 0.1 if kind == "quantile" else 1e-5
    np.testing.assert_allclose(scaling.apply(x), shuffled.apply(x), atol=tolerance)
    if kind == "standard":
        expected = (x - np.nanmean(x, 0, np.float64)) / np.nanstd(x, 0, np.float64)
        np.testing.assert_allclose(scaling.apply(x)[:, :2], np.nan_to_num(expected), atol=1e-4)


def test_quantiles_of_long_data_come_from_a_sample_over_all_of_it():
    x = np.linspace(0, 1, 2 * SAMPLE, dtype=np.float32)[:, None]
    y = fit_scaling(dataset(x), "quantile").apply(np.array([[0.25], [0.5], [0.75]]))
    np.testing.assert_allclose(y[:, 0], [-0.6745, 0, 0.6745], atol=1e-3)


def test_fitting_reads_a_read_only_map_and_leaves_it_alone(train, tmp_path):
    np.save(tmp_path / "x.npy", train.features)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = RankingDataset(mapped, train.labels, train.offsets, train.query_ids)
    for kind in KINDS:
        fit_scaling(data, kind).apply(mapped)
    assert (np.load(tmp_path / "x.npy") == train.features).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 135), r"shape \[2, 135\]; expected \[documents, 136\]"), ((136,), r"shape \[136\]; expected")],
)
def test_another_width_is_refused(shape, message, train):
    with pytest.raises(ValueError, match=message):
        fit_scaling(train, "auto").apply(np.zeros(shape, np.float32))


def test_bad_kinds_and_states_are_named(train):
    with pytest.raises(ValueError, match="'log'.* auto, web30k, symlog"):
        fit_scaling(train, "log")
    with pytest.raises(ValueError, match="136 .* 1; .*'auto'"):
        fit_scaling(dataset([[1.0]]), "web30k")
    state = fit_scaling(train, "auto").to_state()
    for broken in ({}, {**state, "kind": np.frombuffer(b"magic", np.uint8)}, {"kind": state["kind"]}):
        with pytest.raises(ValueError, match="to_state"):
            Scaling.from_state(broken)


@pytest.mark.parametrize(
    ("kind", "name", "spoil"),
    [
        ("auto", "mean", lambda a: a[:5]),
        ("auto", "low", lambda a: a[None]),
        ("standard", "high", lambda a: a[:-1]),
        ("none", "factor", lambda a: a.astype(str)),
        ("quantile", "starts", lambda a: a[:-1]),
        ("quantile", "starts", lambda a: a[::-1].copy()),
        ("quantile", "starts", lambda a: a.astype(float)),
        ("quantile", "nodes", lambda a: a[:-1]),
        ("quantile", "scores", lambda a: np.append(a, 0)),
    ],
)
def test_states_of_other_shapes_are_refused(kind, name, spoil, train):
    state = fit_scaling(train, kind).to_state()
    with pytest.raises(ValueError, match=r"state's \w+ is .* 13\d columns"):
        Scaling.from_state({**state, name: spoil(state[name])})
    with pytest.raises(ValueError, match="to_state"):
        Scaling.from_state({**state, "kind": state["kind"].astype(float)})


@pytest.mark.parametrize("of", [[136], [-1], [3, 3], [5, 2], [[1]], [0.5], []])
def test_indicators_of_no_columns_are_refused(of, train):
    state = fit_scaling(train, "auto").to_state()
    assert Scaling.from_state({**state, "indicators": np.array([0, 135])}).inputs == 138
    with pytest.raises(ValueError, match="state's indicators is .* 136 columns"):
        Scaling.from_state({**state, "indicators": np.array(of)})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "chosen"), [("standard", True), ("auto", False), ("auto", True)])
def test_wide_features_are_never_copied_as_a_whole(tmp_path, kind, chosen):
    rows, columns = 5_000, 5_000  # 95 MiB, twice as much in float64
    stored = np.memmap(tmp_path / "features", np.float32, "w+", shape=(rows, columns))
    stored[::7] = np.linspace(-1, 1, columns)
    lists = np.arange(0, rows + 1, 10), np.arange(rows // 10)
    features = FeatureRows([stored], np.arange(rows)[::-1]) if chosen else stored
    data = RankingDataset(features, np.zeros(rows), *lists)
    tracemalloc.start()
    fit_scaling(data, kind)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < stored.nbytes * 0.7
