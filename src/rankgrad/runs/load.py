"""A trained ranker from wherever it lies."""

import os
from pathlib import Path

from rankgrad.ranker import Ranker
from rankgrad.runs.folder import read_ranker


def load(path: str | os.PathLike[str], device: str = "auto") -> Ranker:
    """The ranker of a finished run, or of a file that `NeuralRanker.save` or `Ranker.save` wrote; no code of theirs is executed.

    - `path`: the run's folder, or the file.
    - `device`: where it scores: "cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one.
    """
    source = Path(path)
    return read_ranker(source, device) if source.is_dir() else Ranker.load(source, device)
