"""RankingDataset: its checks, selection and splitting, and the saved folder."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rankgrad.data import RankingDataset, folder as saved_folder
from rankgrad.data.grouping import group_rows
from rankgrad.data.order import mix, random_keys


def ragged(lengths, width=3, seed=0, **more):
    rng = np.random.default_rng(seed)
    total = int(np.sum(lengths))
    return RankingDataset(
        rng.normal(size=(total, width)).astype(np.float32),
        rng.integers(0, 3, total),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.arange(len(lengths)) * 10,
        **more,
    )


def same(one, other):
    for name in ("features", "labels", "offsets", "query_ids"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).dtype == getattr(other, name).dtype


GOOD = {"features": [[1.0], [2.0], [3.0]], "labels": [0, 2, 1], "offsets": [0, 2, 3], "query_ids": [7, 9]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": [1.0, 2.0, 3.0]}, "features is"),
        ({"features": [["a"], ["b"], ["c"]]}, "features is"),
        ({"features": np.zeros((3, 0))}, "no columns"),
        ({"features": [[1e300], [2.0], [3.0]]}, "beyond float32"),
        ({"labels": [0, 1]}, "labels has shape"),
        ({"labels": [0, -1, 1]}, r"labels\[1\] is -1"),
        ({"labels": [0, 1, np.nan]}, r"labels\[2\] is nan"),
        ({"labels": [np.inf, 1, 1]}, r"labels\[0\] is inf"),
        ({"offsets": [0, 3]}, "query_ids has shape"),
        ({"offsets": [1, 2, 3]}, "offsets do not cut"),
        ({"offsets": [0, 2, 4]}, "offsets do not cut"),
        ({"offsets": [0, 2, 2, 3]}, "no query without documents"),
        ({"offsets": [0.0, 2.0, 3.0]}, "64-bit integers"),
        ({"query_ids": [7.5, 9]}, "64-bit integers"),
        ({"query_ids": np.array([7, 2**63], np.uint64)}, "64-bit integers"),
        ({"query_ids": [7]}, "query_ids has shape"),
        ({"feature_names": ("a", "b")}, "feature_names holds 2"),
        ({"weights": [1.0, -1.0]}, r"weights\[1\]"),
        ({"weights": [1.0]}, "weights has shape"),
        ({"rows": [0, 1]}, "rows has shape"),
        ({"rows": [0, -1, 2]}, r"rows\[1\] is -1; expected positions in the source"),
        ({"rows": [0, 1, 1]}, "rows names a row of the source twice"),
        ({"rows": [2**40, 1, 2**40]}, "rows names a row of the source twice"),
        ({"query_ids": np.array(["a", "a\0"], object)}, "query_ids holds a text with a NUL"),
        ({"query_ids": np.array([1, 2**70], object)}, "64-bit integers"),
    ],
)
def test_what_is_no_dataset_is_refused(change, message):
    RankingDataset(**GOOD)
    with pytest.raises(ValueError, match=message):
        RankingDataset(**(GOOD | change))


def test_arrays_are_converted_and_float32_is_kept_without_a_copy():
    features = np.ones((3, 1), np.float32)
    data = RankingDataset(**(GOOD | {"features": features, "query_ids": np.array(["a", "bb"], object)}))
    assert data.features is features or data.features.base is features
    assert (data.labels.dtype, data.offsets.dtype, data.query_ids.dtype.kind) == (np.float32, np.int64, "U")
    assert len(data) == 2
    assert repr(data) == "RankingDataset(2 queries, 3 documents, 1 feature)"


def test_describe_counts_what_a_person_checks():
    data = RankingDataset(np.ones((6, 2)), [0, 2, 0, 0, 0, 1.5], [0, 2, 5, 6], [1, 2, 3])
    described = data.describe()
    assert (described.queries, described.documents, described.features, described.empty_queries) == (3, 6, 2, 1)
    assert described.labels == {0: 4, 1.5: 1, 2: 1}
    assert described.lengths == {"min": 1, "median": 2, "mean": 2, "p90": 2.8, "max": 3}
    for part in ("3 (1 without a relevant document)", "min 1, median 2", "66.7%"):
        assert part in str(described)
    many = RankingDataset(np.ones((40, 1)), np.arange(40) / 7, [0, 40], [1])
    assert "40 values" in str(many.describe())


def test_select_takes_positions_masks_and_slices():
    data = ragged([2, 1, 3], weights=[1.0, 2.0, 3.0])
    picked = data.select([2, 0])
    assert picked.query_ids.tolist() == [20, 0]
    assert picked.weights.tolist() == [3, 1]
    assert picked.rows.tolist() == [3, 4, 5, 0, 1]
    np.testing.assert_array_equal(picked.features, data.features[[3, 4, 5, 0, 1]])
    np.testing.assert_array_equal(picked.in_source_order(picked.labels), data.labels[[0, 1, 3, 4, 5]])
    same(data.select([True, False, True]), data.select([0, 2]))
    same(data.select(slice(1, None)), data.select([-2, -1]))
    assert np.shares_memory(data.select(slice(1, 3)).features, data.features)


def test_a_query_chosen_twice_is_there_twice_and_remembers_no_rows():
    data = ragged([2, 1, 3])
    twice = data.select([1, 0, 1])
    assert (twice.lengths.tolist(), twice.query_ids.tolist(), twice.rows) == ([1, 2, 1], [10, 0, 10], None)
    assert twice.in_source_order(np.arange(4)).tolist() == [0, 1, 2, 3]
    assert data.select([1, 0]).rows.tolist() == [2, 0, 1]


@pytest.mark.parametrize("queries", [[], [3], [-4], [True, False], [0.5], [False] * 3, [[0], [1]]])
def test_select_refuses(queries):
    with pytest.raises(ValueError, match=r"select"):
        ragged([2, 1, 3]).select(queries)


@given(st.integers(3, 40), st.integers(-(2**63), 2**64 - 1), st.booleans())
def test_split_loses_no_query_and_ignores_their_order(queries, seed, text):
    data = ragged(np.arange(queries) % 4 + 1)
    if text:
        data = RankingDataset(data.features, data.labels, data.offsets, data.query_ids.astype(str))
    parts = data.split([0.34, 0.33, 0.33], seed=seed)
    ids = [set(part.query_ids.tolist()) for part in parts]
    assert sum(map(len, ids)) == len(set.union(*ids)) == queries
    lengths = dict(zip(data.query_ids.tolist(), data.lengths.tolist()))
    for part in parts:
        assert part.lengths.tolist() == [lengths[q] for q in part.query_ids.tolist()]
        assert (np.diff(part.rows) > 0).all()
    turned = data.select(np.arange(queries)[::-1]).split([0.34, 0.33, 0.33], seed=seed)
    assert [set(part.query_ids.tolist()) for part in turned] == ids


def test_split_by_sizes_fractions_and_seed():
    data = ragged([1] * 100)
    assert [len(p) for p in data.split([60, 30, 10])] == [60, 30, 10]
    assert [len(p) for p in data.split([0.75, 0.25])] == [75, 25]
    assert data.split([50, 50], seed=1)[0].query_ids.tolist() != data.split([50, 50], seed=2)[0].query_ids.tolist()
    for parts in ([0.5, 0.4], [50, 49], [0.999, 0.001], [1.5, -0.5], [], ["a"], [100, 0]):
        with pytest.raises(ValueError, match=r"part|split"):
            data.split(parts)


def test_concatenate_keeps_lists_apart():
    one, two = ragged([2, 1]), ragged([3], seed=1).select([0])
    both = RankingDataset.concatenate([one, two])
    assert both.query_ids.tolist() == [0, 10, 0]
    assert both.lengths.tolist() == [2, 1, 3]
    assert both.rows.tolist() == [0, 1, 2, 3, 4, 5]
    same(both.select([0, 1]), one)
    same(both.select([2]), two)
    assert RankingDataset.concatenate([one, one]).rows is None
    same(RankingDataset.concatenate(d for d in (one, two)), both)
    for other, message in [
        (ragged([1], width=4), "number of features"),
        (ragged([1], feature_names=("a", "b", "c")), "feature names"),
        (ragged([1], weights=[1.0]), "weights"),
        (RankingDataset(np.ones((1, 3)), [0], [0, 1], ["a"]), "query ids"),
    ]:
        with pytest.raises(ValueError, match=f"dataset 2 differs.*{message}"):
            RankingDataset.concatenate([one, other])
    with pytest.raises(ValueError, match="nothing"):
        RankingDataset.concatenate([])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.booleans())
def test_group_rows_is_a_stable_grouping_by_first_appearance(ids, text):
    array = np.array([f"q{i}" for i in ids]) if text else np.array(ids)
    order, offsets, query_ids = group_rows(array)
    wanted = list(dict.fromkeys(array.tolist()))
    expected = [row for query in wanted for row in range(len(ids)) if array[row] == query]
    assert query_ids.tolist() == wanted
    assert (np.arange(len(ids)) if order is None else order).tolist() == expected
    assert (order is None) == (expected == list(range(len(ids))))
    assert offsets.tolist() == [0, *np.cumsum([array.tolist().count(q) for q in wanted])]


def test_mix_is_splitmix64_in_numpy_and_torch():
    import torch

    def reference(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    values = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
    assert [v % 2**64 for v in mix(values).tolist()] == [reference(v % 2**64) for v in values.tolist()]
    assert mix(torch.from_numpy(values)).tolist() == mix(values).tolist()


def test_random_keys_know_id_and_numbers_only():
    ids = np.array(["a", "b", "long text"])
    keys = random_keys(ids, 3, 4)
    assert keys[:2].tolist() == random_keys(ids[:2].astype("U1"), 3, 4).tolist()
    assert len({*keys.tolist(), *random_keys(ids, 4, 3).tolist(), *random_keys(ids, 3).tolist()}) == 9


def test_tensors_are_the_arrays_and_are_kept(tmp_path):
    data = RankingDataset.open(ragged([2, 1, 3]).save(tmp_path / "d"))
    features, labels, offsets = data.tensors()  # no warning although the map is read-only
    assert features.data_ptr() == data.features.ctypes.data
    assert labels.tolist() == data.labels.tolist()
    assert offsets.tolist() == [0, 2, 3, 6]
    assert data.tensors("cpu")[0] is features


@pytest.mark.parametrize("text", [False, True])
def test_save_and_open(tmp_path, text):
    data = ragged([2, 1, 3], weights=[1, 2, 3], rows=[5, 4, 3, 2, 1, 0], feature_names=("é", "b", "c"))
    if text:
        data = RankingDataset(data.features, data.labels, data.offsets, np.array(["ü", "b", "cc"]))
    data = RankingDataset(
        *(getattr(data, n) for n in ("features", "labels", "offsets", "query_ids", "feature_names", "weights", "rows")),
        {"clamped": 3, "files": ["a"]},
    )
    back = RankingDataset.open(data.save(tmp_path / "deep" / "d"), verify=True)
    same(data, back)
    assert back.feature_names == data.feature_names
    assert back.provenance == data.provenance
    for name in ("weights", "rows"):
        assert (getattr(data, name) is None) == (getattr(back, name) is None)
    if not text:
        assert back.rows.tolist() == [5, 4, 3, 2, 1, 0]
        assert back.weights.tolist() == [1, 2, 3]
    assert not back.features.flags.writeable
    manifest = json.loads((tmp_path / "deep" / "d" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["queries"], manifest["documents"], manifest["features"]) == (3, 6, 3)
    assert sorted(os.listdir(tmp_path / "deep")) == ["d"]


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(d / "labels.npy"), "labels.npy is damaged"),
        (lambda d: flip(d / "offsets.npy"), "offsets.npy is damaged"),
        (lambda d: flip(d / "query_ids.npy"), "query_ids.npy is damaged"),
        (lambda d: flip(d / "features.npy", 150), "features.npy is damaged"),
        (lambda d: flip(d / "features.npy", 30), "features.npy is damaged"),
        (lambda d: os.truncate(d / "features.npy", 150), "features.npy has 150 bytes"),
        (lambda d: os.truncate(d / "labels.npy", 0), "labels.npy has 0 bytes"),
        (lambda d: (d / "offsets.npy").unlink(), "offsets.npy is missing"),
        (lambda d: (d / "manifest.json").unlink(), "holds no manifest.json"),
        (lambda d: os.truncate(d / "manifest.json", 100), "not readable JSON"),
        (lambda d: (d / "manifest.json").write_text("[]"), "does not describe"),
        (lambda d: edit(d, '"arrays"', '"others"'), "does not describe"),
        (lambda d: [(d / "manifest.json").unlink(), (d / "manifest.json").mkdir()], "holds no manifest.json"),
        (lambda d: edit(d, '"version": 1', '"version": 2'), "format version 2"),
        (lambda d: edit(d, '"documents": 6', '"documents": 7'), "its own checksum"),
        (lambda d: edit(d, '"features"', '"../x"'), "its own checksum"),
    ],
)
def test_damage_is_found_on_opening(tmp_path, damage, message):
    folder = ragged([2, 1, 3]).save(tmp_path / "d")
    RankingDataset.open(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        RankingDataset.open(folder)


def edit(folder, old, new):
    path = folder / "manifest.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_large_features_are_sampled_on_opening_and_verified_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_folder, "FULL_CHECK", 1000)
    monkeypatch.setattr(saved_folder, "BLOCK", 16)
    folder = ragged([100] * 10, width=50).save(tmp_path / "d")
    flip(folder / "features.npy", 2000)  # between two blocks
    RankingDataset.open(folder)
    with pytest.raises(ValueError, match="damaged"):
        RankingDataset.open(folder, verify=True)
    flip(folder / "features.npy")
    with pytest.raises(ValueError, match="damaged"):
        RankingDataset.open(folder)


def test_saving_never_destroys(tmp_path, monkeypatch):
    first, second = ragged([2, 1]), ragged([3, 3], seed=1)
    folder = first.save(tmp_path / "d")
    with pytest.raises(ValueError, match="exists"):
        second.save(folder)
    for good in (1, 4):  # the disk is full at the second array, then at the manifest
        for target in (folder, tmp_path / "new"):
            fail_after(good, monkeypatch)
            with pytest.raises(OSError, match="full"):
                second.save(target, overwrite=True)
            monkeypatch.undo()
        assert os.listdir(tmp_path) == ["d"]
        same(RankingDataset.open(folder), first)
    opened = RankingDataset.open(folder)
    opened.select([1]).save(folder, overwrite=True)
    same(RankingDataset.open(folder), first.select([1]))
    same(opened, first)  # what is mapped stays mapped
    assert os.listdir(tmp_path) == ["d"]
    other = tmp_path / "other"
    other.mkdir()
    first.save(other)  # an empty folder is as good as none
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="only a saved dataset"):
        first.save(tmp_path / "mine", overwrite=True)
    own = {"any": "other program's"}, {"format": "rankgrad dataset"}, {"format": "rankgrad dataset", "arrays": {}}, []
    for content in own:
        (tmp_path / "mine" / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="only a saved dataset"):
            first.save(tmp_path / "mine", overwrite=True)
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(ValueError, match="only a saved dataset"):
        first.save(folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "precious"
    with pytest.raises(ValueError, match="only a saved dataset"):
        first.save(tmp_path / "mine" / "thesis.txt", overwrite=True)
    with pytest.raises(ValueError, match="not JSON"):
        RankingDataset(**GOOD, provenance={"x": object()}).save(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_link_stays_a_link_and_its_folder_is_replaced(tmp_path):
    first, second = ragged([2, 1]), ragged([3, 3], seed=1)
    folder = first.save(tmp_path / "d")
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert second.save(link, overwrite=True) == folder
    assert link.is_symlink()
    same(RankingDataset.open(folder), second)


def fail_after(good, monkeypatch):
    answers = iter([True] * good)

    def full(_):
        if not next(answers, False):
            raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)


def test_importing_the_package_loads_no_heavy_one():
    code = "import sys, rankgrad.data; print([m for m in ('numba', 'pyarrow', 'pandas', 'polars') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
