"""Means, p-values and claims, against numbers made by hand."""

import numpy as np
import pytest

from rankgrad.reproduce.claims import (
    METRICS,
    STUDIES,
    Difference,
    about_equal,
    against_the_best,
    beats_approx_ndcg,
    best_is_neural_ndcg,
    compare_ingredients,
    decide_study,
    first_worse,
    none_better,
    summary,
)
from rankgrad.reproduce.rows import ENSEMBLES, INGREDIENTS, NEURAL_NDCG, OF_THE_PAPER
from rankgrad.runs.significance import holm, paired_permutation_test
from rankgrad.training.evaluate import mean

NAN = np.nan


def flat(value, seeds=1, queries=20):
    """A row with this value at every query, the last one empty."""
    values = np.full((seeds, queries), float(value))
    values[:, -1] = NAN
    return dict.fromkeys(METRICS, values)


def test_means_and_deviations_over_seeds_under_each_rule():
    found = summary({"ndcg@10": np.array([[0.2, 0.4, NAN], [0.6, 0.8, NAN]])})["ndcg@10"]
    assert found["skipped"]["mean"] == pytest.approx(0.5)
    assert found["skipped"]["deviation"] == pytest.approx(0.4 / np.sqrt(2))
    assert found["empty=1"]["mean"] == pytest.approx((0.6 + 1 + 1.4 + 1) / 6)
    assert found["empty=0"]["mean"] == pytest.approx((0.6 + 1.4) / 6)
    assert found["empty=0"]["deviation"] == pytest.approx((0.8 / 3) / np.sqrt(2))


def test_one_seed_has_no_deviation():
    assert summary({"ndcg@5": np.array([[0.2, 0.4]])})["ndcg@5"]["empty=1"]["deviation"] is None


def test_the_best_row_is_tested_against_each_other_on_values_averaged_over_seeds():
    rng = np.random.default_rng(0)
    base = rng.random((2, 40))
    base[:, 3] = NAN
    values = {
        "rmse": {"ndcg@10": base},
        "listnet": {"ndcg@10": base + np.array([[-0.10], [0.30]]) + rng.normal(0, 0.02, 40)},  # 0.1 above on average
        "listmle": {"ndcg@10": base - 0.01 * rng.random(40)},
    }
    best, p_values = against_the_best(values, "ndcg@10")
    assert best == "listnet" and set(p_values) == {"rmse", "listmle"}
    averaged = {row: of_row["ndcg@10"].mean(0) for row, of_row in values.items()}
    plain = [paired_permutation_test(averaged["listnet"], averaged[row]) for row in p_values]
    assert list(p_values.values()) == holm(plain)
    assert max(p_values.values()) < 0.01


def test_a_single_row_is_the_best_of_itself():
    assert against_the_best({"rmse": flat(0.5)}, "ndcg@5") == ("rmse", {})


def everyone(approx=0.4, neural=0.6, others=0.5):
    values = {row: flat(neural if row in NEURAL_NDCG else others) for row in OF_THE_PAPER}
    return {**values, "approx_ndcg": flat(approx)}


def claims(values):
    return [beats_approx_ndcg(values), best_is_neural_ndcg(values)]


def test_both_claims_hold_where_they_do():
    first, second = claims(everyone())
    assert first["held"] is True and second["held"] is True
    assert "6 of 6 rows are above it by ndcg@5, 6 of them significantly" in first["because"]
    assert "were not run" not in first["because"] + second["because"]


def test_one_row_below_approx_ndcg_by_one_metric_breaks_the_first_claim():
    values = everyone()
    values["neural_ndcg@5"] = {"ndcg@5": flat(0.39)["ndcg@5"], "ndcg@10": flat(0.6)["ndcg@10"]}
    first, second = claims(values)
    assert first["held"] is False and "5 of 6 rows are above it by ndcg@5" in first["because"]
    assert second["held"] is True


def test_a_better_rival_of_the_papers_breaks_the_second_claim_and_one_of_ours_does_not():
    assert claims({**everyone(), "lambdarank@max": flat(0.7)})[1]["held"] is False
    assert claims({**everyone(), "lightgbm": flat(0.7)})[1]["held"] is True


