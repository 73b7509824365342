"""Batches: every query once, the same lists for any ranks and after any stop, the rules of the subsample."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rankgrad.data import RankingDataset, batches


def ragged(lengths, labels=None, ids=None):
    """Feature 0 is the document's row, so that a test can see where a document came from; feature 1 is never 0."""
    lengths = np.asarray(lengths)
    total = int(lengths.sum())
    rows = np.arange(total)
    labels = rows % 3 if labels is None else labels
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return RankingDataset(
        np.stack([rows, rows + 1], 1), labels, offsets, np.arange(len(lengths)) if ids is None else ids
    )


def web30k_like(queries, seed=0):
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(rng.lognormal(np.log(120) - 0.62**2 / 2, 0.62, queries)), 1, 1251).astype(np.int64)


def lists(batch):
    """{query: rows of its documents}, after checking what every batch promises."""
    features, labels, mask, queries = batch
    assert features.dtype == labels.dtype == torch.float32
    assert mask.dtype == torch.bool
    assert queries.dtype == torch.int64
    assert features.shape[:2] == labels.shape == mask.shape
    assert queries.shape == mask.shape[:1]
    assert not features[~mask].any()
    assert not labels[~mask].any()
    assert (mask.cumsum(1)[mask] == torch.arange(1, mask.shape[1] + 1).expand_as(mask)[mask]).all()  # no gaps
    return {int(q): f[m, 0].int().tolist() for q, f, m in zip(queries, features, mask)}


def epoch_of(data, batch_size, **options):
    return [lists(batch) for batch in batches(data, batch_size, **options)]


@settings(deadline=None)
@given(
    queries=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    world=st.integers(1, 9),
    list_size=st.sampled_from([None, 1, 4, 100]),
    shuffle=st.booleans(),
    max_documents=st.sampled_from([None, 1, 20]),
    epoch=st.integers(0, 3),
)
def test_every_query_once_and_ranks_share_the_steps(
    queries, batch_size, world, list_size, shuffle, max_documents, epoch
):
    data = ragged(np.arange(queries) * 7 % 11 + 1)
    options = {"list_size": list_size, "shuffle": shuffle, "epoch": epoch, "max_documents": max_documents, "seed": 5}
    alone = epoch_of(data, batch_size, **options)
    assert sorted(q for step in alone for q in step) == list(range(queries))
    for step in alone:
        for query, rows in step.items():
            begin, end = data.offsets[query : query + 2]
            assert set(rows) <= set(range(begin, end))
            assert rows == sorted(set(rows))
            assert len(rows) == min(end - begin, list_size or end - begin)
    ranks = [epoch_of(data, batch_size, rank=rank, world=world, **options) for rank in range(world)]
    assert {len(rank) for rank in ranks} == {len(alone)}
    for step, *shares in zip(alone, *ranks):
        assert sum(map(len, shares)) == len(step)
        assert {q: rows for share in shares for q, rows in share.items()} == step


def test_ranks_agree_on_padded_length_and_may_be_without_lists():
    data = ragged([3, 9, 2])
    parts = [next(batches(data, 3, rank=rank, world=5)) for rank in range(5)]
    assert [tuple(part.features.shape) for part in parts] == [(1, 9, 2)] * 3 + [(0, 9, 2)] * 2
    drawn = next(batches(data, 3, rank=4, world=5, list_size=4))
    assert drawn.features.shape == (0, 4, 2)


def test_resuming_at_any_step_continues_the_epoch():
    data = ragged(web30k_like(70))
    whole = epoch_of(data, 8, seed=3, epoch=2, list_size=50)
    assert len(whole) == 9
    for start in range(10):
        rest = batches(data, 8, seed=3, epoch=2, list_size=50, start=start)
        assert len(rest) == 9 - start
        assert [lists(batch) for batch in rest] == whole[start:]
    running = batches(data, 8, seed=3, epoch=2, list_size=50)
    next(running)
    assert (running.step, len(running)) == (1, 8)


def test_seed_and_epoch_change_order_and_subsample():
    data = ragged([40] * 30)
    seen = [epoch_of(data, 4, list_size=5, seed=s, epoch=e) for s, e in itertools.product(range(3), range(3))]
    for one, other in itertools.combinations(seen, 2):
        assert [list(step) for step in one] != [list(step) for step in other]
        together = {q: r for step in one for q, r in step.items()}
        assert sum(together[q] == r for step in other for q, r in step.items()) <= 1
    assert seen[4] == epoch_of(data, 4, list_size=5, seed=1, epoch=1)


