"""`rankgrad reproduce ablations` and `dasalc`: variants of a recipe on the same lists, folds and seeds. Room 6.

The folder and its cells are those of campaign.py; ablations.json and dasalc.json, the same as text, and a report of
each as HTML, join them.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad.files import write_atomically
from rankgrad.reproduce import ingredients
from rankgrad.reproduce.cells import Cell
from rankgrad.reproduce.claims import METRICS, PAPERS_RULE
from rankgrad.reproduce.data import Fold, raw_splits
from rankgrad.reproduce.rows import Setting, base
from rankgrad.reproduce.tables import facts, percent, short_p
from rankgrad.reproduce.trials import Campaign, Order, cells_of, facts_of, fill, opened, report_on, values_of
from rankgrad.reproduce.variants import JUDGED, STUDIES, VARIANTS, chosen, judged
from rankgrad.runs.compare import as_json, table
from rankgrad.runs.ensemble import mean_of_standardised
from rankgrad.runs.provenance import CONVENTION
from rankgrad.runs.run import Run
from rankgrad.training.config import Config, Data
from rankgrad.training.data import load_splits, save_scaled
from rankgrad.training.evaluate import judge


def ablate(order: Order, *, quiet: bool = False) -> dict[str, Any]:
    """Train the variants of the studies asked for (`order.rows`), and judge the paper's claims about them."""
    studies = {name: STUDIES[name] for name in chosen(order.rows)}
    wanted = {name for study in studies.values() for name in study.names}
    with opened(order, "ablations", quiet=quiet) as campaign:
        cells = cells_of(campaign, [name for name in VARIANTS if name in wanted], _variant)
        journal, failed = fill(campaign, cells, quiet=quiet)
        values = values_of(cells, failed)
        result = {
            "ablations": str(campaign.out),
            **facts_of(campaign, cells, journal),
            "failed": failed,
            "studies": {name: judged(study, values) for name, study in studies.items()},
            "report": report_on(campaign, list(values), cells, "ablations.html", "Ablations"),
        }
        _write(campaign.out / "ablations", result, describe_ablations(result))
    return result


def _variant(name: str, setting: Setting, lists: Fold) -> tuple[Config, str]:
    return VARIANTS[name].of(base(setting)), lists.scaled


def add_ingredients(order: Order, *, quiet: bool = False) -> dict[str, Any]:
    """Train a recipe with DASALC's ingredients added one by one, and say what each gives."""
    with opened(order, "dasalc", quiet=quiet) as campaign:

        def with_ingredients(step: str, setting: Setting, lists: Fold) -> tuple[Config, str]:
            config = ingredients.added(step, setting.recipe, base(setting))
            return config, _scaled(campaign.out / "data", lists, config.data.scaling)

        cells = cells_of(campaign, ingredients.STEPS, with_ingredients)
        journal, failed = fill(campaign, cells, quiet=quiet)
        values = values_of(cells, failed)
        trained = list(values)
        for name, step in ((ingredients.ENSEMBLE, "wider"), (ingredients.PLAIN_ENSEMBLE, "softmax")):
            if order.seeds > 1 and step in values:
                values[name] = _together(campaign, [cell for cell in cells if cell.row == step])
        result = {
            "dasalc": str(campaign.out),
            **facts_of(campaign, cells, journal),
            "failed": failed,
            **ingredients.judged(values, order.recipe, order.seeds),
            "report": report_on(campaign, trained, cells, "dasalc.html", "The ingredients of DASALC"),
        }
        _write(campaign.out / "dasalc", result, describe_ingredients(result))
    return result


def _scaled(folder: Path, lists: Fold, scaling: str) -> str:
    """The lists of a fold under another scaling, made once; that of the campaign is there already."""
    if scaling == lists.scaling:
        return lists.scaled
    place = folder / f"fold{lists.fold}-{scaling}"
    if not (place / "scaling.safetensors").exists():  # it is written last
        shutil.rmtree(place, ignore_errors=True)
        save_scaled(place, *load_splits(Config(data=Data(path=lists.path, fold=lists.path_fold, scaling=scaling))))
    return os.path.abspath(place)


