"""Features that are read and scaled when they are asked for: the numbers of an array, to the bit, without the array."""

import numpy as np
import pytest
import torch

from rankgrad.data import RankingDataset, batches, fit_scaling, synthetic
from rankgrad.data.feature_rows import BLOCK, FeatureRows
from rankgrad.data.memory import affordable, free_bytes
from rankgrad.data.packed import packed_lists
from rankgrad.data.prefetch import prefetch_to_device
from rankgrad.data.scaling import KINDS
from rankgrad.training.data import scaled


@pytest.fixture
def no_memory(monkeypatch):
    monkeypatch.setattr("rankgrad.data.memory.free_bytes", lambda: 0)


@pytest.fixture
def mapped(tmp_path):
    return RankingDataset.open(synthetic("tiny").save(tmp_path / "lists"))


def array(n=9, width=3):
    return np.arange(n * width, dtype=np.float32).reshape(n, width)


@pytest.mark.parametrize(
    "rows", [slice(None), slice(1, 4), slice(None, None, -2), slice(5, 5), [3, 3, 0], [], "mask"], ids=str
)
@pytest.mark.parametrize("index", [None, [4, 0, 8, 8, 2, 1, 7]], ids=["all", "chosen"])
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_are_those_of_an_array(rows, index, parts):
    whole = array()
    lazy = FeatureRows(np.split(whole, parts), None if index is None else np.array(index))
    expected = whole if index is None else whole[index]
    if rows == "mask":
        rows = np.arange(len(expected)) % 2 == 0
    elif isinstance(rows, list):
        rows = np.array(rows, np.int64)
    assert lazy[rows].tolist() == expected[rows].tolist()
    assert lazy[rows].shape == expected[rows].shape
    assert (lazy.shape, lazy.nbytes, len(lazy)) == (expected.shape, expected.nbytes, len(expected))
    assert lazy.select(rows)[:].tolist() == expected[rows].tolist()
    assert np.asarray(lazy).tolist() == expected.tolist()
    assert np.asarray(lazy, np.float64).dtype == np.float64


def test_rows_of_rows_and_more_than_a_block():
    whole = array(2 * BLOCK + 3, 1)
    inner = FeatureRows([whole], np.arange(len(whole))[::-1])
    outer = FeatureRows([inner, whole[:2]])
    expected = np.concatenate([whole[::-1], whole[:2]])
    assert np.array_equal(np.asarray(outer), expected)
    assert np.array_equal(outer.select(slice(5, None, 9))[:], expected[5::9])


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_rows_are_the_scaled_array_to_the_bit(kind, mapped, no_memory):
    scaling = fit_scaling(mapped, kind)
    lazy, expected = scaled(mapped, scaling), scaling.apply(mapped.features)
    assert isinstance(lazy.features, FeatureRows)
    chosen = np.random.default_rng(0).permutation(len(expected))[:100]
    assert lazy.features[chosen].tobytes() == expected[chosen].tobytes()
    assert np.asarray(lazy.features).tobytes() == expected.tobytes()
    assert lazy.features[chosen].dtype == np.float32
    assert lazy.features.column_block(chosen, 1, 3).tobytes() == expected[chosen][:, 1:3].tobytes()


def test_a_large_selection_is_not_copied_and_nothing_can_tell(mapped, monkeypatch, tmp_path):
    scaling = fit_scaling(mapped)
    kept = [scaled(part, scaling) for part in mapped.split([0.7, 0.3], seed=3)]
    monkeypatch.setattr("rankgrad.data.memory.free_bytes", lambda: 0)
    parts = mapped.split([0.7, 0.3], seed=3)
    assert all(isinstance(part.features, FeatureRows) for part in parts)
    lazy = [scaled(part, scaling) for part in parts]
    joined = RankingDataset.concatenate([lazy[0], kept[1]])  # scaled batch by batch, and at once
    assert isinstance(joined.features, FeatureRows)
    assert np.array_equal(joined.features[:], np.concatenate([part.features for part in kept]))
    again = joined.select(np.arange(len(joined))[::-2])
    expected = RankingDataset.concatenate(kept).select(np.arange(len(joined))[::-2])
    assert np.array_equal(again.features[:], np.asarray(expected.features))
    assert (again.labels == expected.labels).all()
    assert (again.rows == expected.rows).all()
    saved = RankingDataset.open(again.save(tmp_path / "again"), verify=True)
    assert np.array_equal(saved.features, again.features[:])
    assert saved.describe() == again.describe()
    assert mapped.select(slice(2, 5)).features.base is not None  # neighbours are a view as ever


def test_one_part_is_not_copied(mapped):
    assert np.shares_memory(RankingDataset.concatenate([mapped]).features, mapped.features)


@pytest.mark.parametrize("options", [{}, {"list_size": 4}, {"rank": 1, "world": 3}, {"shuffle": False}], ids=str)
def test_batches_read_what_they_would_have_gathered(options, mapped, no_memory):
    scaling = fit_scaling(mapped)
    at_once = RankingDataset(scaling.apply(mapped.features), mapped.labels, mapped.offsets, mapped.query_ids)
    found, expected = (list(batches(data, 7, **options)) for data in (scaled(mapped, scaling), at_once))
    assert len(found) == len(expected) > 1
    assert all(torch.equal(one, other) for pair in zip(found, expected) for one, other in zip(*pair))


def test_packed_steps_read_their_documents(mapped, no_memory):
    scaling = fit_scaling(mapped)
    lazy, expected = scaled(mapped, scaling), torch.from_numpy(scaling.apply(mapped.features))
    plain = packed_lists(mapped, 7, list_size=5)
    items = ((step, 7) for step in packed_lists(lazy, 7, list_size=5))
    for (step, _), own in zip(prefetch_to_device(items, lazy, torch.device("cpu")), plain, strict=True):
        assert torch.equal(step.features[step.rows], expected[own.rows])
        assert torch.equal(step.labels[step.rows], torch.from_numpy(np.array(mapped.labels))[own.rows])


def test_what_is_free_decides(monkeypatch):
    assert 0 < free_bytes() < 1 << 50
    monkeypatch.setattr("rankgrad.data.memory.free_bytes", lambda: 4000)
    assert affordable(1000)
    assert not affordable(1001)
    lists = synthetic("tiny")
    assert isinstance(scaled(lists, fit_scaling(lists)).features, FeatureRows)


def test_limits_of_the_process_count(monkeypatch):
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_DATA: 1 << 62, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    before = free_bytes()
    limits[resource.RLIMIT_DATA] = 1 << 20  # less than is taken already
    assert before > 0
    assert free_bytes() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_go_to_a_gpu_in_pieces_or_batch_by_batch(mapped, no_memory, monkeypatch):
    scaling = fit_scaling(mapped)
    lazy, expected = scaled(mapped, scaling), torch.from_numpy(scaling.apply(mapped.features))
    assert torch.equal(lazy.tensors("cuda")[0].cpu(), expected)
    monkeypatch.setattr("rankgrad.data.dataset.GPU_SHARE", 0.0)
    lazy = scaled(mapped, scaling)
    assert lazy.batch_source("cuda") is lazy.features
    at_once = RankingDataset(expected.numpy(), mapped.labels, mapped.offsets, mapped.query_ids)
    for found, own in zip(batches(lazy, 7, device="cuda"), batches(at_once, 7, device="cuda"), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, own))
