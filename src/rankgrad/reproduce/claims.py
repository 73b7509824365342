"""What a finished table says: means and deviations, which differences are more than luck, which claims of the paper hold.

Pure functions of per-query values [seeds, queries] by row and metric, NaN at queries without a relevant document; the folds'
queries stand side by side. Imports evaluate, significance and the rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankgrad.reproduce.rows import NEURAL_NDCG, OF_THE_PAPER, ROWS
from rankgrad.runs.significance import holm, paired_permutation_test
from rankgrad.training.evaluate import RULES, mean

METRICS = ("ndcg@5", "ndcg@10")
PAPERS_RULE = "empty=1"  # of the paper's tables
LEVEL = 0.05
Values = Mapping[str, Mapping[str, np.ndarray]]  # row -> metric -> [seeds, queries]


def standing(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Mean over seeds, and sample deviation where there are several, of each metric under each rule for empty queries.

    >>> standing({"ndcg@5": np.array([[0.5, np.nan], [0.7, np.nan]])})["ndcg@5"]["empty=0"]
    {'mean': 0.3, 'deviation': 0.07071067811865474}
    """
    return {
        metric: {
            rule: _mean_and_deviation([mean(of_seed, empty) for of_seed in of_metric]) for rule, empty in RULES.items()
        }
        for metric, of_metric in values.items()
    }


def _mean_and_deviation(seeds: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": float(np.mean(seeds)),
        "deviation": float(np.std(seeds, ddof=1)) if len(seeds) > 1 else None,
    }


def against_the_best(values: Values, metric: str) -> tuple[str, dict[str, float]]:
    """The best row by a metric, and for every other row Holm's p-value of the difference between the two.

    Paired permutation tests over queries, of values averaged over seeds.
    """
    averaged = {row: of_row[metric].mean(0) for row, of_row in values.items()}
    best = max(averaged, key=lambda row: mean(averaged[row], np.nan))
    others = [row for row in averaged if row != best]
    p_values = [paired_permutation_test(averaged[best], averaged[row]) for row in others]
    return best, dict(zip(others, holm(p_values))) if others else {}


def claims(values: Values) -> list[dict[str, Any]]:
    """The paper's two main claims, each held or not here, or neither (None) where too few of the rows it speaks of were run."""
    return [_beats_approx_ndcg(values), _best_is_neural_ndcg(values)]


def _beats_approx_ndcg(values: Values) -> dict[str, Any]:
    rows = [row for row in NEURAL_NDCG if row in values]
    claim: dict[str, Any] = {"claim": "every NeuralNDCG row beats ApproxNDCG", "held": None}
    if not rows or "approx_ndcg" not in values:
        return {**claim, "because": "ApproxNDCG and NeuralNDCG were not both run"}
    said, above = [], []
    for metric in METRICS:
        base = values["approx_ndcg"][metric].mean(0)
        ours = {row: values[row][metric].mean(0) for row in rows}
        gaps = {row: mean(ours[row], np.nan) - mean(base, np.nan) for row in rows}
        p_values = dict(zip(rows, holm([paired_permutation_test(ours[row], base) for row in rows])))
        higher = [row for row in rows if gaps[row] > 0]
        above += [len(higher) == len(rows)]
        sure = sum(p_values[row] < LEVEL for row in higher)
        said.append(f"{len(higher)} of {len(rows)} rows are above it by {metric}, {sure} of them significantly")
    held = False if not all(above) else True if len(rows) == len(NEURAL_NDCG) else None
    return {**claim, "held": held, "because": _complete("; ".join(said), len(rows), len(NEURAL_NDCG))}


def _best_is_neural_ndcg(values: Values) -> dict[str, Any]:
    rows = [row for row in OF_THE_PAPER if row in values]
    claim: dict[str, Any] = {"claim": "the best row is a NeuralNDCG", "held": None}
    if not set(rows) & set(NEURAL_NDCG) or not set(rows) - set(NEURAL_NDCG):
        return {**claim, "because": "NeuralNDCG and its rivals were not both run"}
    best = {metric: max(rows, key=lambda row: mean(values[row][metric].mean(0), np.nan)) for metric in METRICS}
    said = "; ".join(f"the best of the paper's rows by {metric} is {ROWS[row].title}" for metric, row in best.items())
    held = all(row in NEURAL_NDCG for row in best.values()) if len(rows) == len(OF_THE_PAPER) else None
    return {**claim, "held": held, "because": _complete(said, len(rows), len(OF_THE_PAPER))}


def _complete(said: str, run: int, of: int) -> str:
    return said if run == of else f"{said} ({of - run} of the {of} rows it speaks of were not run)"
