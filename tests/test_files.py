"""Files that are whole or refused, and equal bytes for equal contents."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from rankgrad.files import load_tensors, pack, save_tensors, write_atomically


def tensors(value):
    return {
        "a": torch.full((3, 4), float(value)),
        "b": torch.tensor(value),
        "c": torch.zeros(0, 2),
        "d": torch.ones(5, dtype=torch.bfloat16).expand(2, 5),
    }


def test_what_is_saved_comes_back(tmp_path):
    facts = {"loss": 0.1 + 0.2, "best": None, "words": "Füße 😀", "ids": [1, "b"]}
    save_tensors(tmp_path / "x.safetensors", tensors(7), facts)
    back, words = load_tensors(tmp_path / "x.safetensors")
    assert words == facts
    assert back.keys() == tensors(7).keys()
    for name, tensor in tensors(7).items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)


def test_equal_contents_give_equal_bytes():
    """safetensors writes several entries of metadata in random order: all facts are in one."""
    facts = {f"fact {number}": number for number in range(20)}
    assert len({pack(tensors(7), facts) for _ in range(20)}) == 1
    assert pack(tensors(7), facts) != pack(tensors(7), {**facts, "fact 3": 4})


def test_a_file_with_three_entries_of_metadata_still_opens(tmp_path):
    """As files were written before the facts had one entry."""
    packed = pack(tensors(7), {"epoch": 3})
    size = int.from_bytes(packed[:8], "little")
    entry = json.loads(json.loads(packed[8 : 8 + size])["__metadata__"]["rankgrad"])
    path = tmp_path / "x.safetensors"
    plain = {name: tensor.contiguous() for name, tensor in tensors(7).items()}
    save_file(plain, path, metadata={**entry, "format": str(entry["format"])})
    back, facts = load_tensors(path)
    assert facts == {"epoch": 3} and torch.equal(back["a"], tensors(7)["a"])
    save_file(plain | {"b": torch.tensor(8)}, path, metadata={**entry, "format": str(entry["format"])})
    with pytest.raises(ValueError, match="x.safetensors.*checksum"):
        load_tensors(path)


def test_every_changed_byte_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.arange(4.0), "b": torch.ones(1, dtype=torch.int64)}, {"epoch": 3})
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in (0, 5):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="x.safetensors"):
                load_tensors(path)


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.arange(4.0)}, {"epoch": 3})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="x.safetensors is cut short"):
            load_tensors(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="x.safetensors.*format None.*1"):
        load_tensors(path)
    with pytest.raises(ValueError, match="y.safetensors does not exist"):
        load_tensors(tmp_path / "y.safetensors")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device.*left as it was") as caught:
            write_atomically(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