@pytest.mark.parametrize("text", [False, True])
def test_a_list_is_drawn_alike_among_any_other_lists(text):
    lengths = web30k_like(40)
    data = ragged(lengths)
    if text:
        data = RankingDataset(data.features, data.labels, data.offsets, [f"query {i}" for i in range(40)])
    drawn = {q: rows for step in epoch_of(data, 8, list_size=20, epoch=1) for q, rows in step.items()}
    some = [31, 5, 17]
    again = epoch_of(data.select(some), 2, list_size=20, epoch=1)
    for query, rows in (item for step in again for item in step.items()):
        assert rows == drawn[some[query]]


def test_the_subsample_is_uniform():
    """200 lists without relevant documents x 50 epochs, 3 of 8 drawn: every place and every set alike."""
    data = ragged([8] * 200, labels=np.zeros(1600))
    places, sets = np.zeros(8), {}
    for epoch in range(50):
        for step in epoch_of(data, 200, list_size=3, epoch=epoch):
            for query, rows in step.items():
                drawn = np.array(rows) - 8 * query
                places[drawn] += 1
                sets[tuple(drawn)] = sets.get(tuple(drawn), 0) + 1
    draws, kinds = 10_000, 56
    assert np.abs(places / draws - 3 / 8).max() < 5 * np.sqrt(3 / 8 * 5 / 8 / draws)
    expected = draws / kinds
    assert len(sets) == kinds
    assert sum((n - expected) ** 2 / expected for n in sets.values()) < 93  # chi-square, 55 degrees, p = 0.001


def test_a_relevant_document_replaces_the_last_drawn_only_if_none_was_drawn():
    """Compared list by list with the draw from the same lists without labels."""
    queries, length, size = 400, 30, 5
    rng = np.random.default_rng(0)
    labels = (rng.random((queries, length)) < 0.07).astype(float)
    labels[0] = 0
    blind = ragged([length] * queries, labels=np.zeros(queries * length))
    data = ragged([length] * queries, labels=labels.reshape(-1))
    pick = {"list_size": size, "shuffle": False}
    plain, ruled = next(map(lists, batches(blind, queries, **pick))), next(map(lists, batches(data, queries, **pick)))
    replaced = []
    for query in range(queries):
        relevant = set(np.flatnonzero(labels[query]) + query * length)
        if relevant & set(plain[query]) or not relevant:
            assert ruled[query] == plain[query]
        else:
            (new,) = set(ruled[query]) - set(plain[query])
            assert new in relevant
            replaced += [sorted(relevant).index(new) / (len(relevant) - 1)] if len(relevant) > 1 else []
            # the one that left is the last drawn: a draw of one fewer does not hold it
            fewer = next(map(lists, batches(blind.select([query]), 1, list_size=size - 1)))[0]
            assert set(ruled[query]) - relevant == set(fewer)
    assert len(replaced) > 50
    assert 0.35 < np.mean(replaced) < 0.65  # any of the relevant ones, not the first


@pytest.mark.parametrize("list_size", [240, None])
@pytest.mark.parametrize("batch_size", [16, 64])
def test_padding_stays_below_a_fifth_on_web30k_like_lengths(list_size, batch_size):
    masks = [batch.mask for batch in batches(ragged(web30k_like(6000)), batch_size, list_size=list_size)]
    padding = 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    assert padding < (0.2 if list_size is None else 0.08)


def test_batches_of_similar_length_come_in_random_order():
    widths = [batch.mask.shape[1] for batch in batches(ragged(web30k_like(1024)), 64)]
    steps = np.diff(widths)
    assert (steps > 0).any()
    assert (steps < 0).any()
    distinct = ragged(np.arange(1, 401))
    steps = [set(step) for epoch in range(2) for step in epoch_of(distinct, 4, list_size=None, epoch=epoch)]
    assert not any(a == b for a, b in itertools.combinations(steps, 2))  # sorted as a whole, all would be


def test_the_short_batch_comes_last_and_holds_no_particular_lengths():
    lengths = np.repeat([1, 50], 500)
    last = [list(batches(ragged(lengths), 64, epoch=epoch))[-1] for epoch in range(5)]
    assert {len(batch.queries) for batch in last} == {1000 % 64}
    assert 0.3 < np.mean([float((batch.queries < 500).float().mean()) for batch in last]) < 0.7


def test_fixed_padding_is_list_size_always():
    for batch in batches(ragged([1, 2, 3, 30, 40]), 2, list_size=10, pad="fixed"):
        assert batch.mask.shape[1] == 10
        lists(batch)
    assert next(batches(ragged([2]), 4, list_size=7, pad="fixed")).mask.tolist() == [[True] * 2 + [False] * 5]


