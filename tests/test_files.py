"""Files that are whole or refused, and a generation to go back to."""

import os

import pytest
import torch

from rankgrad.files import Rotation, load_tensors, save_tensors, write_atomically


def tensors(value):
    return {
        "a": torch.full((3, 4), float(value)),
        "b": torch.tensor(value),
        "c": torch.zeros(0, 2),
        "d": torch.ones(5, dtype=torch.bfloat16).expand(2, 5),
    }


def generation(folder):
    return Rotation(folder).load()[1]["epoch"]


@pytest.fixture
def rotation(tmp_path):
    rotation = Rotation(tmp_path)
    for epoch in (1, 2, 3):
        rotation.save(tensors(epoch), {"epoch": epoch})
    return rotation


def test_what_is_saved_comes_back(tmp_path):
    facts = {"loss": 0.1 + 0.2, "best": None, "words": "Füße 😀", "ids": [1, "b"]}
    save_tensors(tmp_path / "x.safetensors", tensors(7), facts)
    back, words = load_tensors(tmp_path / "x.safetensors")
    assert words == facts
    assert back.keys() == tensors(7).keys()
    for name, tensor in tensors(7).items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)


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
        with pytest.raises(ValueError, match="x.safetensors is cut short or damaged"):
            load_tensors(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="x.safetensors is of format None; expected 1"):
        load_tensors(path)
    with pytest.raises(ValueError, match="y.safetensors does not exist"):
        load_tensors(tmp_path / "y.safetensors")


def test_the_newest_good_generation_is_loaded(rotation, tmp_path):
    assert generation(tmp_path) == 3 and Rotation(tmp_path).load()[2] == []
    assert load_tensors(rotation.before)[1] == {"epoch": 2}


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_a_damaged_generation_is_named_and_the_one_before_used(rotation, tmp_path, damage):
    content = rotation.last.read_bytes()
    flipped = bytearray(content)
    flipped[-3] ^= 4
    rotation.last.write_bytes({"empty": b"", "cut": content[:-7], "flipped": bytes(flipped)}[damage])
    back, facts, complaints = Rotation(tmp_path).load()
    assert facts == {"epoch": 2} and torch.equal(back["a"], tensors(2)["a"])
    assert len(complaints) == 1 and str(rotation.last) in complaints[0]


def test_a_damaged_generation_never_replaces_a_good_one(rotation, tmp_path):
    rotation.last.write_bytes(b"")
    again = Rotation(tmp_path)
    again.load()
    again.save(tensors(3), {"epoch": 3})
    assert generation(tmp_path) == 3
    rotation.last.write_bytes(b"")
    assert generation(tmp_path) == 2


def test_no_good_generation_is_an_error_that_names_them(rotation, tmp_path):
    for path in (rotation.last, rotation.before):
        path.write_bytes(b"no")
    with pytest.raises(ValueError, match="checkpoint.safetensors is cut.*checkpoint.previous.safetensors is cut"):
        Rotation(tmp_path).load()
    with pytest.raises(ValueError, match="does not exist"):
        Rotation(tmp_path / "elsewhere").load()


@pytest.mark.parametrize("number", range(1, 7))
def test_a_crash_anywhere_in_saving_leaves_the_old_or_the_new(rotation, tmp_path, monkeypatch, number):
    class CrashError(Exception):
        pass

    count = 0

    def watched(function):
        def call(*arguments):
            nonlocal count
            count += 1
            if count == number:
                raise CrashError
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched(os.fsync))
        patch.setattr("pathlib.Path.replace", watched(type(tmp_path).replace))
        with pytest.raises(CrashError):
            rotation.save(tensors(4), {"epoch": 4})
    found, complaints = Rotation(tmp_path).load()[1:]
    assert found == {"epoch": 3 if number <= 2 else 4} and not complaints
    after = Rotation(tmp_path)
    after.load()
    after.save(tensors(5), {"epoch": 5})
    assert generation(tmp_path) == 5 and len(list(tmp_path.iterdir())) == 2
    after.last.write_bytes(b"")
    assert generation(tmp_path) in (3, 4)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device; the file was left as it was") as caught:
            write_atomically(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
