"""`rankgrad reproduce ablations` and `dasalc`: small ones from end to end."""

import json
import math

import numpy as np
import pytest

from rankgrad.reproduce.rows import INGREDIENTS
from rankgrad.reproduce.tables import describe, make_ablations, make_dasalc, write
from rankgrad.reproduce.trials import Request
from rankgrad.runs.ensemble import Ensemble
from rankgrad.runs.folder import read_config, read_report


@pytest.mark.slow
def test_a_claim_from_end_to_end_and_again(call, tmp_path):
    out_folder = tmp_path / "a"
    line = f"ablations --dataset synthetic:tiny --what tanh --seeds 2 --epochs 1 --out {out_folder}".split()
    code, out, err = call(*line)
    assert code == 0
    assert err.count("test ndcg@10") == 4
    assert "recipe paper: " in out and "10 test queries; seeds 0, 1" in out
    assert '"NeuralNDCG needs tanh on the scores": ' in out and "\nno tanh " in out
    assert (out_folder / "ablations.txt").read_text() == out
    assert out.endswith(f"report: {out_folder / 'ablations.html'}\n")
    assert "no-tanh" in (out_folder / "ablations.html").read_text()
    found = json.loads((out_folder / "ablations.json").read_text())
    configs = [read_config(out_folder / "runs" / name / "fold1-seed1") for name in ("neural_ndcg", "no-tanh")]
    assert [config.model.tanh for config in configs] == [None, False]
    assert {config.train.seed for config in configs} == {1}
    reports = [read_report(out_folder / "runs" / "no-tanh" / f"fold1-seed{seed}") for seed in (0, 1)]
    means = [report["metrics"]["test"]["ndcg@10"]["empty=1"] for report in reports]
    shown = found["studies"]["tanh"]["rows"]["no-tanh"]["metrics"]["ndcg@10"]["empty=1"]
    assert shown == {"mean": pytest.approx(np.mean(means)), "deviation": pytest.approx(np.std(means, ddof=1))}
    again = call(*line, "--json")
    assert again[2] == "" and json.loads(again[1]) == found


@pytest.mark.slow
def test_dasalc_from_end_to_end(tmp_path):
    made = make_dasalc(Request("synthetic:tiny", seeds=2, recipe="small", epochs=1, out=tmp_path), quiet=True)
    result = write(made, "none")
    assert list(result["rows"]) == [*INGREDIENTS, "ensemble", "softmax-ensemble"]
    assert result["rows"]["ensemble"]["title"] == "+ ensemble of 2 seeds"
    assert not result["failed"]
    runs = [tmp_path / "runs" / "wider" / f"fold1-seed{seed}" for seed in (0, 1)]
    config = read_config(runs[0])
    assert (config.data.scaling, config.model.width, config.loss.name) == ("symlog", 64, "softmax")
    ensemble = Ensemble.open(runs)
    values = ensemble.evaluate(ensemble.read("synthetic:tiny"), ("ndcg@10",))["ndcg@10"]
    shown = result["rows"]["ensemble"]["metrics"]["ndcg@10"]
    assert shown["skipped"]["mean"] == pytest.approx(np.nanmean(values)) and shown["skipped"]["deviation"] is None
    assert {run.ranker.scaling.kind for run in ensemble.runs} == {"symlog"}
    assert (tmp_path / "dasalc.txt").read_text() == describe(result) + "\n" and (tmp_path / "dasalc.json").exists()
    assert [folder.name for folder in made.rows] == list(INGREDIENTS)  # an ensemble is no folder of runs
    alone = make_dasalc(Request("synthetic:tiny", seeds=1, recipe="small", epochs=1, out=tmp_path), quiet=True).result
    assert list(alone["rows"]) == list(INGREDIENTS)  # one seed is no ensemble; nothing is trained again
    assert math.isclose(
        alone["rows"]["wider"]["metrics"]["ndcg@10"]["empty=0"]["mean"],
        read_report(runs[0])["metrics"]["test"]["ndcg@10"]["empty=0"],
    )


def test_what_is_no_claim_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'tua'.*stochastic, tau, alpha"):
        make_ablations(Request("synthetic:tiny", rows="tua", out=tmp_path / "a"))
    assert not (tmp_path / "a").exists()
