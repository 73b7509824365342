"""ONNX: one file with the graph, its weights and facts about it."""

import contextlib
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad.export.program import exported_program
from rankgrad.files import parsed_json
from rankgrad.ranker import Ranker

OPSET = 18  # what torch's exporter is written for; runtimes of 2023 and later know it
FACTS, CHECKSUM = "rankgrad", "rankgrad.sha256"  # of the file's metadata
BLANK = "0" * 64  # the checksum is that of the file with this in its place
NEEDED = "ONNX needs onnx, onnxscript and onnxruntime; pip install 'rankgrad[onnx]'"


def write_onnx(ranker: Ranker, path: Path, facts: dict[str, Any]) -> None:
    """Write the ranker; inputs `features` [documents, F] float32 and `sizes` [lists] int64, output `scores` [documents]."""
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch's exporter needs it, and says so less clearly)
    except ImportError as error:
        raise ImportError(NEEDED) from error
    with _quiet():
        program = torch.onnx.export(
            exported_program(ranker),
            dynamo=True,
            opset_version=OPSET,
            input_names=["features", "sizes"],
            output_names=["scores"],
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    model.producer_name, model.producer_version = "rankgrad", facts["versions"]["rankgrad"]
    for place, names in ((model.graph.input, ("documents", "lists")), (model.graph.output, ("documents",))):
        for value, name in zip(place, names):
            value.type.tensor_type.shape.dim[0].dim_param = name
    del model.metadata_props[:]
    facts = facts | {"opset": OPSET, "versions": facts["versions"] | {"onnx": onnx.__version__}}
    for key, value in ((FACTS, json.dumps(facts)), (CHECKSUM, BLANK)):
        model.metadata_props.add(key=key, value=value)
    blank = model.SerializeToString()
    path.write_bytes(_filled(blank, hashlib.sha256(blank).hexdigest(), BLANK))


def session(path: Path, threads: int = 1) -> Any:
    """An onnxruntime session of a file, on the CPU."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(NEEDED) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4  # what is wrong is raised
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx_scores(path: Path) -> Any:
    """(features, sizes) -> scores by onnxruntime."""
    run = session(path).run
    return lambda features, sizes: run(None, {"features": features, "sizes": np.asarray(sizes, np.int64)})[0]


def read_onnx(path: Path) -> dict[str, Any]:
    """The facts in a file, after a look at its checksum."""
    content = path.read_bytes()
    mark = CHECKSUM.encode() + b"\x12\x40"  # protobuf: the second field of the entry, 64 bytes long
    begin = content.rfind(mark) + len(mark)
    found = content[begin : begin + 64].decode("ascii", errors="replace")
    wrong = ValueError(
        f"{path} is cut short, damaged or not written by `rankgrad export`; expected its ONNX; export it again"
    )
    if mark not in content or hashlib.sha256(_filled(content, BLANK, found)).hexdigest() != found:
        raise wrong
    try:
        import onnx
    except ImportError as error:
        raise ImportError(NEEDED) from error
    try:
        entries = {entry.key: entry.value for entry in onnx.load_model_from_string(content).metadata_props}
        return {**parsed_json(entries[FACTS]), "checksum": found}
    except Exception:  # protobuf has errors of its own
        raise wrong from None


def _filled(content: bytes, new: str, old: str) -> bytes:
    """The file with another checksum."""
    mark = CHECKSUM.encode() + b"\x12\x40"
    return content.replace(mark + old.encode(), mark + new.encode())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on packages that are not installed, and its warnings about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
