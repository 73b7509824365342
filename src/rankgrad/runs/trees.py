"""Boosted trees as a run folder: the model in its library's own format, trees.json, and what every run leaves."""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.files import write_atomically
from rankgrad.runs.provenance import record, versions, wanted
from rankgrad.training.evaluate import judge
from rankgrad.trees.fit import MODEL_FILES, OBJECTIVES, TreeConfig, best_of, fit, version_of


def fit_trees_run(folder: Path, config: TreeConfig, splits: Mapping[str, RankingDataset]) -> None:
    """Fit trees and write their folder, which `compare` and `report` read like that of a run; report.json comes last."""
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
    write_atomically(folder / "trees.json", (json.dumps(facts, indent=2) + "\n").encode())
    record(
        folder,
        splits,
        {
            split: judge(trees.score(splits[split]), splits[split], metrics)
            for split, metrics in wanted(splits, config.metrics).items()
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
