"""torch.export: the graph as a program that torch runs without rankgrad, in a .pt2 file with facts about it."""

import hashlib
import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from rankgrad.export.graph import ScoringGraph
from rankgrad.files import parsed_json
from rankgrad.ranker import Ranker

FACTS = "extra/rankgrad.json"  # within the archive


def exported_program(ranker: Ranker) -> ExportedProgram:
    """The ranker's graph for any number of documents and lists; a ValueError names what torch.export cannot carry."""
    graph = ScoringGraph(ranker)
    example = torch.zeros(7, ranker.features), torch.tensor([4, 2, 1])
    every = {0: Dim.DYNAMIC}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(graph, example, dynamic_shapes=(every, every))
    except Exception as error:  # torch has no one class for what its tracer refuses
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch.export cannot carry the model {type(graph.model).__name__} ({type(error).__name__}: {said}); expected one "
            "without Python control flow on values; see torch.export's documentation"
        ) from error


def write_program(ranker: Ranker, path: Path, facts: dict[str, Any]) -> None:
    """Write the ranker as torch.export.save does; `torch.export.load(path).module()(features, sizes)` scores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = io.BytesIO()  # torch's own writer does not say why a disk takes no more
        torch.export.save(exported_program(ranker), content)
    with zipfile.ZipFile(content, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        known = facts | {"checksum": _digest(archive)}
        archive.writestr(f"{folder}/{FACTS}", json.dumps(known))
    path.write_bytes(content.getvalue())


def program_scores(path: Path) -> Any:
    """(features, sizes) -> scores by torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.export.load(str(path)).module()

    def scores(features: Any, sizes: Any) -> Any:
        with torch.no_grad():
            return module(torch.from_numpy(features), torch.from_numpy(np.asarray(sizes, np.int64))).numpy()

    return scores


def read_program(path: Path) -> dict[str, Any]:
    """The facts in a file, after a look at its checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise zipfile.BadZipFile("torch compresses nothing, and this unpacks to more than it is")
            name = next(name for name in archive.namelist() if name.endswith(FACTS))
            facts = parsed_json(archive.read(name))
            whole = _digest(archive) == facts.get("checksum")
    except (zipfile.BadZipFile, StopIteration, ValueError, OSError):
        whole = False
    if not whole:
        raise ValueError(
            f"{path} is cut short, damaged or not written by `rankgrad export`; expected its .pt2; export it again"
        )
    return facts


def _digest(archive: zipfile.ZipFile) -> str:
    """Of all that torch wrote into the archive."""
    digest = hashlib.sha256()
    for name in sorted(archive.namelist()):
        if not name.endswith(FACTS):
            digest.update(f"{name} ".encode() + archive.read(name))
    return digest.hexdigest()
