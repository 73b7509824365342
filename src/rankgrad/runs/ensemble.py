"""Several runs as one ranker: the mean of their scores, standardised within each list."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from rankgrad.data.dataset import RankingDataset
from rankgrad.files import load_tensors
from rankgrad.runs.averaging import mean_of_standardised
from rankgrad.runs.elsewhere import is_elsewhere
from rankgrad.runs.folder import TREES, read_config_table
from rankgrad.runs.run import Run, ScoringRun
from rankgrad.runs.trees import TreeRun
from rankgrad.training.config import parse_toml
from rankgrad.training.evaluate import measure, metrics_of
from rankgrad.training.network import is_own, network_name

Network = nn.Module | Callable[..., nn.Module]
ROWS = 4096  # looked at together


def open_run(folder: Path, device: str = "auto", networks: Sequence[Network] = ()) -> ScoringRun:
    """Load a finished run of networks or of trees, or a saved ranker; no code of theirs is executed.

    `networks` are those of one's own that runs were trained with: the one that this run names is taken, or the only one.
    """
    if not folder.exists():
        raise ValueError(
            f"{folder} is not a run: it does not exist; expected a folder that `rankgrad train` made, or a saved ranker; check "
            "the path"
        )
    if is_elsewhere(folder):
        raise ValueError(
            f"{folder} holds scores that another program gave, and no model to score with; expected a run; compare it and "
            "report it beside runs instead"
        )
    if (folder / TREES).is_file():
        return TreeRun.open(folder)
    return Run.open(folder, device, _network_of(folder, networks))


def _network_of(source: Path, networks: Sequence[Network]) -> Network | None:
    if not networks:
        return None
    table = (
        read_config_table(source)
        if source.is_dir()
        else parse_toml(load_tensors(source)[1].get("config", ""), str(source))
    )
    kind = str(table.get("model", {}).get("kind"))
    fitting = [own for own in networks if network_name(own) == kind] or (networks if len(networks) == 1 else ())
    return fitting[0] if fitting and is_own(kind) else None


@dataclass(frozen=True)
class Ensemble:
    """Finished runs that score lists together; read, score and evaluate are those of one run."""

    runs: tuple[ScoringRun, ...]

    @classmethod
    def open(cls, folders: Sequence[Path], networks: Sequence[Network] = ()) -> "Ensemble":
        """Load the runs, each once; they must have been trained on the same features; `networks` as in `open_run`."""
        places = [folder.resolve() for folder in folders]
        twice = next((folder for folder, place in zip(folders, places) if places.count(place) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is given twice; expected different runs; leave one out")
        runs = tuple(open_run(folder, networks=networks) for folder in folders)
        first = runs[0]
        for other in runs[1:]:
            if (other.features, other.names) != (first.features, first.names):
                named = ", with names and without" if {first.names, other.names} > {None} else ""
                raise ValueError(
                    f"{first.folder} and {other.folder} were trained on different features ({first.features} and "
                    f"{other.features} of them{named}); expected the same columns in the same order; rank with one of them"
                )
        return cls(runs)

    def read(
        self,
        source: str,
        *,
        split: str = "test",
        labelled: bool = True,
        document: str | None = None,
        settings: Sequence[str] = (),
    ) -> RankingDataset:
        """Lists of the width these models expect; of data in folds, all runs must be of the same one."""
        folds = {run.config.data.fold: run.folder for run in self.runs}
        if len(folds) > 1 and Path(source).is_dir():
            first, second, *_ = folds
            raise ValueError(
                f"{folds[first]} is of fold {first} and {folds[second]} of fold {second}; expected runs of one fold, "
                f"because one has seen the others' {split} lists; give a single file to rank it with all of them"
            )
        before = [run for run in self.runs if run.config.data.missing == "all_zero"]
        others = [run for run in self.runs if run not in before]
        data = (others or before)[0].read(source, split=split, labelled=labelled, document=document, settings=settings)
        if before and others and _has_missing(data):
            raise ValueError(
                f"{source} has missing values, which are 0 to {before[0].folder} and missing to {others[0].folder}; expected runs "
                "that learned the same; rank with one of them"
            )
        return data

    def score(self, data: RankingDataset) -> np.ndarray:
        """One score per document, in the dataset's order, [N] float32."""
        return mean_of_standardised([run.score(data) for run in self.runs], data.offsets).astype(np.float32)

    def evaluate(self, data: RankingDataset, metrics: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
        """Per-query metrics, [Q], NaN at empty queries; those of the first run's configuration if none are named."""
        config = self.runs[0].config
        return measure(self.score(data), data, metrics_of(config, metrics or config.train.metrics))


def _has_missing(data: RankingDataset) -> bool:
    return any(np.isnan(data.features[start : start + ROWS]).any() for start in range(0, len(data.features), ROWS))
