"""A trained ranker from wherever it lies."""

import contextlib
import dataclasses
import os
from pathlib import Path

from rankgrad.ranker import Ranker
from rankgrad.runs.folder import read_ranker, read_report


def load(path: str | os.PathLike[str], device: str = "auto") -> Ranker:
    """The ranker of a finished run, or of a file that `NeuralRanker.save` or `Ranker.save` wrote; no code of theirs is executed.

    - `path`: the run's folder, or the file.
    - `device`: where it scores: "cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one.
    """
    source = Path(path)
    if not source.is_dir():
        return Ranker.load(source, device)
    ranker = read_ranker(source, device)
    report = {}
    with contextlib.suppress(ValueError):  # a ranker needs no report: a run that was cut short after training has none
        report = read_report(source)
    known = {key: report[key] for key in ("commit", "versions", "machine") if key in report}
    facts = {**ranker.facts, "provenance": {**ranker.facts.get("provenance", {}), **known}}
    return dataclasses.replace(ranker, facts=facts)
