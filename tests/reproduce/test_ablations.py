"""The paper's claims without a row: what is trained for each, how they are judged, and a small one from end to end."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from rankgrad.training.recipes import dasalc

from rankgrad.cli import main
from rankgrad.reproduce import ingredients
from rankgrad.reproduce.ablations import ablate, add_ingredients
from rankgrad.reproduce.trials import Order
from rankgrad.reproduce.variants import STUDIES, VARIANTS, Compared, about_equal, first_worse, judged, none_better
from rankgrad.runs.ensemble import Ensemble
from rankgrad.runs.significance import holm, paired_permutation_test
from rankgrad.training.build import make_model, resolve
from rankgrad.training.config import Config, Loss, loads
from rankgrad.training.evaluate import mean

# --- what is trained --------------------------------------------------------------------------------------------------


def test_every_claim_has_its_variants():
    trained = {name for study in STUDIES.values() for name in study.names}
    assert trained == set(VARIANTS)
    values = {
        key: {VARIANTS[n].options[key] for n in VARIANTS if key in VARIANTS[n].options} for key in ("tau", "alpha")
    }
    assert values == {"tau": {0.01, 0.1, 10.0, 100.0}, "alpha": {0.01, 0.1, 10.0, 100.0}}
    rounds = [VARIANTS[name].options["sinkhorn_iters"] for name in STUDIES["sinkhorn"].others]
    assert rounds == [0, 1, 3, 10, 100]
    assert {VARIANTS[name].options["perturb"] for name in STUDIES["stochastic"].others} == {"paper", "allrank"}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_variant_differs_from_its_baseline_in_one_thing(name):
    recipe = Config()
    config = VARIANTS[name].of(recipe)
    resolve(config)  # the loss takes these options
    baseline = "approx_ndcg" if name.startswith(("alpha", "approx")) else "neural_ndcg"
    assert config.loss.name == baseline
    same = VARIANTS[baseline].of(recipe)
    if name == "no-tanh":
        assert config == replace(same, model=replace(same.model, tanh=False))
        tanh = [make_model(c.model, 3, 1, c.loss.name).tanh for c in (same, config)]
        assert tanh == [True, False]
    else:
        assert config == replace(same, loss=Loss(baseline, config.loss.options))


def test_each_step_of_dasalc_adds_one_ingredient():
    for recipe in ("small", "paper"):
        first, symlog, noise, wider = (ingredients.added(step, recipe, Config()) for step in ingredients.STEPS)
        assert first == Config(loss=Loss("softmax"))
        assert symlog == replace(first, data=replace(first.data, scaling="symlog"))
        assert noise == replace(symlog, model=replace(symlog.model, input_noise=noise.model.input_noise))
        assert noise.model.input_noise > 0
        assert wider == replace(noise, model=wider.model)
        assert wider.model.input_noise == noise.model.input_noise
        resolve(wider)
    assert wider.model == dasalc().model


# --- how it is judged -------------------------------------------------------------------------------------------------


def other(difference, p_value):
    return Compared("that", difference, p_value)


@pytest.mark.parametrize(
    ("verdict", "others", "held", "words"),
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
def test_verdicts(verdict, others, held, words):
    found, because = verdict(others)
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
    values = made_up(study.names)
    found = judged(study, values)
    averaged = {name: of_row["ndcg@10"].mean(0) for name, of_row in values.items()}
    expected = holm([paired_permutation_test(averaged[name], averaged["neural_ndcg"]) for name in study.others])
    rows = found["rows"]
    assert list(rows) == study.names and "p" not in rows["neural_ndcg"]
    assert [rows[name]["p"] for name in study.others] == expected
    for name in study.others:
        shown = [rows[row]["metrics"]["ndcg@10"]["empty=1"]["mean"] for row in (name, "neural_ndcg")]
        assert rows[name]["difference"] == pytest.approx(shown[0] - shown[1])
        assert shown[0] == pytest.approx(mean(averaged[name], 1.0))
    assert found["held"] is False and "tau = 100" in found["because"]
    del values["tau-10"]
    missing = judged(study, values)
    assert missing["held"] is None and "tau-10" not in missing["rows"]
    del values["neural_ndcg"]
    assert judged(study, values)["rows"] == {}


def test_ingredients_are_paired_with_the_row_before_and_the_first():
    values = made_up((*ingredients.STEPS, ingredients.ENSEMBLE, ingredients.PLAIN_ENSEMBLE))
    rows = ingredients.judged(values, "small", 2)["rows"]
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


# --- from end to end --------------------------------------------------------------------------------------------------


def call(monkeypatch, capfd, *arguments):
    monkeypatch.setattr(sys, "argv", ["rankgrad", "reproduce", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0, *capfd.readouterr()


def test_a_claim_from_end_to_end_and_again(monkeypatch, capfd, tmp_path):
    line = [
        "ablations",
        "--dataset",
        "synthetic:tiny",
        "--what",
        "tanh",
        "--seeds",
        2,
        "--epochs",
        1,
        "--out",
        tmp_path / "a",
    ]
    code, out, err = call(monkeypatch, capfd, *line)
    assert code == 0
    assert err.count("test ndcg@10") == 4
    assert "recipe paper: " in out and "10 test queries; seeds 0, 1" in out
    assert '"NeuralNDCG needs tanh on the scores": ' in out and "\nno tanh " in out
    assert (tmp_path / "a" / "ablations.txt").read_text() == out
    assert out.endswith(f"report: {tmp_path / 'a' / 'ablations.html'}\n")
    assert "no-tanh" in (tmp_path / "a" / "ablations.html").read_text()
    found = json.loads((tmp_path / "a" / "ablations.json").read_text())
    configs = [
        loads((tmp_path / "a" / "runs" / name / "fold1-seed1" / "config.toml").read_text())
        for name in ("neural_ndcg", "no-tanh")
    ]
    assert [config.model.tanh for config in configs] == [None, False]
    assert {config.train.seed for config in configs} == {1}
    reports = [
        json.loads((tmp_path / "a" / "runs" / "no-tanh" / f"fold1-seed{s}" / "report.json").read_text()) for s in (0, 1)
    ]
    means = [report["metrics"]["test"]["ndcg@10"]["empty=1"] for report in reports]
    shown = found["studies"]["tanh"]["rows"]["no-tanh"]["metrics"]["ndcg@10"]["empty=1"]
    assert shown == {"mean": pytest.approx(np.mean(means)), "deviation": pytest.approx(np.std(means, ddof=1))}
    again = call(monkeypatch, capfd, *line, "--json")
    assert again[2] == "" and json.loads(again[1])["studies"] == found["studies"]


def test_dasalc_from_end_to_end(tmp_path):
    result = add_ingredients(Order("synthetic:tiny", seeds=2, recipe="small", epochs=1, out=tmp_path), quiet=True)
    assert list(result["rows"]) == [*ingredients.STEPS, "ensemble", "softmax-ensemble"]
    assert not result["failed"]
    runs = [tmp_path / "runs" / "wider" / f"fold1-seed{seed}" for seed in (0, 1)]
    config = loads((runs[0] / "config.toml").read_text())
    assert (config.data.scaling, config.model.width, config.loss.name) == ("symlog", 64, "softmax")
    ensemble = Ensemble.open(runs)
    values = ensemble.evaluate(ensemble.read("synthetic:tiny"), ("ndcg@10",))["ndcg@10"]
    shown = result["rows"]["ensemble"]["metrics"]["ndcg@10"]
    assert shown["skipped"]["mean"] == pytest.approx(np.nanmean(values)) and shown["skipped"]["deviation"] is None
    assert {run.scaling.kind for run in ensemble.runs} == {"symlog"}
    alone = add_ingredients(Order("synthetic:tiny", seeds=1, recipe="small", epochs=1, out=tmp_path), quiet=True)
    assert list(alone["rows"]) == list(ingredients.STEPS)  # one seed is no ensemble; nothing is trained again
    assert math.isclose(
        alone["rows"]["wider"]["metrics"]["ndcg@10"]["empty=0"]["mean"],
        json.loads((runs[0] / "report.json").read_text())["metrics"]["test"]["ndcg@10"]["empty=0"],
    )
    assert (tmp_path / "dasalc.txt").exists() and (tmp_path / "dasalc.json").exists()
    assert "The ingredients of DASALC on synthetic:tiny" in (tmp_path / "dasalc.html").read_text()


def test_what_is_no_claim_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no ablation 'tua'; expected some of stochastic, tau, alpha"):
        ablate(Order("synthetic:tiny", rows="tua", out=tmp_path / "a"))
    assert not (tmp_path / "a").exists()
