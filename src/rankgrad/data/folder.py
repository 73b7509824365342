"""The folder a dataset is saved in: one .npy file per array, to be mapped into memory, and a JSON manifest to read.

A folder appears complete or not at all, and what is opened is what was saved: sizes and checksums are compared with the
manifest.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rankgrad.data.feature_rows import FeatureRows, Features
from rankgrad.files import expect_no_holes, parsed_json, read_text_file, refuse_links, replacing, sealed, unsealed

FORMAT = "rankgrad dataset"
VERSION = 1
MANIFEST = "manifest.json"
SUMMARY = "summary.txt"  # of a folder of splits, which `prepare` writes last
FULL_CHECK = 1 << 24  # features up to this many bytes are checked completely on opening
BLOCKS, BLOCK = 64, 4096  # larger ones in this many evenly spaced blocks of this many bytes


def write_folder(
    target: Path, arrays: Mapping[str, Features], facts: Mapping[str, Any], *, overwrite: bool = False
) -> Path:
    """Write arrays and JSON-able facts into a new folder, atomically.

    An existing folder is refused unless it is empty, or holds a saved dataset, nothing else, and `overwrite` is given.
    """
    target = target.resolve()  # a link stays and its folder is replaced; "." has no name of its own
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not overwrite:
            raise ValueError(f"{target} exists; expected a new or empty folder; choose another or pass overwrite=True")
        if not is_saved(target):
            raise ValueError(
                f"{target} holds other things than a saved dataset; only a saved dataset is overwritten; "
                "choose another folder or remove it yourself"
            )
    with replacing(target) as building:
        entries = {name: _write_array(building / f"{name}.npy", array) for name, array in arrays.items()}
        _write_manifest(building / MANIFEST, {"format": FORMAT, "version": VERSION, **facts, "arrays": entries})
    return target


def is_saved(folder: Path) -> bool:
    """Whether a folder is a saved dataset, of any version and perhaps damaged, and holds nothing else."""
    try:
        manifest = parsed_json(read_text_file(folder / MANIFEST))
        if manifest["format"] != FORMAT:
            return False
        own = {MANIFEST, *(f"{name}.npy" for name in manifest["arrays"])}
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return all(path.name in own and path.is_file() for path in folder.iterdir())


def read_folder(source: Path, *, verify: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays mapped read-only into memory, and the manifest; a ValueError names what does not agree.

    `verify` compares every byte; without it `features` above 16 MiB are compared in 64 blocks of 4 KiB.
    """
    manifest = read_manifest(source)
    arrays = manifest["arrays"]
    if not isinstance(arrays, dict) or not all(_is_entry(entry) for entry in arrays.values()):
        raise ValueError(f"{source / MANIFEST} does not say what the arrays are; expected a folder written by save()")
    for name, entry in arrays.items():
        path = source / f"{name}.npy"
        if not name.isidentifier():  # ../ leads out of the folder
            raise ValueError(f"{source / MANIFEST} names an array {name!r}; expected a word; prepare the data again")
        if not path.is_file():
            raise ValueError(f"{path} is missing; {MANIFEST} lists it; prepare the data again")
        size = expect_no_holes(path)
        if size != entry["bytes"]:
            raise ValueError(f"{path} has {size} bytes; {MANIFEST} says {entry['bytes']}; prepare the data again")
        if name == "features" and size > FULL_CHECK and not verify:
            good = _sampled_crc32(path) == entry["sampled_crc32"]
        else:
            good = _crc32(path) == entry["crc32"]
        if not good:
            raise ValueError(f"{path} is damaged: its checksum is not that of {MANIFEST}; prepare the data again")
    # The checksums cover the headers too, so what is loaded now has the types and shapes that were saved.
    return {name: _mapped(source / f"{name}.npy") for name in arrays}, manifest


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and {"bytes", "crc32", "sampled_crc32"} <= entry.keys()


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's reader of headers lets through whatever Python's parser raises
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no array that NumPy reads: {reason:.200}; prepare the data again") from error


def _write_array(path: Path, array: Features) -> dict[str, Any]:
    with path.open("wb") as file:
        if isinstance(array, FeatureRows):
            write_header(file, array.shape)
            for _, block in array.blocks():
                file.write(np.ascontiguousarray(block).data)
        else:
            np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "bytes": path.stat().st_size,
        "crc32": _crc32(path),
        "sampled_crc32": _sampled_crc32(path),
    }


def write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    """The beginning of a .npy file of float32, as np.save writes it; the rows follow."""
    facts = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)


def _write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        plain = json.loads(json.dumps(manifest, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the provenance is not JSON: {error}; expected texts, numbers and lists of them") from error
    with path.open("wb") as file:
        file.write(sealed(plain))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a saved dataset says about itself: format, version and checksum verified, arrays not looked at."""
    path = folder / MANIFEST
    refuse_links(folder)
    try:
        content = read_text_file(path)
        manifest = parsed_json(content)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ValueError(f"{path.parent} holds no {MANIFEST}; expected a folder written by save()") from None
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}; prepare the data again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "arrays" not in manifest:
        raise ValueError(f"{path} does not describe a {FORMAT}; expected a folder written by save()")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {manifest.get('version')}; this rankgrad reads version {VERSION}; "
            "prepare the data again or use the rankgrad that wrote it"
        )
    try:
        before = manifest.pop("manifest_crc32", None)  # of earlier versions, in place of the checksum of all bytes
        good = before == _manifest_crc32(manifest) if before is not None else bool(unsealed(content))
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{path} was changed or damaged: its own checksum differs; prepare the data again")
    return manifest


def _manifest_crc32(manifest: Mapping[str, Any]) -> int:
    """Of the content, not of the text."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    return (
        zlib.crc32(np.memmap(path, np.uint8, mode="r").data) if path.stat().st_size else 0
    )  # nothing cannot be mapped


def _sampled_crc32(path: Path) -> int:
    data, checksum = np.memmap(path, np.uint8, mode="r"), 0
    for start in np.linspace(0, max(0, len(data) - BLOCK), BLOCKS).astype(np.int64):
        checksum = zlib.crc32(data[start : start + BLOCK].data, checksum)
    return checksum
