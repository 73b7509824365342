"""Files and folders that appear whole or not at all, and tensors with facts in checksummed safetensors.

No pickle is ever loaded. A file that was cut short or changed later is refused by name. Equal contents give equal bytes.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

FORMAT = 1
ENTRY = "rankgrad"  # of the file's metadata


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, in one or in parts, so that after any crash either the old or the new content is there, whole."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; the file was left as it was", str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder to fill beside the target; at the end it replaces the target, after an error it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    building.mkdir()  # beside the target: renaming is atomic within a file system only
    try:
        yield building
        if target.exists():
            _swap(building, target)
        else:
            building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _swap(building: Path, target: Path) -> None:
    old = building.with_name(building.name + ".old")
    target.rename(old)
    try:
        building.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts into one safetensors file."""
    write_atomically(path, pack(tensors, facts))


def load_tensors(path: Path, hint: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote, or a ValueError that names the file and, as `hint`, what to do."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected a file written by rankgrad{hint}")
    try:
        return unpack(path.read_bytes(), str(path))
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None


def pack(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Tensors and JSON-able facts as the bytes of a safetensors file."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    places = {tensor.data_ptr(): name for name, tensor in plain.items()}
    # Weights that two layers share are written for each.
    plain = {name: t if places[t.data_ptr()] == name or not t.numel() else t.clone() for name, t in plain.items()}
    words = json.dumps(facts)
    # One entry: safetensors writes several in random order, and equal runs are to leave equal files.
    entry = {"format": FORMAT, "facts": words, "checksum": _checksum(plain, words)}
    return save(plain, metadata={ENTRY: json.dumps(entry)})


def unpack(content: bytes, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `pack` was given, or a ValueError that says what is wrong with `name`."""
    try:
        tensors = load(content)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size]).get("__metadata__", {})
        entry = json.loads(header[ENTRY]) if ENTRY in header else header  # before 0.1.0 there were three entries
    except (SafetensorError, ValueError, LookupError, AssertionError, RuntimeError) as error:
        raise ValueError(f"{name} is cut short or damaged ({error}); expected a file written by rankgrad") from None
    if (
        not isinstance(entry, dict)
        or str(entry.get("format")) != str(FORMAT)
        or not {"facts", "checksum"} <= entry.keys()
    ):
        found = entry.get("format") if isinstance(entry, dict) else None
        raise ValueError(f"{name} is of format {found!r}; expected {FORMAT}, written by rankgrad")
    if entry["checksum"] != _checksum(tensors, entry["facts"]):
        raise ValueError(f"{name} was damaged after it was written: its checksum does not match")
    return tensors, json.loads(entry["facts"])


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _checksum(tensors: Mapping[str, Tensor], words: str) -> str:
    digest = hashlib.sha256(words.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
