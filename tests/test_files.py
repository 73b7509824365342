"""Files that are whole or refused, and equal bytes for equal contents."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rankgrad import files
from rankgrad.files import (
    beside,
    load_tensors,
    locked,
    pack,
    read_text_file,
    refuse_links,
    replacing,
    save_tensors,
    write_atomically,
)


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


# --- one process at a time --------------------------------------------------------------------------------------------


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def fill(target, text):
    with replacing(target) as building:
        (building / "a.txt").write_text(text)


@pytest.mark.parametrize("exchanged", [True, False], ids=["exchanged", "in two moves"])
def test_a_folder_is_replaced_and_nothing_stays_beside_it(tmp_path, monkeypatch, exchanged):
    if not exchanged:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    for text in ("first", "second", "third"):
        fill(tmp_path / "x", text)
        assert contents(tmp_path) == {"x/a.txt": text}
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "x") as building:
        (building / "a.txt").write_text(f"half {1 / 0}")
    assert contents(tmp_path) == {"x/a.txt": "third"} and [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_process_left_does_not_pile_up(tmp_path):
    (tmp_path / ".x.building" / "deep").mkdir(parents=True)
    (tmp_path / ".x.building" / "deep" / "half").write_text("half")
    (tmp_path / ".x.building" / "link").symlink_to(tmp_path)
    fill(tmp_path / "x", "whole")
    assert contents(tmp_path) == {"x/a.txt": "whole"}
    (tmp_path / ".y.writing").write_text("longer than what is written now")
    write_atomically(tmp_path / "y", b"short")
    assert contents(tmp_path) == {"x/a.txt": "whole", "y": "short"}


def test_killed_between_two_moves_the_old_folder_comes_back(tmp_path):
    fill(tmp_path / "x", "old")
    (tmp_path / "x").rename(tmp_path / ".x.old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "x"):
        raise ZeroDivisionError
    assert contents(tmp_path) == {"x/a.txt": "old"} and [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_second_is_refused_until_the_first_has_ended(tmp_path):
    fill(tmp_path / "x", "old")
    with locked(tmp_path / "x"):
        for attempt in (lambda: fill(tmp_path / "x", "new"), lambda: locked(tmp_path / "x").__enter__()):
            with pytest.raises(ValueError, match=r"/x is in use.*another process"):
                attempt()
        fill(tmp_path / "y", "another folder")
    with replacing(tmp_path / "z"), pytest.raises(ValueError, match=r"/z is in use"), beside(tmp_path / "z"):
        pass
    fill(tmp_path / "x", "new")
    assert contents(tmp_path) == {"x/a.txt": "new", "y/a.txt": "another folder"}


def test_two_that_write_one_file_do_not_mix(tmp_path):
    path = tmp_path / "x"

    def slowly():
        yield b"first "
        with pytest.raises(ValueError, match=r"/x is in use"):
            write_atomically(path, b"second")
        yield b"whole"

    write_atomically(path, slowly())
    assert contents(tmp_path) == {"x": "first whole"}


def test_a_link_in_the_way_is_not_written_through(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / ".x.writing").symlink_to(tmp_path / "elsewhere")
    write_atomically(tmp_path / "x", b"new")
    assert contents(tmp_path) == {"elsewhere": "mine", "x": "new"} and not (tmp_path / ".x.writing").exists()


@pytest.mark.parametrize("make", ["pipe", "hard link"])
def test_a_file_of_somebody_else_in_the_way_is_not_written(tmp_path, make):
    (tmp_path / "elsewhere").write_text("mine")
    half = tmp_path / ".x.writing"
    os.mkfifo(half) if make == "pipe" else half.hardlink_to(tmp_path / "elsewhere")  # a pipe waits until it is read
    write_atomically(tmp_path / "x", b"new")
    assert contents(tmp_path) == {"elsewhere": "mine", "x": "new"} and not half.exists()


def test_a_link_to_the_standard_output_stays(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        link = Path(f"/dev/fd/{file.fileno()}")
        write_atomically(link, [b"a", b"b"])
    assert contents(tmp_path) == {"out": "ab"}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no memory that is a folder here")
def test_a_link_in_memory_is_replaced_as_elsewhere(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        link = Path(memory) / "x"
        link.symlink_to(tmp_path / "mine")
        write_atomically(link, b"new")
        assert not link.is_symlink() and link.read_text() == "new" and (tmp_path / "mine").read_text() == "mine"


def test_a_pipe_is_refused_where_text_is_expected(tmp_path):
    os.mkfifo(tmp_path / "x")  # reading it would wait for ever
    with pytest.raises(ValueError, match=r"/x is a pipe or a device; expected a regular file"):
        read_text_file(tmp_path / "x")


def test_links_out_of_a_folder_and_in_a_circle_are_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model").write_text("m")
    (folder / "inside").symlink_to("model")
    refuse_links(folder)
    (folder / "x").symlink_to("y")
    (folder / "y").symlink_to("x")
    with pytest.raises(ValueError, match=r"/run/[xy] is a link that leads in a circle"):
        refuse_links(folder)
    (folder / "x").unlink(), (folder / "y").unlink()
    (folder / "up").symlink_to("../other")
    with pytest.raises(ValueError, match=r"/run/up is a link to .*/other, out of its folder"):
        refuse_links(folder)


def test_a_device_stays_a_device():
    full, null = Path("/dev/full"), Path("/dev/null")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(full, b"much")
    write_atomically(null, [b"a", b"b"])
    assert full.is_char_device() and null.is_char_device()
