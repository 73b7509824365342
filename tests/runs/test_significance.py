"""Paired tests against scipy and closed cases; ties, order, NaN, seeds; refusals."""

import dataclasses
import itertools
import math
import tracemalloc

import numpy as np
import pytest
import scipy.stats

from rankgrad.runs import significance
from rankgrad.runs.significance import Comparison, bootstrap_interval, compare, holm, paired_permutation_test


def pair(queries, *, shift=0.0, seed=0):
    """Two metric vectors that share the difficulty of the queries, with ties and values of few digits."""
    draw = np.random.default_rng(seed)
    base = draw.random(queries)
    a, b = (np.clip(base + 0.1 * draw.normal(size=queries), 0, 1).round(2) for _ in range(2))
    b[::7] = a[::7]
    return a + shift, b


def scipy_p(a, b, resamples=math.inf):
    result = scipy.stats.permutation_test(
        (np.subtract(a, b),),
        lambda d, axis: d.mean(axis),
        permutation_type="samples",
        n_resamples=resamples,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return result.pvalue


# --- permutation test --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [2, 5, 9, 15])
@pytest.mark.parametrize("seed", range(4))
def test_few_differences_are_enumerated_as_in_scipy(queries, seed):
    a, b = pair(queries, seed=seed)
    assert np.count_nonzero(a - b) <= significance.EXACT
    p = paired_permutation_test(a, b, rounds=1)  # rounds play no part
    assert p == pytest.approx(scipy_p(a, b), abs=1e-12)


def test_enumeration_by_hand():
    differences = [0.3, 0.1, -0.2, 0.5]
    sums = [abs(sum(s * d for s, d in zip(signs, differences))) for signs in itertools.product([1, -1], repeat=4)]
    share = sum(s >= 0.7 - 1e-9 for s in sums) / 16
    assert paired_permutation_test(differences, np.zeros(4)) == share == 6 / 16


def test_enumeration_stops_where_drawing_begins():
    for n, exact in ((13, True), (14, False)):
        a = np.ones(n)
        assert (paired_permutation_test(a, 0 * a, rounds=99) == 2 / 2**n) == exact


@pytest.mark.parametrize("shift", [0.0, 0.01, 0.02])
def test_many_differences_agree_with_scipy_to_chance(shift):
    a, b = pair(300, shift=shift)
    p, expected = paired_permutation_test(a, b, rounds=20_000), scipy_p(a, b, 20_000)
    assert p == pytest.approx(expected, abs=5 * math.sqrt(2 * max(p * (1 - p), 1e-4) / 20_000))


def test_drawing_agrees_with_enumeration(monkeypatch):
    a, b = pair(14, shift=0.03)
    exact = paired_permutation_test(a, b)
    monkeypatch.setattr(significance, "EXACT", 0)
    drawn = paired_permutation_test(a, b, rounds=100_000)
    assert 0.05 < exact < 0.6
    assert drawn != exact and drawn == pytest.approx(exact, abs=5 * math.sqrt(exact / 100_000))


def test_closed_cases():
    ones = np.ones(500)
    assert paired_permutation_test(ones, ones) == 1.0
    assert paired_permutation_test([0.5], [0.5]) == 1.0
    assert paired_permutation_test([0.5], [0.4]) == 1.0  # one difference says nothing
    assert paired_permutation_test(np.ones(10), np.zeros(10)) == 2 / 2**10
    assert paired_permutation_test(ones, 0 * ones) == 1 / 10_001
    assert paired_permutation_test(ones, 0 * ones, rounds=49) == 1 / 50
    symmetric = np.tile([0.1, -0.1], 50)
    assert paired_permutation_test(symmetric, np.zeros(100)) == 1.0


def test_p_is_uniform_where_there_is_no_difference():
    draw = np.random.default_rng(5)
    p = [paired_permutation_test(draw.normal(size=40), draw.normal(size=40), rounds=500) for _ in range(400)]
    assert scipy.stats.kstest(p, "uniform").pvalue > 0.01


def test_patterns_that_tie_with_the_observed_one_count():
    a = np.array([0.1, 0.2, 0.3, 0.6, 0.7])  # 0.1 + 0.2 is not 0.3 in binary
    assert paired_permutation_test(a, [0, 0, 0.6, 0, 0]) == pytest.approx(
        scipy_p([1.0, 2.0, 3.0, 6.0, 7.0], [0, 0, 6.0, 0, 0])
    )


@pytest.mark.parametrize("queries", [9, 400])
def test_order_of_systems_and_queries_and_ties_do_not_matter(queries):
    a, b = pair(queries, shift=0.005)
    p = paired_permutation_test(a, b)
    order = np.random.default_rng(1).permutation(queries)
    assert 0 < p < 1
    assert p == paired_permutation_test(b, a) == paired_permutation_test(a[order], b[order])
    assert p == paired_permutation_test(np.append(a, [0.5, 0.1]), np.append(b, [0.5, 0.1]))


def test_p_depends_on_the_seed_and_on_nothing_else():
    a, b = pair(400, shift=0.005)
    assert paired_permutation_test(a, b, seed=1) == paired_permutation_test(a, b, seed=1)
    assert len({paired_permutation_test(a, b, seed=seed) for seed in range(5)}) > 1
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    compare(a, b)
    assert (state == np.random.get_state()[1]).all()  # noqa: NPY002


# --- bootstrap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_interval_agrees_with_scipy_to_chance(level):
    values = pair(200)[0]
    low, high = bootstrap_interval(values, level=level, rounds=20_000)
    expected = scipy.stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=level,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    error = values.std() / math.sqrt(200)
    assert low == pytest.approx(expected.low, abs=0.06 * error)
    assert high == pytest.approx(expected.high, abs=0.06 * error)
    assert low < values.mean() < high


def test_interval_of_two_values_by_hand():
    # A mean of two draws from {0, 1} is 0, 0.5 or 1 with shares 1/4, 1/2, 1/4.
    assert bootstrap_interval([0.0, 1.0], level=0.9) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)
    assert bootstrap_interval([0.25]) == (0.25, 0.25)


