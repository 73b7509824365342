"""XGBoost's JSON, by distilling: trees that learn the scores of a run, for search engines that take trees."""

import os
import tempfile
from pathlib import Path
from typing import Any

from rankgrad.export.write import expect_new_file
from rankgrad.files import write_atomically
from rankgrad.runs.distil import distil
from rankgrad.runs.ensemble import open_run
from rankgrad.runs.run import Finished
from rankgrad.runs.trees import TreeRun


def export_trees(run: Path, target: Path, data: str | None, *, overwrite: bool = False) -> dict[str, Any]:
    """Distil a run into XGBoost's trees and write their file; `data` None: the lists it was trained on. What was written."""
    expect_new_file(target, overwrite=overwrite)
    teacher = open_run(run)
    if isinstance(teacher, TreeRun) and teacher.config.model.kind == "xgboost":
        raise ValueError(
            f"{run} holds trees of XGBoost already; expected another run; take the model*.json in its folder"
        )
    source = data or teacher.config.data.path
    if data is None and not (os.path.exists(source) or source.startswith("synthetic")):
        raise ValueError(
            f"the lists that {run} was trained on, {source}, are not there; expected lists to learn its scores on; name them with --data"
        )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "trees"
        events = [*distil([run], source, "xgboost", place)]
        finished = events[-1]
        assert isinstance(finished, Finished)
        write_atomically(target, (place / "model.json").read_bytes())
    return {
        "file": str(target),
        "format": "xgboost",
        "bytes": target.stat().st_size,
        "features": teacher.features,
        "feature_names": None if teacher.names is None else list(teacher.names),
        "distilled": finished.report["distilled"],
    }
