"""A trained ranker from wherever it lies."""

import dataclasses
import os
import warnings
from pathlib import Path

from rankgrad.ranker import Ranker
from rankgrad.runs.folder import is_finished, read_ranker, read_report
from rankgrad.training.network import OwnModel


def load(path: str | os.PathLike[str], device: str = "auto", *, model: OwnModel = None) -> Ranker:
    """The ranker of a finished run, or of a file that `NeuralRanker.save` or `Ranker.save` wrote; no code of theirs is executed.

    - `path`: the run's folder, or the file.
    - `device`: where it scores: "cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one.
    - `model`: the network of your own that it was trained with, an `nn.Module` or its class: files hold weights, not code.
    """
    source = Path(path)
    if not source.is_dir():
        return Ranker.load(source, device, model=model)
    ranker = read_ranker(source, device, model)
    report = {}
    if is_finished(source):  # a ranker needs no report: a run that was cut short after training has none
        try:
            report = read_report(source)
        except ValueError as error:
            warnings.warn(f"{error}; the ranker is loaded without what it says of its origin", stacklevel=2)
    known = {key: report[key] for key in ("commit", "versions", "machine") if key in report}
    facts = {**ranker.facts, "provenance": {**ranker.facts.get("provenance", {}), **known}}
    return dataclasses.replace(ranker, facts=facts)