def test_interval_is_a_function_of_values_and_seed():
    values = pair(100)[0]
    assert (
        bootstrap_interval(values, seed=2) == bootstrap_interval(values, seed=2) != bootstrap_interval(values, seed=3)
    )
    holes = np.insert(values, [0, 50, 100], math.nan)
    assert bootstrap_interval(holes) == bootstrap_interval(values)


# --- many queries ------------------------------------------------------------------------------------------------------


def test_chunks_cover_every_round():
    assert sum(significance._chunks(10_001, 700)) == 10_001
    assert list(significance._chunks(3, 10**9)) == [1, 1, 1]


def test_memory_is_bounded():
    a, b = pair(2_000, shift=0.001)
    tracemalloc.start()
    compare(a, b, rounds=5_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 * 2**20  # 5,000 x 2,000 float64 would be 76 MiB


def test_results_do_not_hang_on_the_size_of_a_chunk(monkeypatch):
    a, b = pair(300, shift=0.005)
    before = compare(a, b)
    monkeypatch.setattr(significance, "CHUNK", 3_001)
    after = compare(a, b)
    assert after.p_value == pytest.approx(before.p_value, abs=0.03)
    assert (after.low, after.high) == pytest.approx((before.low, before.high), abs=5e-4)


# --- Holm --------------------------------------------------------------------------------------------------------------


def test_holm():
    assert holm([]) == []
    assert holm([0.2]) == [0.2]
    assert holm([0.5, 0.5, 0.9]) == [1.0, 1.0, 1.0]
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    p = np.random.default_rng(0).random(30) ** 4
    expected = [max(min(1.0, sum(r >= q for r in p) * q) for q in p if q <= own) for own in p]
    assert holm(p) == pytest.approx(expected)
    assert all(isinstance(value, float) for value in holm(p))


@pytest.mark.parametrize("wrong", [[0.1, 1.1], [-0.1], [math.nan], [[0.1]], 0.1])
def test_holm_refuses_what_is_no_p_value(wrong):
    with pytest.raises(ValueError, match="p_values must be a list of numbers from 0 to 1"):
        holm(wrong)


# --- comparison --------------------------------------------------------------------------------------------------------


def test_compare_puts_the_parts_together():
    a, b = pair(150, shift=0.0213)
    c = compare(a, b, seed=3, rounds=2_000)
    assert (c.mean_a, c.mean_b) == (a.mean(), b.mean())
    assert c.difference == pytest.approx(a.mean() - b.mean())
    assert c.p_value == paired_permutation_test(a, b, seed=3, rounds=2_000)
    assert (c.low, c.high) == bootstrap_interval(a - b, seed=3, rounds=2_000)
    assert (c.wins, c.ties, c.losses) == ((a > b).sum(), (a == b).sum(), (a < b).sum())
    assert c.queries == 150 == c.wins + c.ties + c.losses
    kinds = {field.name: type(getattr(c, field.name)) for field in dataclasses.fields(c)}
    assert kinds == {**dict.fromkeys(kinds, float), **dict.fromkeys(("wins", "ties", "losses", "queries"), int)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.wins = 0


def test_compare_is_antisymmetric():
    a, b = pair(150, shift=0.02)
    forth, back = compare(a, b), compare(b, a)
    assert (back.mean_a, back.mean_b, back.difference) == (forth.mean_b, forth.mean_a, -forth.difference)
    assert (back.low, back.high) == (pytest.approx(-forth.high), pytest.approx(-forth.low))
    assert (back.wins, back.ties, back.losses, back.p_value) == (forth.losses, forth.ties, forth.wins, forth.p_value)


def test_rounding_is_a_tie():
    c = compare([0.1 + 0.2, 0.5, 100.0], [0.3, 0.5 - 1e-9, 100.0 + 1e-12])
    assert (c.wins, c.ties, c.losses) == (1, 2, 0)
    small = compare([1e-20, 0.0], [3e-20, 0.0])  # but small is not the same as equal
    assert (small.ties, small.losses) == (1, 1)


def test_nan_leaves_a_query_out():
    a, b = pair(60)
    holes = [0, 10, 60]
    with_holes = compare(np.insert(a, holes, math.nan), np.insert(b, holes, math.nan))
    assert with_holes == compare(a, b) and with_holes.queries == 60
    assert paired_permutation_test([*a, math.nan], [*b, math.nan]) == paired_permutation_test(a, b)


def test_reads_well():
    c = Comparison(0.504, 0.49701, 0.00699, -0.001, 0.015, 0.0841, 120, 400, 64, 584)
    assert str(c) == (
        "0.5040 against 0.4970: difference +0.0070, 95% interval [-0.0010, +0.0150], p = 0.0841; "
        "120 wins, 400 ties, 64 losses over 584 queries"
    )


def test_takes_any_array():
    a, b = pair(30)
    assert compare(list(a), tuple(b)) == compare(a, b)
    assert compare(np.array([1, 0, 1]), [True, False, False]).wins == 1


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [paired_permutation_test, compare])
@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([], [], "at least one query with a value, got none among 0"),
        ([math.nan] * 2, [math.nan] * 2, "at least one query with a value, got none among 2"),
        ([1, 2], [1], "one value for each of the same queries, got 2 and 1"),
        ([1, math.nan, 3], [1, 2, math.nan], "disagree at 2 of 3, first at index 1"),
        ([[1, 2]], [[1, 2]], r"a must hold one metric value per query, shape \[Q\], got shape \[1, 2\]"),
        ([1, 2], 3, "b must hold one metric value per query"),
        ([1, math.inf], [1, 2], "a must be finite or NaN"),
    ],
)
def test_refuses_what_cannot_be_paired(function, a, b, message):
    with pytest.raises(ValueError, match=message):
        function(a, b)


@pytest.mark.parametrize("rounds", [0, -1, 2.5, None])
@pytest.mark.parametrize("queries", [3, 100])
def test_rounds_are_whole_and_positive(rounds, queries):
    a, b = pair(queries)
    for attempt in (paired_permutation_test, compare, lambda a, _, rounds: bootstrap_interval(a, rounds=rounds)):
        with pytest.raises(ValueError, match="rounds must be a whole number, 1 or above"):
            attempt(a, b, rounds=rounds)


def test_other_refusals():
    for level in (0, 1, 95, -0.5, math.nan):
        with pytest.raises(ValueError, match="level must be a number between 0 and 1"):
            bootstrap_interval([1.0], level=level)
    for values in ([], [math.nan]):
        with pytest.raises(ValueError, match="at least one query with a value"):
            bootstrap_interval(values)
    with pytest.raises(ValueError, match="values must hold one metric value per query"):
        bootstrap_interval(1.0)