def test_claims_say_what_was_not_run():
    some = {row: flat(0.5) for row in ("neural_ndcg@5", "listnet")}
    first, second = claims({**some, "approx_ndcg": flat(0.4)})
    assert first["held"] is None and "5 of the 6 rows it speaks of were not run" in first["because"]
    assert claims({**some, "approx_ndcg": flat(0.6)})[0]["held"] is False  # one row below is enough
    assert second["held"] is None and "14 of the 17 rows it speaks of were not run" in second["because"]
    assert [claim["held"] for claim in claims({"listnet": flat(0.5)})] == [None, None]
    assert [claim["held"] for claim in claims({"neural_ndcg@5": flat(0.5)})] == [None, None]


# --- the ablations and the ingredients ----------------------------------------------------------------------------------


def other(difference, p_value):
    return Difference("that", difference, p_value)


@pytest.mark.parametrize(
    ("decide", "others", "held", "words"),
    [
        (about_equal, [other(0.001, 0.9), other(-0.02, 0.2)], True, "the largest is that: -2.00, p = 0.2"),
        (about_equal, [other(0.001, 0.9), other(-0.02, 0.01)], False, "differs significantly: that: -2.00, p = 0.01"),
        (
            none_better,
            [other(-0.2, 0.001), other(0.01, 0.3)],
            True,
            "1 of 2 significantly worse; the highest is that: +1",
        ),
        (none_better, [other(-0.2, 0.2)], True, "none is significantly better, 0 of 1 significantly worse"),
        (none_better, [other(-0.2, 0.001), other(0.01, 0.04)], False, "significantly better: that: +1.00"),
        (first_worse, [other(-0.2, 0.04), other(0.5, 0.01)], True, "significantly worse: that: -20.00"),
        (first_worse, [other(-0.2, 0.06)], False, "no significant difference"),
        (first_worse, [other(0.2, 0.01)], False, "significantly better: that"),
    ],
)
def test_how_a_claim_is_decided(decide, others, held, words):
    found, because = decide(others)
    assert found is held
    assert words in because


def made_up(names, seeds=2, queries=60):
    rng = np.random.default_rng(0)
    easy = rng.uniform(0.2, 0.8, queries)
    values = {}
    for place, name in enumerate(names):
        of_row = easy + 0.03 * place + rng.normal(0, 0.05, (seeds, queries))
        of_row[:, :7] = np.nan  # empty queries
        values[name] = {"ndcg@5": of_row / 2, "ndcg@10": of_row}
    return values


def test_rows_are_paired_with_the_baseline_over_queries_and_corrected_within_the_study():
    study = STUDIES["tau"]
    names = [study.baseline, *study.others]
    values = made_up(names)
    found = decide_study(study, values)
    averaged = {name: of_row["ndcg@10"].mean(0) for name, of_row in values.items()}
    expected = holm([paired_permutation_test(averaged[name], averaged["neural_ndcg"]) for name in study.others])
    rows = found["rows"]
    assert list(rows) == names and "p" not in rows["neural_ndcg"]
    assert [rows[name]["p"] for name in study.others] == expected
    for name in study.others:
        shown = [rows[row]["metrics"]["ndcg@10"]["empty=1"]["mean"] for row in (name, "neural_ndcg")]
        assert rows[name]["difference"] == pytest.approx(shown[0] - shown[1])
        assert shown[0] == pytest.approx(mean(averaged[name], 1.0))
    assert found["held"] is False and "tau = 100" in found["because"]
    del values["tau-10"]
    missing = decide_study(study, values)
    assert missing["held"] is None and "tau-10" not in missing["rows"]
    del values["neural_ndcg"]
    assert decide_study(study, values)["rows"] == {}


def test_ingredients_are_paired_with_the_row_before_and_the_first():
    values = made_up((*INGREDIENTS, *ENSEMBLES))
    rows = compare_ingredients(values, "small", 2)
    means = {name: row["metrics"]["ndcg@10"]["empty=1"]["mean"] for name, row in rows.items()}
    before = {
        "symlog": "softmax",
        "noise": "symlog",
        "wider": "noise",
        "ensemble": "wider",
        "softmax-ensemble": "softmax",
    }
    for name, base in before.items():
        assert rows[name]["step"]["difference"] == pytest.approx(means[name] - means[base])
        assert rows[name]["whole"]["difference"] == pytest.approx(means[name] - means["softmax"])
    averaged = {name: of_row["ndcg@10"].mean(0) for name, of_row in values.items()}
    expected = holm([paired_permutation_test(averaged[name], averaged[base]) for name, base in before.items()])
    assert [rows[name]["step"]["p"] for name in before] == expected
    assert rows["ensemble"]["title"] == "+ ensemble of 2 seeds"
    assert "step" not in rows["softmax"]
