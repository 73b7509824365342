"""What finished trials say: means and deviations, which differences are significant, which claims of the paper hold.

Pure functions of per-query values [seeds, queries] by row and metric, NaN at queries without a relevant document; the folds'
queries stand side by side. A claim holds here (True), does not (False), or cannot be decided (None) because rows it is about
were not trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankgrad.reproduce.rows import (
    ABLATIONS,
    ENSEMBLES,
    INGREDIENTS,
    NEURAL_NDCG,
    OF_THE_PAPER,
    TABLE2,
    ingredient_title,
)
from rankgrad.runs.significance import holm, paired_permutation_test
from rankgrad.training.evaluate import RULES, mean

METRICS = ("ndcg@5", "ndcg@10")  # of the tables
DECISIVE = "ndcg@10"  # of the ablations and the ingredients
PAPERS_RULE = "empty=1"  # of the paper's tables, for queries without a relevant document
LEVEL = 0.05
Values = Mapping[str, Mapping[str, np.ndarray]]  # row -> metric -> [seeds, queries]


# --- numbers ----------------------------------------------------------------------------------------------------------


def summary(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Mean over seeds, and sample deviation where there are several, of each metric under each rule for empty queries.

    >>> summary({"ndcg@5": np.array([[0.5, np.nan], [0.7, np.nan]])})["ndcg@5"]["empty=0"]
    {'mean': 0.3, 'deviation': 0.07071067811865474}
    """
    return {
        metric: {
            rule: _mean_and_deviation([mean(of_seed, empty) for of_seed in of_metric]) for rule, empty in RULES.items()
        }
        for metric, of_metric in values.items()
    }


def _mean_and_deviation(seeds: Sequence[float]) -> dict[str, float | None]:
    return {"mean": float(np.mean(seeds)), "deviation": float(np.std(seeds, ddof=1)) if len(seeds) > 1 else None}


