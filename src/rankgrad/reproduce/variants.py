"""What the ablations train: the paper's claims that have no row in its table, each a baseline and its variants.

Pure: configurations from a recipe's, and verdicts from per-query values [seeds, queries] by variant and metric, NaN at
queries without a relevant document. Imports config, evaluate and significance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankgrad.reproduce.claims import LEVEL, PAPERS_RULE, Values, standing
from rankgrad.runs.significance import holm, paired_permutation_test
from rankgrad.training.config import Config, Loss, Option
from rankgrad.training.evaluate import RULES, mean

JUDGED = "ndcg@10"  # what claims are judged by


@dataclass(frozen=True)
class Variant:
    """A loss, its options, and whether scores go through tanh (None: as the paper has it for this loss)."""

    loss: str = "neural_ndcg"
    options: Mapping[str, Option] = field(default_factory=dict)
    tanh: bool | None = None

    def of(self, recipe: Config) -> Config:
        """The recipe with this loss."""
        return replace(recipe, loss=Loss(self.loss, self.options), model=replace(recipe.model, tanh=self.tanh))


TAUS = (0.01, 0.1, 10.0, 100.0)  # and 1, the baseline
ROUNDS = (0, 1, 3, 10, 100)  # and 30, the baseline
SAMPLES = 32  # of the reference code

VARIANTS: Mapping[str, Variant] = {
    "neural_ndcg": Variant(),
    "stochastic-paper": Variant(options={"samples": SAMPLES, "perturb": "paper"}),
    "stochastic-allrank": Variant(options={"samples": SAMPLES, "perturb": "allrank"}),
    **{f"tau-{tau:g}": Variant(options={"tau": tau}) for tau in TAUS},
    "no-tanh": Variant(tanh=False),
    **{f"sinkhorn-{rounds}": Variant(options={"sinkhorn_iters": rounds}) for rounds in ROUNDS},
    "approx_ndcg": Variant("approx_ndcg"),
    **{f"alpha-{alpha:g}": Variant("approx_ndcg", {"alpha": alpha}) for alpha in TAUS},
}


@dataclass(frozen=True)
class Compared:
    """A variant beside its baseline: the difference of the means by NDCG@10, and Holm's p-value of it."""

    title: str
    difference: float
    p_value: float

    def __str__(self) -> str:
        return f"{self.title}: {100 * self.difference:+.2f}, p = {self.p_value:.2g}"

    @property
    def sure(self) -> bool:
        """Whether the difference is more than luck."""
        return self.p_value < LEVEL


Verdict = Callable[[Sequence[Compared]], tuple[bool, str]]


def about_equal(others: Sequence[Compared]) -> tuple[bool, str]:
    """Held where no variant differs significantly from the baseline."""
    sure = [str(other) for other in others if other.sure]
    if sure:
        return False, f"differs significantly: {'; '.join(sure)}"
    return True, f"no significant difference; the largest is {max(others, key=lambda other: abs(other.difference))}"


def none_better(others: Sequence[Compared]) -> tuple[bool, str]:
    """Held where no variant is significantly better than the baseline."""
    better = [other for other in others if other.difference > 0]
    sure = [str(other) for other in better if other.sure]
    worse = sum(other.sure for other in others if other.difference < 0)
    if sure:
        return False, f"significantly better: {'; '.join(sure)}"
    nearest = f"; the highest is {max(better, key=lambda other: other.difference)}" if better else ""
    return True, f"none is significantly better, {worse} of {len(others)} significantly worse{nearest}"


def first_worse(others: Sequence[Compared]) -> tuple[bool, str]:
    """Held where the first variant, which does without, is significantly worse than the baseline."""
    first = others[0]
    if first.sure:
        return first.difference < 0, f"significantly {'worse' if first.difference < 0 else 'better'}: {first}"
    return False, f"no significant difference: {first}"


@dataclass(frozen=True)
class Study:
    """A claim of the paper: the baseline and the variants it speaks of, with their titles here."""

    claim: str
    verdict: Verdict
    baseline: tuple[str, str]
    others: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Of all that must be trained."""
        return [self.baseline[0], *self.others]


STUDIES: Mapping[str, Study] = {
    "stochastic": Study(
        "stochastic NeuralNDCG is about as good as deterministic",
        about_equal,
        ("neural_ndcg", "deterministic"),
        {
            "stochastic-paper": f"stochastic, {SAMPLES} samples, as in the paper",
            "stochastic-allrank": f"stochastic, {SAMPLES} samples, as in the reference code",
        },
    ),
    "tau": Study(
        "for NeuralNDCG no temperature in [0.01, 100] is better than tau = 1",
        none_better,
        ("neural_ndcg", "tau = 1"),
        {f"tau-{tau:g}": f"tau = {tau:g}" for tau in TAUS},
    ),
    "alpha": Study(
        "for ApproxNDCG no alpha in [0.01, 100] is better than 1",
        none_better,
        ("approx_ndcg", "ApproxNDCG, alpha = 1"),
        {f"alpha-{alpha:g}": f"alpha = {alpha:g}" for alpha in TAUS},
    ),
    "tanh": Study(
        "NeuralNDCG needs tanh on the scores",
        first_worse,
        ("neural_ndcg", "tanh"),
        {"no-tanh": "no tanh"},
    ),
    "sinkhorn": Study(
        "NeuralNDCG needs Sinkhorn scaling",
        first_worse,
        ("neural_ndcg", "30 rounds"),
        {f"sinkhorn-{rounds}": f"{rounds} round{'s' if rounds != 1 else ''}" for rounds in ROUNDS},
    ),
}


def chosen(names: str | None) -> list[str]:
    """Studies from a comma-separated list; all of them where it is None.

    >>> chosen("tanh,tau")
    ['tau', 'tanh']
    """
    asked = list(STUDIES) if names is None else [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in STUDIES:
            raise ValueError(f"there is no ablation {name!r}; expected some of {', '.join(STUDIES)}")
    return [name for name in STUDIES if name in asked]


def judged(study: Study, values: Values) -> dict[str, Any]:
    """The rows of a study and whether its claim is held here (None: a part of it is missing)."""
    baseline, title = study.baseline
    rows: dict[str, dict[str, Any]] = {}
    if baseline in values:
        rows[baseline] = {"title": title, "metrics": standing(values[baseline])}
    present = [name for name in study.others if name in values and rows]
    found = compared(values, [(name, baseline) for name in present])
    for name, (difference, p_value) in zip(present, found):
        metrics = standing(values[name])
        rows[name] = {"title": study.others[name], "metrics": metrics, "difference": difference, "p": p_value}
    if len(present) < len(study.others):
        return {"claim": study.claim, "held": None, "because": "not all of it was trained", "rows": rows}
    held, because = study.verdict([Compared(study.others[name], *numbers) for name, numbers in zip(present, found)])
    return {"claim": study.claim, "held": held, "because": because, "rows": rows}


def compared(values: Values, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, float]]:
    """For pairs of rows, the difference of their means by NDCG@10 and its p-value, Holm-corrected over the pairs.

    Paired permutation tests over queries, of values averaged over seeds; an empty query counts 1.
    """
    if not pairs:
        return []
    averaged = {row: values[row][JUDGED].mean(0) for pair in pairs for row in pair}
    p_values = holm([paired_permutation_test(averaged[row], averaged[base]) for row, base in pairs])
    means = {row: mean(of_row, RULES[PAPERS_RULE]) for row, of_row in averaged.items()}
    return [(means[row] - means[base], p_value) for (row, base), p_value in zip(pairs, p_values)]
