"""What is trained for each row of table 2, of the ablations and of DASALC's ingredients."""

from dataclasses import replace

import pytest

from rankgrad.losses import LOSSES
from rankgrad.reproduce.claims import STUDIES
from rankgrad.reproduce.rows import ABLATIONS, INGREDIENTS, ROWS, TABLE2, Setting, base, choose, config_of
from rankgrad.training.build import losses_of, validate
from rankgrad.training.config import TREES, Loss, dasalc
from rankgrad.trees.settings import TreeConfig

SETTING = Setting(
    dataset="web30k",
    recipe="paper",
    path="synthetic:tiny",
    fold=1,
    seed=2,
    scaling="auto",
    levels=5,
    device="cpu",
    threads=1,
    epochs=None,
    paper_protocol=False,
)


def trained(name, **changes):
    return config_of(ROWS[name], replace(SETTING, **changes))


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_gives_a_configuration_that_can_be_trained(name):
    config = trained(name)
    if isinstance(config, TreeConfig):
        assert config.library == ROWS[name].library and config.seed == 2
    else:
        valid = validate(config)
        names = {name.partition("@")[0] for name in valid.loss.names}
        assert valid.model.kind in TREES if ROWS[name].trials else names <= set(LOSSES)


def test_the_rows_are_the_papers_seventeen_and_ours():
    of_the_paper = [name for name, row in TABLE2.items() if row.paper]
    assert len(of_the_paper) == 17
    assert sum(TABLE2[name].library is None for name in of_the_paper) == 16
    assert TABLE2["neural_ndcg@max"].paper == {"web30k": (51.56, 53.46), "istella": (65.69, 70.55)}
    assert TABLE2["lambdarank@10"].paper == {"web30k": (49.66, 51.34), "istella": (65.21, 69.82)}
    assert TABLE2["ranknet@5"].paper == {"web30k": (49.14, 50.75), "istella": (64.45, 68.74)}
    assert TABLE2["xgboost"].paper == {"web30k": (46.80, 49.17), "istella": (61.04, 65.74)}
    assert {"lightgbm", "catboost", "ndcg_loss2pp", "neural_map", "soft_rank", "lambdarank@10-any"} <= set(TABLE2)


def test_the_papers_rows_with_a_cut_off_count_pairs_as_its_code_does():
    names = [f"{loss}@{k}" for loss in ("ranknet", "lambdarank") for k in (5, 10)]
    assert {trained(name).loss.options["pairs"] for name in names} == {"both"}
    assert trained("lambdarank@10-any").loss == Loss("lambdarank@10", {"pairs": "any"})


def test_the_papers_recipe_is_its_model_and_schedule():
    web = trained("listnet")
    assert (web.model.width, web.model.feedforward, web.train.batch_size, web.train.epochs) == (96, 384, 64, 100)
    assert (web.optimiser.lr, web.optimiser.milestones, web.train.precision, web.train.select) == (
        1e-3,
        (50,),
        "float32",
        "best",
    )
    istella = trained("listnet", dataset="istella")
    assert (istella.model.width, istella.train.batch_size) == (128, 110)
    assert trained("listnet", device="cuda").train.precision == "bf16"
    small = trained("listnet", recipe="small")
    assert (small.model.width, small.model.feedforward) == (32, 64)
    assert small.train.epochs == 30 and small.train.patience is not None
    last = trained("listnet", recipe="small", paper_protocol=True).train
    assert (last.select, last.patience) == ("last", None)
    assert not trained("lightgbm", paper_protocol=True).tuned
    assert trained("rmse", levels=3).loss.options == {"levels": 3.0}


def test_rows_are_chosen_by_name():
    assert choose(None, TABLE2, "row") == list(TABLE2)
    assert choose("rmse, listnet", TABLE2, "row") == ["listnet", "rmse"]
    with pytest.raises(ValueError, match=r"'listnett'.*neural_ndcg@5.*neural_map"):
        choose("listnett", TABLE2, "row")
    with pytest.raises(ValueError, match="no row"):
        choose(" , ", TABLE2, "row")


def test_every_claim_of_the_ablations_has_its_rows():
    assert {name for study in STUDIES.values() for name in (study.baseline, *study.others)} == set(ABLATIONS)
    for key in ("tau", "alpha"):
        assert {row.options[key] for row in ABLATIONS.values() if key in row.options} == {0.01, 0.1, 10.0, 100.0}
    rounds = [ABLATIONS[name].options["sinkhorn_iters"] for name in STUDIES["sinkhorn"].others]
    assert rounds == [0, 1, 3, 10, 100]
    assert {ABLATIONS[name].options["perturb"] for name in STUDIES["stochastic"].others} == {"paper", "allrank"}


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_an_ablation_differs_from_its_baseline_in_one_thing(name):
    config = trained(name)
    baseline = "approx_ndcg" if name.startswith(("alpha", "approx")) else "neural_ndcg"
    same = trained(baseline)
    assert same == replace(base(SETTING), loss=Loss(baseline))
    if name == "no-tanh":
        assert config == replace(same, model=replace(same.model, tanh=False))
        assert losses_of(same)[same.loss.name][0].tanh  # what leaving tanh to the loss means
    else:
        assert config == replace(same, loss=Loss(baseline, config.loss.options))


@pytest.mark.parametrize("recipe", ["small", "paper"])
def test_each_row_of_dasalc_adds_one_ingredient(recipe):
    first, symlog, noise, wider = (trained(name, recipe=recipe) for name in INGREDIENTS)
    assert first == replace(base(replace(SETTING, recipe=recipe)), loss=Loss("softmax"))
    assert symlog == replace(first, data=replace(first.data, scaling="symlog"))
    assert noise == replace(symlog, model=replace(symlog.model, input_noise=noise.model.input_noise))
    assert noise.model.input_noise > 0
    assert wider == replace(noise, model=wider.model)
    assert wider.model.input_noise == noise.model.input_noise
    assert recipe == "small" or wider.model == dasalc().model
