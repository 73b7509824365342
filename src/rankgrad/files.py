"""Tensors and a few words on disk: safetensors with a checksum, written atomically. No pickle is ever loaded.

A file appears whole or not at all, and one that was cut or changed later is refused by name. `Rotation` keeps the file
before the last one too, so that a run always has a good one to go back to. Imports nothing of rankgrad.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

FORMAT = 1


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after any crash either the old or the new content is there, whole."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; the file was left as it was", str(path)) from None
    _settle(path.parent)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts into one safetensors file."""
    write_atomically(path, pack(tensors, facts))


def load_tensors(path: Path, mend: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote, or a ValueError that names the file and, as `mend`, what to do."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected a file written by rankgrad{mend}")
    try:
        return unpack(path.read_bytes(), str(path))
    except ValueError as error:
        raise ValueError(f"{error}{mend}") from None


def pack(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Tensors and JSON-able facts as the bytes of a safetensors file."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    words = json.dumps(facts)
    return save(plain, metadata={"format": str(FORMAT), "facts": words, "checksum": _checksum(plain, words)})


def unpack(content: bytes, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `pack` was given, or a ValueError that says what is wrong with `name`."""
    try:
        tensors = load(content)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, LookupError, AssertionError, RuntimeError) as error:
        raise ValueError(f"{name} is cut short or damaged ({error}); expected a file written by rankgrad") from None
    if header.get("format") != str(FORMAT) or not {"facts", "checksum"} <= header.keys():
        raise ValueError(f"{name} is of format {header.get('format')!r}; expected {FORMAT}, written by rankgrad")
    if header["checksum"] != _checksum(tensors, header["facts"]):
        raise ValueError(f"{name} was damaged after it was written: its checksum does not match")
    return tensors, json.loads(header["facts"])


class Rotation:
    """Two generations of one checkpoint in a folder: the last and the one before.

    A crash may leave a third, written and not yet in its place: `load` looks at it first and puts it there.
    """

    def __init__(self, folder: Path) -> None:
        self.next = folder / "checkpoint.next.safetensors"
        self.last = folder / "checkpoint.safetensors"
        self.before = folder / "checkpoint.previous.safetensors"
        self._damaged: list[Path] = []

    def exists(self) -> bool:
        """Whether there is anything to load, good or bad."""
        return any(path.exists() for path in (self.next, self.last, self.before))

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a new generation; the last one becomes the one before, unless it was found damaged."""
        save_tensors(self.next, tensors, facts)
        self._turn()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
        """The newest good generation, and a sentence for each newer one that was not good."""
        complaints: list[str] = []
        for path in (self.next, self.last, self.before):
            if path.exists():
                try:
                    tensors, facts = load_tensors(path)
                except ValueError as error:
                    complaints.append(str(error))
                    self._damaged.append(path)
                    continue
                if path == self.next:
                    self._turn()
                return tensors, facts, complaints
        raise ValueError("; ".join(complaints) or f"{self.last} does not exist; expected a checkpoint of a run")

    def _turn(self) -> None:
        """Put the file that has been written in its place."""
        if self.last.exists() and self.last not in self._damaged:
            self.last.replace(self.before)
        self.next.replace(self.last)
        _settle(self.last.parent)
        self._damaged.clear()


def _settle(folder: Path) -> None:
    """Make renames last through a power cut."""
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
