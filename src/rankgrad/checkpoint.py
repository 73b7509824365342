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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts into one safetensors file."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    words = json.dumps(facts)
    header = {"format": str(FORMAT), "facts": words, "checksum": _checksum(plain, words)}
    write_atomically(path, save(plain, metadata=header))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote, or a ValueError that names the file."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected a file written by rankgrad")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); expected a file written by rankgrad") from None
    if header.get("format") != str(FORMAT):
        raise ValueError(f"{path} is of format {header.get('format')!r}; expected {FORMAT}, written by rankgrad")
    if header["checksum"] != _checksum(tensors, header["facts"]):
        raise ValueError(f"{path} was damaged after it was written: its checksum does not match")
    return tensors, json.loads(header["facts"])


class Rotation:
    """Two generations of one checkpoint in a folder: the last and the one before."""

    def __init__(self, folder: Path) -> None:
        self.last = folder / "checkpoint.safetensors"
        self.before = folder / "checkpoint.previous.safetensors"

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a new generation; the last one becomes the one before."""
        if self.last.exists():
            fresh = self.last.with_name("checkpoint.next.safetensors")
            save_tensors(fresh, tensors, facts)
            self.last.replace(self.before)
            fresh.replace(self.last)
        else:
            save_tensors(self.last, tensors, facts)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
        """The newest good generation, and a sentence for each that was not good."""
        complaints: list[str] = []
        for path in (self.last, self.before):
            try:
                return *load_tensors(path), complaints
            except ValueError as error:
                complaints.append(str(error))
        raise ValueError("; ".join(complaints))


def _checksum(tensors: Mapping[str, Tensor], words: str) -> str:
    digest = hashlib.sha256(words.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
