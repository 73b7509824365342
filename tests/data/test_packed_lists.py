"""Lists end to end: the same lists in the same steps as padded batches, at any step, from the device or ahead of it."""

import numpy as np
import pytest
import torch

from rankgrad.data import packed
from rankgrad.data.batches import batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.packed import packed_lists, padded
from rankgrad.data.prefetch import prefetch, prefetch_to_device
from rankgrad.data.synthetic import synthetic

DATA = synthetic("tiny", "train")  # 30 lists of up to 30 documents
FEATURES, LABELS, _ = DATA.tensors("cpu")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(packed, "ROW_MULTIPLE", 64)
    monkeypatch.setattr(packed, "DRAW_CHUNK", 100)  # three lists of 30 documents


def unpacked(step):
    """What a padded batch holds, from a packed one."""
    lists = len(step.queries)
    labels, mask = padded(step.rows, step.offsets, lists, step.width, LABELS)
    flat = torch.zeros(lists * step.width + 1, FEATURES.shape[1]).index_copy(0, step.slots, FEATURES[step.rows])
    return flat[:-1].view(lists, step.width, -1), labels, mask


@pytest.mark.parametrize("list_size", [6, 9, 40])
@pytest.mark.parametrize("batch_size", [7, 8, 64])
def test_lists_and_steps_are_those_of_padded_batches(list_size, batch_size):
    expected = batches(DATA, batch_size, list_size=list_size, seed=3, epoch=2, pad="fixed")
    found = packed_lists(DATA, batch_size, list_size=list_size, seed=3, epoch=2)
    assert len(found) == len(expected) > 0
    for batch, step in zip(expected, found, strict=True):
        features, labels, mask = unpacked(step)
        lists, width = len(batch.queries), step.width
        assert found.lists == lists and len(step.queries) == batch_size and width <= list_size
        assert torch.equal(features[:lists], batch.features[:, :width]) and not batch.mask[:, width:].any()
        assert torch.equal(labels[:lists], batch.labels[:, :width])
        assert torch.equal(mask[:lists], batch.mask[:, :width]) and not mask[lists:].any()
        assert torch.equal(step.queries[:lists], batch.queries)
        assert set(step.queries[lists:].tolist()) <= set(batch.queries.tolist())


def test_shapes_are_few_and_the_padding_is_lists_that_reach_no_slot():
    shapes = set()
    for epoch in range(8):
        for step in packed_lists(DATA, 8, list_size=20, epoch=epoch):
            lengths = step.offsets.diff()
            assert len(step.rows) % 64 == 0 and step.offsets[0] == 0 and step.offsets[-1] == len(step.rows)
            assert int(lengths.min()) >= 0 and int(lengths.max()) <= step.width
            real = int(step.offsets[8])
            assert (step.slots[real:] == 8 * step.width).all() and (step.slots[:real] < 8 * step.width).all()
            assert len(set(step.slots[:real].tolist())) == real
            shapes.add((len(step.rows), len(step.offsets), step.width))
    assert 1 < len(shapes) <= 6
    assert {width for _, _, width in shapes} <= {16, 20}


def test_large_steps_have_few_shapes_too(monkeypatch):
    monkeypatch.setattr(packed, "ROW_MULTIPLE", 2)
    monkeypatch.setattr(packed, "SHAPES", 4)
    lengths = {
        len(step.rows) for epoch in range(20) for step in packed_lists(DATA, 4, list_size=20, epoch=epoch)
    }  # of up to 80 documents
    assert 1 < len(lengths) <= 4 and all(length % 20 == 0 for length in lengths)


def test_a_run_that_resumes_sees_the_same_steps():
    whole = list(packed_lists(DATA, 8, list_size=9, seed=1, epoch=4))
    for start in range(5):
        rest = packed_lists(DATA, 8, list_size=9, seed=1, epoch=4, start=start)
        assert len(rest) == 4 - start and rest.step == start
        for one, other in zip(rest, whole[start:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[:4], other[:4]))


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_prefetched_batches_hold_their_documents(kind):
    def lists():
        make = packed_lists if kind == "packed" else batches
        return ((batch, 8) for batch in make(DATA, 8, list_size=9))

    for (batch, count), (plain, _) in zip(prefetch_to_device(lists(), DATA, torch.device("cpu")), lists(), strict=True):
        assert count == 8
        if kind == "padded":
            assert torch.equal(batch.features, plain.features)
            continue
        assert torch.equal(batch.features[batch.rows], FEATURES[plain.rows])
        assert torch.equal(batch.labels[batch.rows], LABELS[plain.rows])
        assert torch.equal(batch.slots, plain.slots) and torch.equal(batch.offsets, plain.offsets)


def test_what_is_prefetched_keeps_its_order_passes_errors_on_and_may_be_left():
    assert list(prefetch(iter(range(20)), lambda n: n * n)) == [n * n for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        list(prefetch(iter([1, 0]), lambda n: 1 / n))
    made = []
    for value in prefetch(iter(range(1000)), lambda n: made.append(n) or n):
        if value == 3:
            break
    assert len(made) < 20


def test_one_long_list_among_others_is_drawn_as_in_batches():
    long = RankingDataset(np.arange(50.0)[:, None], np.arange(50) % 3, [0, 2, 45, 50], [5, 6, 7])
    step = next(packed_lists(long, 4, list_size=10))
    batch = next(batches(long, 4, list_size=10))
    real = int(step.offsets[4])
    assert sorted(step.rows[:real].tolist()) == sorted(batch.features[batch.mask][:, 0].int().tolist())
