import os

import numpy as np
import pytest

from rankgrad.data.catalogue import SPLITS
from rankgrad.data.synthetic import LABEL_SHARES, SIZES, synthetic


@pytest.fixture(scope="module")
def small():
    return synthetic("small")


def as_bytes(data):
    return b"".join(a.tobytes() for a in (data.features, data.labels, data.offsets, data.query_ids))


@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_the_promised_counts(size, split):
    data, promised = synthetic(size, split, seed=3), SIZES[size]
    assert len(data) == promised.queries[SPLITS.index(split)]
    assert data.features.shape == (data.offsets[-1], promised.features)
    assert data.features.dtype == data.labels.dtype == np.float32
    assert data.lengths.max() == promised.longest
    assert np.isfinite(data.features).all()
    assert set(np.unique(data.labels)) <= {0.0, 1.0, 2.0, 3.0, 4.0}
    empty = np.maximum.reduceat(data.labels, data.offsets[:-1]) == 0
    assert empty.sum() == max(1, round(0.03 * len(data)))


def test_the_named_sizes_of_the_benchmarks():
    assert SIZES["web30k"].queries == (18_919, 6_306, 6_306)
    assert (SIZES["web30k"].features, SIZES["web30k"].longest) == (136, 1_251)
    assert SIZES["istella"].features == 220


def test_a_large_split_is_drawn_block_by_block_to_its_end(monkeypatch):
    # web30k's shape at a fiftieth of its queries: the same code path, a second of work.
    queries = (378, 126, 126)
    monkeypatch.setitem(SIZES, "web30k", SIZES["web30k"].__class__(queries, 136, 120, 0.62, 1_251))
    data = synthetic("web30k")
    assert len(data) == 378
    assert data.lengths.max() == 1_251
    assert 110 < data.lengths.mean() < 135
    assert (data.features[-1] != 0).sum() > 100


def test_labels_have_web30ks_shares(small):
    shares = np.bincount(small.labels.astype(int), minlength=5) / len(small.labels)
    np.testing.assert_allclose(shares, LABEL_SHARES, atol=0.005)


def test_list_lengths_are_log_normal(small):
    logs = np.log(small.lengths)
    assert abs(small.lengths.mean() - 32) < 2
    assert abs(logs.std() - 0.5) < 0.05
    assert abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 0.3


def test_columns_differ_in_scale_and_tail_and_come_in_correlated_groups(small):
    x = small.features.astype(np.float64)
    deviation = x.std(0)
    constant = np.flatnonzero(deviation == 0)
    assert 2 <= len(constant) <= 6
    varying = deviation[deviation > 0]
    assert varying.max() / varying.min() > 1e6
    moving = x[:, deviation > 0]
    kurtosis = ((moving - moving.mean(0)) ** 4).mean(0) / moving.var(0) ** 2
    assert (kurtosis > 20).mean() > 0.3  # a normal column has 3
    assert (kurtosis < 4).any()
    assert (x.min(0) < 0).any()
    ranks = x.argsort(0).argsort(0)
    correlation = np.corrcoef(ranks[:, 70:80].T)
    assert correlation[:5, :5].mean() > 0.5 > abs(correlation[:5, 5:].mean())


def test_some_columns_know_only_the_query(small):
    first = small.features[small.offsets[:-1]]
    same = (small.features == np.repeat(first, small.lengths, axis=0)).all(0)
    assert same[15:20].all()
    assert same.sum() < 12


def test_the_bytes_are_a_function_of_size_split_and_seed(monkeypatch):
    expected = as_bytes(synthetic("small", "vali", seed=5))
    for threads in (1, 3, 64):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        assert as_bytes(synthetic("small", "vali", seed=5)) == expected


def test_seeds_and_splits_share_no_document():
    parts = [synthetic("tiny", split, seed) for split in SPLITS for seed in (0, 1)]
    values = np.concatenate([p.features[:, 75] for p in parts])  # a continuous column
    assert len(np.unique(values)) == len(values)
    ids = np.concatenate([synthetic("tiny", split).query_ids for split in SPLITS])
    assert len(np.unique(ids)) == len(ids)


def ndcg(scores, data, k=10):
    values = []
    for start, end in zip(data.offsets[:-1], data.offsets[1:]):
        gains = 2 ** data.labels[start:end] - 1
        if gains.any():
            discounts = 1 / np.log2(np.arange(2, 2 + min(k, len(gains))))
            order = np.argsort(-scores[start:end], kind="stable")
            ideal = np.sort(gains)[::-1]
            values.append((gains[order][:k] @ discounts) / (ideal[:k] @ discounts))
    return np.mean(values)


@pytest.mark.slow
def test_linear_single_document_and_list_models_separate(small):
    """Least squares on the columns, on products of family means, and on those relative to the list's mean."""
    test = synthetic("small", "test")

    def family_means(data):  # [N, 27] nearly the hidden factors
        x = np.sign(data.features) * np.log1p(np.abs(data.features))
        reference = np.sign(small.features) * np.log1p(np.abs(small.features))
        x = (x - reference.mean(0)) / (reference.std(0) + 1e-6)
        return x[:, :135].reshape(len(x), 27, 5).mean(2)

    def listwise(data):
        x = family_means(data)
        mean = np.add.reduceat(x, data.offsets[:-1]) / data.lengths[:, None]
        mean = np.repeat(mean, data.lengths, axis=0)
        return np.concatenate([np.abs(x - mean), np.einsum("ni,nj->nij", x - mean, mean).reshape(len(x), -1)], 1)

    def alone(data):
        x = family_means(data)
        products = np.einsum("ni,nj->nij", x, x)[:, *np.triu_indices(27)]
        return np.concatenate([x, products, np.abs(x)], axis=1)

    def both(data):
        return np.concatenate([alone(data), listwise(data)], axis=1)

    results = []
    for view in (family_means, alone, both):
        x = view(small)
        weights = np.linalg.solve(x.T @ x + 100 * np.eye(x.shape[1]), x.T @ (small.labels - small.labels.mean()))
        results.append(ndcg(view(test) @ weights, test))
    linear, document, context = results
    assert linear > 0.45
    assert document > linear + 0.03
    assert context > document + 0.03


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "no synthetic size 'huge'; expected one of tiny, small, web30k, istella, istella-full"),
        ({"split": "valid"}, "no split 'valid'; expected one of train, vali, test"),
        ({"seed": -1}, "seed .*whole number, 0 or above, got -1"),
        ({"seed": 0.5}, "seed .*whole number, 0 or above, got 0.5"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic(**{"size": "tiny", **arguments})


def test_the_packages_name_synthetic_is_the_function_and_not_the_module():
    import rankgrad.data

    assert rankgrad.data.synthetic is synthetic