def test_evaluation_goes_by_length_within_its_budget():
    data = ragged(web30k_like(500))
    seen = list(batches(data, 64, list_size=None, shuffle=False, max_documents=10_000))
    assert sorted(q for batch in seen for q in batch.queries.tolist()) == list(range(500))
    assert all(batch.mask.numel() <= 10_000 for batch in seen)
    widths = [batch.mask.shape[1] for batch in seen]
    assert widths == sorted(widths, reverse=True)
    assert sum(int(batch.mask.sum()) for batch in seen) == len(data.labels)
    assert 1 - len(data.labels) / sum(batch.mask.numel() for batch in seen) < 0.2
    alone = list(batches(ragged([50, 3, 2]), 3, list_size=None, shuffle=False, max_documents=10))
    assert [batch.queries.tolist() for batch in alone] == [[0], [1, 2]]


def test_missing_values_are_kept_and_do_not_leak_into_the_padding():
    data = RankingDataset([[np.nan], [1.0], [np.nan]], [0, 1, 1], [0, 1, 3], [1, 2])
    batch = next(batches(data, 2, shuffle=False))
    assert batch.features[..., 0].nan_to_num(nan=-1).tolist() == [[1, -1], [-1, 0]]
    assert (batch.features[1, 1] == 0).all()


def test_a_batch_does_not_share_memory_with_the_dataset(tmp_path):
    data = RankingDataset.open(ragged([4]).save(tmp_path / "d"))
    batch = next(batches(data, 1))
    batch.features.zero_()
    batch.labels.zero_()
    assert data.features.any()
    assert data.labels.any()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint64, np.int8])
def test_numpy_integers_are_integers(kind):
    data = ragged([1, 2, 3, 2, 5])
    options = {"batch_size": 2, "seed": 3, "epoch": 1, "list_size": 2, "start": 1, "max_documents": 9}
    ours = epoch_of(data, **options)
    assert epoch_of(data, **{name: kind(value) for name, value in options.items()}) == ours
    split = [part.query_ids.tolist() for part in data.split([3, 2], seed=3)]
    assert [part.query_ids.tolist() for part in data.split([3, 2], seed=kind(3))] == split
    with pytest.raises(ValueError, match=r"seed .*whole number, got 3\.0"):
        data.split([3, 2], seed=3.0)


def test_the_budget_of_documents_holds_with_fixed_padding():
    data = ragged([1, 2, 3, 2, 5, 1, 1])
    found = list(batches(data, 4, list_size=6, pad="fixed", max_documents=20))
    assert {batch.mask.shape[1] for batch in found} == {6}
    assert max(batch.mask.numel() for batch in found) == 18
    assert sorted(q for batch in found for q in batch.queries.tolist()) == list(range(7))
    assert len(list(batches(data, 4, list_size=6, pad="fixed", max_documents=5))) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size .*1 or above, got 0"),
        ({"list_size": 0}, "list_size .*1 or above, got 0"),
        ({"max_documents": 0}, "max_documents .*1 or above, got 0"),
        ({"rank": 2, "world": 2}, "rank 2 of world 2"),
        ({"rank": -1}, "rank -1"),
        ({"pad": "short"}, "pad .*'longest'.*'fixed'"),
        ({"pad": "fixed", "list_size": None}, "pad='fixed'.*list_size"),
        ({"start": 3}, "start is 3"),
        ({"start": -1}, "start is -1"),
        ({"batch_size": 2.5}, "batch_size .*whole number, 1 or above, got 2.5"),
        ({"batch_size": "2"}, "batch_size .*whole number, 1 or above, got '2'"),
        ({"seed": 1.0}, "seed .*whole number, got 1.0"),
        ({"seed": None}, "seed .*whole number, got None"),
        ({"seed": True}, "seed .*whole number, got True"),
        ({"seed": 2**64}, "seed .*64 bits"),
        ({"epoch": 0.5}, "epoch .*whole number, got 0.5"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        batches(ragged([1, 2, 3]), **({"batch_size": 2} | options))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_gpu_gives_the_same_batches_without_waiting_for_it():
    data = ragged(web30k_like(300))
    for options in ({"list_size": 50}, {"list_size": None, "shuffle": False}, {"list_size": 50, "pad": "fixed"}):
        there = batches(data, 16, device="cuda", **options)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_gpu = list(there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one, other in zip(batches(data, 16, **options), on_gpu, strict=True):
            for a, b in zip(one, other):
                torch.testing.assert_close(a, b.cpu(), rtol=0, atol=0)
