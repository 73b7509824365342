"""Boosted trees as a run folder: the model in its library's own format, trees.json, and what every run leaves."""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.files import write_atomically
from rankgrad.runs.folder import TREES, metrics_to_measure, write_results
from rankgrad.runs.provenance import versions
from rankgrad.training.evaluate import measure
from rankgrad.trees.fit import MODEL_FILES, OBJECTIVES, TreeConfig, best_of, fit, version_of


def fit_trees_run(folder: Path, config: TreeConfig, splits: Mapping[str, RankingDataset]) -> dict[str, Any]:
    """Fit trees and write their folder, which `compare` and `report` read like that of a run; its report."""
    started = time.perf_counter()
    versions()  # asks for the commit now, not when something else may have been checked out
    trees, tried = fit(config, splits)
    folder.mkdir(parents=True, exist_ok=True)
    trees.save(folder / MODEL_FILES[config.library])
    facts = {
        **dataclasses.asdict(config),
        "version": version_of(config.library),
        "chosen": best_of(tried),
        "tried": tried,
    }
    write_atomically(folder / TREES, (json.dumps(facts, indent=2) + "\n").encode())
    return write_results(
        folder,
        splits,
        {
            split: measure(trees.score(splits[split]), splits[split], metrics)
            for split, metrics in metrics_to_measure(splits, config.metrics).items()
        },
        config.metrics,
        {
            "loss": f"{config.library} {OBJECTIVES[config.library]}",
            "selection": f"best of {len(tried)} settings, stopped by validation" if config.tuned else "fixed settings",
            "data": config.path,
            "seed": config.seed,
            "best_epoch": trees.kept,
            "epochs": trees.rounds,
            "seconds": round(time.perf_counter() - started, 3),
            "processes": 1,
        },
        device=torch.device("cpu"),
        threads=config.threads,
    )