def p_values(values: Values, metric: str, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Of paired permutation tests over queries, for pairs of rows averaged over seeds; Holm-corrected over the pairs."""
    averaged = {row: values[row][metric].mean(0) for pair in pairs for row in pair}
    return holm([paired_permutation_test(averaged[a], averaged[b]) for a, b in pairs]) if pairs else []


def against_the_best(values: Values, metric: str) -> tuple[str, dict[str, float]]:
    """The best row by a metric, and for every other row the p-value of the difference between the two."""
    best = max(values, key=lambda row: mean(values[row][metric].mean(0), np.nan))
    others = [row for row in values if row != best]
    return best, dict(zip(others, p_values(values, metric, [(best, row) for row in others])))


def differences(values: Values, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, float]]:
    """For pairs of rows, the difference of their means by NDCG@10, an empty query counted 1, and its p-value."""
    means = {row: mean(values[row][DECISIVE].mean(0), RULES[PAPERS_RULE]) for pair in pairs for row in pair}
    found = p_values(values, DECISIVE, pairs)
    return [(means[row] - means[base], p_value) for (row, base), p_value in zip(pairs, found)]


# --- the claims of table 2 --------------------------------------------------------------------------------------------


def beats_approx_ndcg(values: Values) -> dict[str, Any]:
    """Whether every NeuralNDCG row is above ApproxNDCG by both metrics."""
    rows = [row for row in NEURAL_NDCG if row in values]
    claim: dict[str, Any] = {"claim": "every NeuralNDCG row beats ApproxNDCG", "held": None}
    if not rows or "approx_ndcg" not in values:
        return {**claim, "because": "ApproxNDCG and NeuralNDCG were not both run"}
    reasons, all_above = [], True
    for metric in METRICS:
        base = mean(values["approx_ndcg"][metric].mean(0), np.nan)
        above = [mean(values[row][metric].mean(0), np.nan) > base for row in rows]
        found = p_values(values, metric, [(row, "approx_ndcg") for row in rows])
        significant = sum(higher and p_value < LEVEL for higher, p_value in zip(above, found))
        reasons.append(
            f"{sum(above)} of {len(rows)} rows are above it by {metric}, {significant} of them significantly"
        )
        all_above = all_above and all(above)
    held = False if not all_above else True if len(rows) == len(NEURAL_NDCG) else None
    return {**claim, "held": held, "because": _with_missing("; ".join(reasons), len(rows), len(NEURAL_NDCG))}


def best_is_neural_ndcg(values: Values) -> dict[str, Any]:
    """Whether the best of the paper's rows is a NeuralNDCG by both metrics."""
    rows = [row for row in OF_THE_PAPER if row in values]
    claim: dict[str, Any] = {"claim": "the best row is a NeuralNDCG", "held": None}
    if not set(rows) & set(NEURAL_NDCG) or not set(rows) - set(NEURAL_NDCG):
        return {**claim, "because": "NeuralNDCG and its rivals were not both run"}
    best = {metric: max(rows, key=lambda row: mean(values[row][metric].mean(0), np.nan)) for metric in METRICS}
    reasons = (f"the best of the paper's rows by {metric} is {TABLE2[row].title}" for metric, row in best.items())
    held = all(row in NEURAL_NDCG for row in best.values()) if len(rows) == len(OF_THE_PAPER) else None
    return {**claim, "held": held, "because": _with_missing("; ".join(reasons), len(rows), len(OF_THE_PAPER))}


def _with_missing(reason: str, run: int, of: int) -> str:
    return reason if run == of else f"{reason} ({of - run} of the {of} rows it speaks of were not run)"


# --- the claims of the ablations --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A row beside its baseline: the difference of the means by NDCG@10, and its corrected p-value."""

    title: str
    difference: float
    p_value: float

    def __str__(self) -> str:
        return f"{self.title}: {100 * self.difference:+.2f}, p = {self.p_value:.2g}"

    @property
    def significant(self) -> bool:
        """Whether chance alone is an unlikely reason."""
        return self.p_value < LEVEL


def about_equal(others: Sequence[Difference]) -> tuple[bool, str]:
    """Holds where no row differs significantly from the baseline."""
    significant = [str(other) for other in others if other.significant]
    if significant:
        return False, f"differs significantly: {'; '.join(significant)}"
    return True, f"no significant difference; the largest is {max(others, key=lambda other: abs(other.difference))}"


def none_better(others: Sequence[Difference]) -> tuple[bool, str]:
    """Holds where no row is significantly better than the baseline."""
    better = [other for other in others if other.difference > 0]
    significant = [str(other) for other in better if other.significant]
    worse = sum(other.significant for other in others if other.difference < 0)
    if significant:
        return False, f"significantly better: {'; '.join(significant)}"
    nearest = f"; the highest is {max(better, key=lambda other: other.difference)}" if better else ""
    return True, f"none is significantly better, {worse} of {len(others)} significantly worse{nearest}"


def first_worse(others: Sequence[Difference]) -> tuple[bool, str]:
    """Holds where the first row, which leaves something out, is significantly worse than the baseline."""
    first = others[0]
    if first.significant:
        return first.difference < 0, f"significantly {'worse' if first.difference < 0 else 'better'}: {first}"
    return False, f"no significant difference: {first}"


@dataclass(frozen=True)
class Study:
    """A claim of the paper, how it is decided, the baseline and its title there, and how the other rows' names begin."""

    claim: str
    decide: Callable[[Sequence[Difference]], tuple[bool, str]]
    baseline: str
    title: str
    prefix: str

    @property
    def others(self) -> list[str]:
        """The rows that are compared with the baseline."""
        return [name for name in ABLATIONS if name.startswith(self.prefix)]


STOCHASTIC = "stochastic NeuralNDCG is about as good as deterministic"
TAU = "for NeuralNDCG no temperature in [0.01, 100] is better than tau = 1"
ALPHA = "for ApproxNDCG no alpha in [0.01, 100] is better than 1"
TANH = "NeuralNDCG needs tanh on the scores"
SINKHORN = "NeuralNDCG needs Sinkhorn scaling"
STUDIES: Mapping[str, Study] = {
    "stochastic": Study(STOCHASTIC, about_equal, "neural_ndcg", "deterministic", "stochastic-"),
    "tau": Study(TAU, none_better, "neural_ndcg", "tau = 1", "tau-"),
    "alpha": Study(ALPHA, none_better, "approx_ndcg", "ApproxNDCG, alpha = 1", "alpha-"),
    "tanh": Study(TANH, first_worse, "neural_ndcg", "tanh", "no-tanh"),
    "sinkhorn": Study(SINKHORN, first_worse, "neural_ndcg", "30 rounds", "sinkhorn-"),
}


def decide_study(study: Study, values: Values) -> dict[str, Any]:
    """The rows of a study and whether its claim holds here."""
    rows: dict[str, dict[str, Any]] = {}
    if study.baseline in values:
        rows[study.baseline] = {"title": study.title, "metrics": summary(values[study.baseline])}
    present = [name for name in study.others if name in values and rows]
    found = [
        Difference(ABLATIONS[name].title, *of_row)
        for name, of_row in zip(present, differences(values, [(name, study.baseline) for name in present]))
    ]
    for name, of_row in zip(present, found):
        rows[name] = {
            "title": of_row.title,
            "metrics": summary(values[name]),
            "difference": of_row.difference,
            "p": of_row.p_value,
        }
    held, because = study.decide(found) if len(present) == len(study.others) else (None, "not all of it was trained")
    return {"claim": study.claim, "held": held, "because": because, "rows": rows}


# --- the ingredients of DASALC ----------------------------------------------------------------------------------------


def compare_ingredients(values: Values, recipe: str, seeds: int) -> dict[str, dict[str, Any]]:
    """Every row beside the one before it (step), and beside the first (whole), p-values corrected within each column."""
    rows: dict[str, dict[str, Any]] = {
        name: {"title": ingredient_title(name, recipe, seeds), "metrics": summary(values[name])}
        for name in (*INGREDIENTS, *ENSEMBLES)
        if name in values
    }
    first, *later = rows
    before = {**dict(zip(later, rows)), "softmax-ensemble": first}
    for part, base in (("step", before), ("whole", dict.fromkeys(later, first))):
        for name, (difference, p_value) in zip(later, differences(values, [(name, base[name]) for name in later])):
            rows[name][part] = {"difference": difference, "p": p_value}
    return rows