def _together(campaign: Campaign, cells: Sequence[Cell]) -> dict[str, np.ndarray]:
    """Per-query values [1, queries] of the ensemble of all seeds, fold by fold."""
    of_folds = []
    for lists in sorted(campaign.lists, key=lambda lists: lists.fold):
        test = raw_splits(lists.path, lists.path_fold)["test"]
        runs = [Run.open(cell.folder, campaign.device) for cell in cells if cell.fold == lists.fold]
        scores = mean_of_standardised([run.score(test) for run in runs], test.offsets)
        of_folds.append(judge(scores, test, METRICS))
    return {metric: np.concatenate([values[metric] for values in of_folds])[None] for metric in METRICS}


def _write(stem: Path, result: Mapping[str, Any], text: str) -> None:
    write_atomically(stem.with_suffix(".json"), (as_json(result) + "\n").encode())
    write_atomically(stem.with_suffix(".txt"), f"{text}\n".encode())


# --- as text ----------------------------------------------------------------------------------------------------------


def describe_ablations(result: Mapping[str, Any]) -> str:
    """A table and a verdict for each claim."""
    lines = [f"Ablations of arXiv 2102.07831 on {result['title'] or result['data']}", *facts(result)]
    for study in result["studies"].values():
        rows = [("", *_header(), "differs", "p")]
        for row in study["rows"].values():
            beside = ("", "") if "p" not in row else (_signed(row["difference"]), short_p(row["p"]))
            rows.append((row["title"], *_numbers(row), *beside))
        verdict = {True: "HELD here", False: "NOT HELD here", None: "not judged"}[study["held"]]
        lines += ["", f'"{study["claim"]}": {verdict}', study["because"], table(rows)]
    lines += ["", *_tail(result, "the first row of its table, Holm-corrected within the table")]
    return "\n".join([*lines, f"the runs are in {result['ablations']}; report: {result['report']}"])


def describe_ingredients(result: Mapping[str, Any]) -> str:
    """What each ingredient gives."""
    rows = [("", *_header(), "step", "p", "in all", "p")]
    for row in result["rows"].values():
        beside = [
            text
            for part in ("step", "whole")
            for text in ((_signed(row[part]["difference"]), short_p(row[part]["p"])) if part in row else ("", ""))
        ]
        rows.append((row["title"], *_numbers(row), *beside))
    return "\n".join(
        [
            f"The ingredients of DASALC (Qin et al. 2021), added one by one, on {result['title'] or result['data']}",
            *facts(result),
            "",
            table(rows),
            "",
            *_tail(result, "the row before (step) and the first (in all), Holm-corrected within the column"),
            "an ensemble is the mean of scores standardised within each list",
            f"the runs are in {result['dasalc']}; report: {result['report']}",
        ]
    )


def _header() -> list[str]:
    return [text for metric in METRICS for text in (metric.upper(), "+-")]


def _numbers(row: Mapping[str, Any]) -> list[str]:
    ours = [row["metrics"][metric][PAPERS_RULE] for metric in METRICS]
    return [percent(of_metric[key]) for of_metric in ours for key in ("mean", "deviation")]


def _signed(share: float) -> str:
    return f"{100 * share:+.2f}"


def _tail(result: Mapping[str, Any], beside: str) -> list[str]:
    return [
        "in percent; mean and sample deviation (+-) over seeds of the mean over all test queries; as in the paper a query "
        "without a relevant document counts 1",
        CONVENTION,
        f"differences and p by {JUDGED}: paired permutation test over queries of values averaged over seeds, against {beside}",
        *(f"failed: {sentence}" for sentence in result["failed"]),
    ]
