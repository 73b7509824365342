"""The door: a ranker into a file of a format, run and compared before it gets its name."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rankgrad import __version__
from rankgrad.checks import one_of
from rankgrad.export.check import agreement
from rankgrad.export.onnx import onnx_scores, read_onnx, write_onnx
from rankgrad.export.program import program_scores, read_program, write_program
from rankgrad.export.solr import solr_scores, write_solr
from rankgrad.files import beside, fsync_folder
from rankgrad.ranker import Ranker


class Format(NamedTuple):
    """How a ranker is written, and how the file is run again."""

    suffix: str
    write: Callable[[Ranker, Path, dict[str, Any]], None]
    scores: Callable[[Path], Any]
    missing: bool = True  # whether features may be missing or huge


FORMATS = {
    "onnx": Format(".onnx", write_onnx, onnx_scores),
    "torch": Format(".pt2", write_program, program_scores),
    "solr": Format(".json", write_solr, solr_scores, missing=False),
}


def export_ranker(
    ranker: Ranker, path: str | os.PathLike[str], form: str = "onnx", *, overwrite: bool = False
) -> dict[str, Any]:
    """Write a ranker for other programs, everything inside: scaling, list-relative inputs, averaged members. What was written.

    - `ranker`: what `rankgrad.load` gives.
    - `path`: of the new file.
    - `form`: "onnx", "torch" (a .pt2 file of torch.export), or "solr" (JSON of a NeuralNetworkModel).
    - `overwrite`: replace a file that exists.

    ONNX and torch take features [documents, F] float32 and sizes [lists] int64, how many rows each list has, and give scores
    [documents]. A column of categories holds the place of the text in the list that the file's facts have of it, from 0; any other
    number is an unknown text, and NaN a missing one. The file is run on 256 lists, with missing, huge and equal features and 1,000 documents among them, before
    it gets its name; one that scores differently by more than 1e-5 max(1, |score|) is not left behind.
    """
    target, kind = Path(path), FORMATS[one_of("form", form, FORMATS)]
    expect_new_file(target, overwrite=overwrite)
    facts = describe(ranker)
    with beside(target) as folder:
        file = folder / target.name
        kind.write(ranker, file, facts)
        found = agreement(ranker, kind.scores(file), missing=kind.missing)
        with file.open("rb+") as written:
            os.fsync(written.fileno())
        file.replace(target)
    fsync_folder(target.parent)
    return {"file": str(target), "format": form, "bytes": target.stat().st_size, "checked": found._asdict(), **facts}


def expect_new_file(target: Path, *, overwrite: bool) -> None:
    """Refuse a file that exists, unless it may be replaced, a device, which may never be, and a folder that does not exist."""
    if target.exists() and not (overwrite and target.is_file()):
        rest = ", or --overwrite" if target.is_file() else ""
        raise ValueError(f"{target} exists already; expected a new file; choose another --out{rest}")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder; expected one to write {target.name} into; make it first")


def describe(ranker: Ranker) -> dict[str, Any]:
    """What a program that loads the file may want to know of it."""
    digest = hashlib.sha256(json.dumps(ranker.description(), sort_keys=True).encode())
    for name, tensor in sorted(ranker.tensors().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    names = ranker.names or range(ranker.features)
    return {
        "features": ranker.features,
        "categories": {str(names[column]): list(texts) for column, texts in ranker.scaling.levels.items()},
        "feature_names": None if ranker.names is None else list(ranker.names),
        "model": type(ranker.model).__name__,
        "loss": ranker.config.loss.title,
        "scaling": ranker.scaling.kind,
        "ranker": digest.hexdigest(),
        "versions": {"rankgrad": __version__, "torch": torch.__version__},
    }


def read_export(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts that an .onnx or .pt2 file holds: feature names, versions, opset, checksums; a damaged file is refused.

    - `path`: what `rankgrad export` wrote.
    """
    source = Path(path)
    if not source.is_file():
        raise ValueError(f"{source} does not exist; expected a file that `rankgrad export` wrote")
    readers = {".onnx": read_onnx, ".pt2": read_program}
    if source.suffix not in readers:
        raise ValueError(f"{source} is neither .onnx nor .pt2; expected a file that `rankgrad export` wrote")
    return readers[source.suffix](source)
