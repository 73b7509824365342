"""Weights of documents: from the dataset through every kind of batch to the loss, whose mean they are the measure of."""

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import CONFIG, CPU, TRAIN, VALI, new_state, run, same, with_

from rankgrad.data import batches
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.losses import LOSS_TABLE
from rankgrad.training.build import make_objectives, make_state, validate
from rankgrad.training.config import Data, Loss, Members, Model
from rankgrad.training.loop import Epoch, train

WEIGHTED = [spec.name for spec in LOSS_TABLE if spec.weights]
OTHERS = [spec.name for spec in LOSS_TABLE if not spec.weights]
WEIGHTS = np.random.default_rng(0).choice([0.0, 0.5, 1.0, 3.0], len(TRAIN.labels)).astype(np.float32)
DATA = dataclasses.replace(TRAIN, document_weights=WEIGHTS)
ALL = with_(
    train_batch_size=len(TRAIN), train_epochs=1, data_list_size=int(TRAIN.lengths.max()), model_dropout=0.0
)  # a step


def first_loss(config, data=DATA, units=1):
    state = new_state(config, units=units)
    _, (epoch, *_), _ = run(config, data, state=state)
    return epoch.loss, state


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", [name for name in WEIGHTED if name != "xe_ndcg"])  # which draws at random
def test_the_loss_of_a_step_is_the_weighted_loss(name, pack):
    spec = next(spec for spec in LOSS_TABLE if spec.name == name)
    units = spec.units(int(TRAIN.labels.max()))
    config = with_(ALL, loss_name=name, train_pack=pack)
    (batch,) = batches(DATA, len(TRAIN), list_size=None, shuffle=False)
    model = new_state(config, units=units).model
    scores = model(batch.features, batch.mask)
    scores = scores[..., None] if units > 1 and scores.dim() == 2 else scores
    expected = spec.function(scores, batch.labels, batch.mask, weights=batch.weights)
    found, _ = first_loss(config, units=units)
    assert found == pytest.approx(expected.item(), rel=1e-5)
    plain = spec.function(scores, batch.labels, batch.mask)
    assert abs(plain.item() - expected.item()) > 1e-3 * abs(plain.item())  # else the weights would show nothing


@pytest.mark.parametrize("name", ["softmax", "query_rmse", "lambdarank"])
def test_weights_of_one_change_nothing(name):
    config = with_(loss_name=name, model_dropout=0.0)
    ones = dataclasses.replace(TRAIN, document_weights=np.ones_like(WEIGHTS))
    state, expected, _ = run(config)
    other, found, _ = run(config, ones)
    assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], rel=1e-5)
    for key, tensor in state.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[key], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("list_size", [None, 5])
def test_batches_give_every_document_its_own_weight(list_size):
    numbered = dataclasses.replace(DATA, features=np.arange(len(WEIGHTS), dtype=np.float32)[:, None])
    for data in (numbered, dataclasses.replace(numbered, features=FeatureRows([numbered.features]))):
        for batch in batches(data, 7, list_size=list_size):
            rows = batch.features[..., 0].long()
            assert torch.equal(batch.weights, torch.from_numpy(WEIGHTS)[rows].where(batch.mask, 0))
    assert not hasattr(next(batches(TRAIN, 7)), "weights")


@pytest.mark.parametrize("resident", [True, False])
def test_every_way_of_a_batch_learns_the_same(resident):
    config = with_(loss_name="query_rmse", model_dropout=0.0, data_list_size=6)
    _, expected, _ = run(config, DATA)
    for pack in (True, False):
        _, found, _ = run(with_(config, train_pack=pack, train_resident=resident), DATA)
        assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], rel=1e-5)


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_members_learn_from_weighted_documents(share):
    config = dataclasses.replace(
        ALL,
        model=Model(kind="mlp", hidden=(8,)),
        loss=Loss("query_rmse"),
        members=Members(count=4, keep=2, share=share),
    )

    def loss(data):
        torch.manual_seed(0)
        state = make_state(config, data, CPU)
        return next(
            e.loss for e in train(state, make_objectives(config), data, VALI, config, CPU) if isinstance(e, Epoch)
        )

    assert loss(DATA) != pytest.approx(loss(TRAIN), rel=1e-3)
    ones = dataclasses.replace(TRAIN, document_weights=np.ones_like(WEIGHTS))
    assert loss(ones) == pytest.approx(loss(TRAIN), rel=1e-5)
    doubled = dataclasses.replace(TRAIN, document_weights=2 * WEIGHTS)
    assert loss(doubled) == pytest.approx(loss(DATA), rel=1e-5)  # a mean over the weight of the documents


def test_a_query_whose_documents_weigh_nothing_is_as_if_it_were_not_there():
    weights = WEIGHTS.copy()
    weights[: TRAIN.offsets[3]] = 0
    config = with_(ALL, loss_name="softmax")
    with_nothing, state = first_loss(config, dataclasses.replace(TRAIN, document_weights=weights))
    rest = dataclasses.replace(TRAIN, document_weights=weights).select(slice(3, None))
    without, other = first_loss(config, rest)
    assert with_nothing == pytest.approx(without, rel=1e-6)
    torch.testing.assert_close(other.model.output.weight, state.model.output.weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_losses_without_weights_say_why(name):
    config = dataclasses.replace(with_(loss_name=name), data=Data("lists.csv", document_weight="w"))
    with pytest.raises(ValueError, match=f"{name}.*document_weight.*whole ranking.*softmax"):
        validate(config)
    with pytest.raises(ValueError, match=f"have weights, and the loss {name} takes none"):
        run(with_(loss_name=name), DATA)


def test_of_several_losses_those_learn_that_take_weights():
    names = ("softmax", "neural_ndcg@10", "lambdarank@10")
    config = dataclasses.replace(CONFIG, members=Members(count=3), loss=Loss(names))
    weighted = dataclasses.replace(config, data=Data("lists.csv", document_weight="w"))
    assert validate(weighted).loss.names == ("softmax", "lambdarank@10")
    assert validate(config).loss.names == names
    smooth = dataclasses.replace(weighted, loss=Loss(names, {"tau": 0.5}))
    assert validate(smooth).loss == Loss(("softmax", "lambdarank@10"))  # the option was the other's
    others = dataclasses.replace(weighted, loss=Loss(("neural_ndcg", "approx_ndcg")))
    with pytest.raises(ValueError, match=r"neural_ndcg\+approx_ndcg takes no weights.*softmax"):
        validate(others)


def test_a_run_resumes_with_the_weights_it_had():
    config = with_(loss_name="softmax")
    state, expected, _ = run(config, DATA)
    again, found, _ = run(config, DATA)
    assert found == expected
    assert same(state.tensors(), again.tensors())
    assert CONFIG.data.document_weight is None
