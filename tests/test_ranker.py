"""A fitted ranker: built, saved, loaded, and the same scores for rows with sizes as for lists."""

import numpy as np
import pytest
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import fit_scaling
from rankgrad.data.synthetic import synthetic
from rankgrad.files import load_tensors, save_tensors
from rankgrad.losses import LossSpec, rmse
from rankgrad.ranker import Ranker
from rankgrad.training.build import make_state
from rankgrad.training.config import Config, Data, Loss, Model, dumps, loads
from rankgrad.training.evaluate import evaluate

CPU = torch.device("cpu")
DATA = synthetic("tiny")
CONFIG = Config(Data(scaling="standard"), Model("transformer", width=8, layers=1, feedforward=8), Loss("neural_ndcg@5"))


def build(config=CONFIG, data=DATA, seed=0, loss=None):
    torch.manual_seed(seed)
    model = make_state(config, data, CPU, loss).model
    return Ranker.of(model, fit_scaling(data, config.data.scaling), config, data, CPU, loss)


@pytest.fixture(scope="module")
def ranker():
    return build()


def alone(ranker, rows):
    """Scores of one list, scaled and scored by hand."""
    with torch.no_grad():
        return ranker.model(torch.from_numpy(ranker.scaling.apply(rows))[None])[0].numpy()


def test_rows_with_sizes_are_scored_as_the_lists_they_make(ranker):
    scores = ranker.score(DATA.features, sizes=DATA.lengths)
    assert scores.dtype == np.float32 and np.array_equal(scores, ranker.score_lists(DATA))
    expected = [alone(ranker, DATA.features[a:b]) for a, b in zip(DATA.offsets, DATA.offsets[1:], strict=False)]
    np.testing.assert_allclose(scores, np.concatenate(expected), atol=1e-5)
    assert not np.allclose(scores, ranker.score(DATA.features), atol=1e-5)  # without sizes it is one list
    np.testing.assert_allclose(ranker.score(DATA.features[:9]), alone(ranker, DATA.features[:9]), atol=1e-5)


def test_anything_like_an_array_will_do_and_lists_may_be_empty(ranker):
    rows = DATA.features[:5]
    expected = ranker.score(rows, sizes=[2, 3])
    assert np.array_equal(ranker.score(rows.astype(np.float64).tolist(), sizes=(2, 0, 3, 0)), expected)
    assert np.array_equal(ranker.score(torch.from_numpy(rows), sizes=np.array([2, 3], np.uint8)), expected)
    for sizes in (None, [], [0, 0]):
        nothing = ranker.score(rows[:0], sizes=sizes)
        assert nothing.shape == (0,) and nothing.dtype == np.float32


@pytest.mark.parametrize("sizes", [[2, 2], [6], [], [-1, 6], [2.0, 3.0], [[2, 3]], 5, ["5"], [True] * 5])
def test_sizes_that_do_not_fit_are_refused(ranker, sizes):
    with pytest.raises(ValueError, match="sizes.*5 together"):
        ranker.score(DATA.features[:5], sizes=sizes)


@pytest.mark.parametrize("shape", [(5, 135), (5, 137), (136,), (1, 5, 136), (0, 0)])
def test_documents_of_another_width_are_refused(ranker, shape):
    with pytest.raises(ValueError, match=r"features.*\[documents, 136\]"):
        ranker.score(np.zeros(shape))


def test_it_is_the_metrics_of_its_scores_that_it_evaluates(ranker):
    found = ranker.evaluate(DATA, ("ndcg@10", "map"))
    scaled = RankingDataset(ranker.scaling.apply(DATA.features), DATA.labels, DATA.offsets, DATA.query_ids)
    for name, values in evaluate(ranker.model, scaled, ["ndcg@10", "map"], device=CPU).items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("kind", ["transformer", "mlp", "linear"])
@pytest.mark.parametrize("loss", ["neural_ndcg@5", "ordinal", "rmse"])
def test_what_was_saved_scores_the_same_to_the_bit(tmp_path, kind, loss):
    names = tuple(f"column {number}" for number in range(136))
    data = RankingDataset(DATA.features, DATA.labels, DATA.offsets, DATA.query_ids, feature_names=names)
    ranker = build(Config(Data(scaling="quantile"), Model(kind, width=8, feedforward=8), Loss(loss)), data)
    assert (ranker.units, ranker.tanh) == ({"ordinal": 4}.get(loss, 1), loss.startswith("neural"))
    ranker.save(tmp_path / "x.safetensors", {"of": "mine"})
    state = torch.get_rng_state()
    back = Ranker.load(tmp_path / "x.safetensors", "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert (back.features, back.names, back.units, back.tanh) == (136, names, ranker.units, ranker.tanh)
    assert back.config == ranker.config and back.facts["of"] == "mine" and not back.model.training
    assert np.array_equal(back.score_lists(data), ranker.score_lists(data))


def test_the_loss_need_not_be_known_to_load_it(tmp_path):
    own = LossSpec(rmse, name="mine", tanh=True, units=lambda highest: highest + 1)
    ranker = build(Config(loss=Loss("mine"), model=Model("linear")), loss=own)
    assert (ranker.units, ranker.tanh) == (5, True)
    ranker.save(tmp_path / "x.safetensors")
    back = Ranker.load(tmp_path / "x.safetensors", "cpu")
    assert back.model.tanh and np.array_equal(back.score(DATA.features), ranker.score(DATA.features))


def test_files_that_are_not_rankers_or_do_not_fit_are_refused_by_name(tmp_path, ranker):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="x.safetensors does not exist.*; train it"):
        Ranker.load(path, hint="; train it")
    save_tensors(path, {"a": torch.ones(1)}, {})
    with pytest.raises(ValueError, match="x.safetensors .*how its model is built"):
        Ranker.load(path)
    ranker.save(path)
    tensors, facts = load_tensors(path)
    save_tensors(path, tensors, {**facts, "config": facts["config"].replace("width = 8", "width = 16")})
    with pytest.raises(ValueError, match=r"x.safetensors do not fit \[model\]"):
        Ranker.load(path)
    assert loads(facts["config"]) == ranker.config and dumps(ranker.config) == facts["config"]
