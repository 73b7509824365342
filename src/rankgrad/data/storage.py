"""The folder a dataset is saved in: one .npy file per array and a JSON manifest a person can read.

This file may write and read such folders; it does not know what the arrays mean. A folder appears complete or not at
all, and what is opened is what was saved: sizes, types, shapes and checksums are compared with the manifest.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "rankgrad dataset"
VERSION = 1
MANIFEST = "manifest.json"
CHUNK = 1 << 24  # bytes handed to one write
FULL_CHECK = 1 << 24  # features up to this many bytes are checked completely on opening
BLOCKS, BLOCK = 64, 4096  # larger ones in this many evenly spaced blocks of this many bytes


def write_folder(
    target: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], *, overwrite: bool = False
) -> Path:
    """Write arrays and JSON-able facts into a new folder, atomically.

    An existing folder is refused unless it is empty, or holds a saved dataset and `overwrite` is given.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not overwrite:
            raise ValueError(
                f"{target} exists; expected a new or empty folder; choose another or pass overwrite=True"
            )
        if not (target / MANIFEST).is_file():
            raise ValueError(
                f"{target} exists and holds no {MANIFEST}; only a saved dataset is overwritten; remove it yourself"
            )
    target = target.absolute()  # a folder such as "." has no name of its own
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    building.mkdir()  # beside the target: renaming is atomic within a file system only
    try:
        entries = {name: _write_array(building / f"{name}.npy", array) for name, array in arrays.items()}
        _write_manifest(
            building / MANIFEST, {"format": FORMAT, "version": VERSION, **facts, "arrays": entries}
        )
        if target.exists() and any(target.iterdir()):
            old = building.with_name(building.name + ".old")
            target.rename(old)
            building.rename(target)
            shutil.rmtree(old)
        else:
            building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return target


def read_folder(source: Path, *, verify: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays mapped read-only into memory, and the manifest; a ValueError names what does not agree.

    `verify` compares every byte; without it `features` above 16 MiB are compared in 64 blocks of 4 KiB.
    """
    manifest = _read_manifest(source / MANIFEST)
    arrays = {}
    for name, entry in manifest["arrays"].items():
        path = source / f"{name}.npy"
        arrays[name] = _map_array(path, entry)
        sampled = name == "features" and entry["bytes"] > FULL_CHECK and not verify
        kind = "sampled_crc32" if sampled else "crc32"
        if (_sampled_crc32 if sampled else _crc32)(arrays[name]) != entry[kind]:
            raise ValueError(
                f"{path} has been changed or damaged: its checksum is not that of {MANIFEST}; prepare it again"
            )
    return arrays, manifest


def _write_array(path: Path, array: np.ndarray) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        data = _bytes(array)
        for start in range(0, len(data), CHUNK):
            file.write(data[start : start + CHUNK])
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "bytes": size,
        "crc32": _crc32(array),
        "sampled_crc32": _sampled_crc32(array),
    }


def _map_array(path: Path, entry: Mapping[str, Any]) -> np.ndarray:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {MANIFEST} lists it; prepare the data again") from None
    if size != entry["bytes"]:
        raise ValueError(f"{path} has {size} bytes; {MANIFEST} says {entry['bytes']}; prepare the data again")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError) as error:
        raise ValueError(f"{path} is not a .npy file: {error}; prepare the data again") from error
    if (
        array.dtype.str != entry["dtype"]
        or list(array.shape) != entry["shape"]
        or not array.flags.c_contiguous
    ):
        raise ValueError(
            f"{path} is {array.dtype.str} {list(array.shape)}; {MANIFEST} says {entry['dtype']} {entry['shape']}; "
            "prepare the data again"
        )
    return array


def _write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        content = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the dataset's provenance cannot be written as JSON: {error}; expected plain values"
        ) from error
    # The manifest's own checksum is that of the parsed content, so that reformatting the file does no harm.
    signed = {**json.loads(content), "manifest_crc32": _manifest_crc32(json.loads(content))}
    with path.open("w", encoding="utf-8") as file:
        json.dump(signed, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path.parent} holds no {MANIFEST}; expected a folder written by save()") from None
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}; prepare the data again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe a {FORMAT}; expected a folder written by save()")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {manifest.get('version')}; this rankgrad reads version {VERSION}; "
            "prepare the data again or use the rankgrad that wrote it"
        )
    if manifest.pop("manifest_crc32", None) != _manifest_crc32(manifest):
        raise ValueError(
            f"{path} has been changed or damaged: its own checksum does not agree; prepare the data again"
        )
    return manifest


def _manifest_crc32(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(_bytes(array))


def _sampled_crc32(array: np.ndarray) -> int:
    data, checksum = _bytes(array), 0
    for start in np.linspace(0, max(0, len(data) - BLOCK), BLOCKS).astype(np.int64).tolist():
        checksum = zlib.crc32(data[start : start + BLOCK], checksum)
    return checksum
