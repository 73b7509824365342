"""Lists larger than the memory that is free: read and scaled batch by batch, they teach and score to the same bits."""

import dataclasses

import numpy as np
import pytest
from training_cases import CONFIG, CPU, SCALING, TRAIN, VALI, run, same

from rankgrad.data import RankingDataset, synthetic
from rankgrad.data.feature_rows import FeatureRows
from rankgrad.ranker import Ranker
from rankgrad.runs.folder import read_per_query
from rankgrad.runs.run import Finished, train_run
from rankgrad.training.build import make_objectives, make_state
from rankgrad.training.config import Data, Loss, Members, Model
from rankgrad.training.data import scaled
from rankgrad.training.evaluate import evaluate, score
from rankgrad.training.loop import Epoch, train
from rankgrad.training.members import DOCUMENTS_AT_ONCE, parts_to_measure

MODELS = {
    "mlp": dataclasses.replace(CONFIG, model=Model(kind="mlp", hidden=(8,))),
    "transformer": dataclasses.replace(CONFIG, model=Model(width=8, layers=1, feedforward=16)),
    "members": dataclasses.replace(
        CONFIG, model=Model(kind="mlp", hidden=(8,), inputs="list"), members=Members(count=3, keep=2)
    ),
}


@pytest.fixture
def no_memory(monkeypatch):
    monkeypatch.setattr("rankgrad.data.memory.free_bytes", lambda: 0)


def read_when_asked(data):
    return dataclasses.replace(data, features=FeatureRows([data.features]))


def trained(config, device, train_set, vali_set):
    state = make_state(config, train_set, device)
    events = train(state, make_objectives(config), train_set, vali_set, config, device)
    return [event for event in events if isinstance(event, Epoch)], state


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_training_is_the_same_to_the_bit(name):
    state, expected, _ = run(MODELS[name])
    other, found, _ = run(MODELS[name], read_when_asked(TRAIN), read_when_asked(VALI))
    assert found == expected
    assert same(state.tensors(), other.tensors())
    assert state.plan.resident
    assert not other.plan.resident
    assert "batch by batch" in other.plan.why_not["resident"]


def test_members_learn_the_same_and_are_measured_in_parts(monkeypatch):
    monkeypatch.setattr("rankgrad.training.members.DOCUMENTS_AT_ONCE", 100)
    expected, state = trained(MODELS["members"], CPU, TRAIN, VALI)
    found, other = trained(MODELS["members"], CPU, read_when_asked(TRAIN), read_when_asked(VALI))
    ((_, parts),) = other.measured.values()
    assert len(parts) > 2
    assert [epoch.loss for epoch in found] == [epoch.loss for epoch in expected]
    assert [epoch.metric for epoch in found] == pytest.approx([epoch.metric for epoch in expected], abs=1e-12)
    assert same({"weights": state.model.weights}, {"weights": other.model.weights})


@pytest.mark.parametrize("documents", [1, 7, 10**9])
def test_parts_to_measure_are_all_lists_in_order(documents, monkeypatch):
    monkeypatch.setattr("rankgrad.training.members.DOCUMENTS_AT_ONCE", documents)
    parts = parts_to_measure(read_when_asked(TRAIN), members=1)
    assert np.concatenate([part.query_ids for part in parts]).tolist() == TRAIN.query_ids.tolist()
    assert np.array_equal(np.concatenate([part.features[:] for part in parts]), TRAIN.features)
    assert len(parts) == (1 if documents > DOCUMENTS_AT_ONCE else len(parts))
    assert parts_to_measure(TRAIN, members=1) == [TRAIN]


def test_scores_and_metrics_are_the_same_to_the_bit(no_memory):
    state, _, _ = run(MODELS["transformer"])
    lists = synthetic("tiny", "test")
    lazy, at_once = scaled(lists, SCALING), dataclasses.replace(lists, features=SCALING.apply(lists.features))
    assert isinstance(lazy.features, FeatureRows)
    device = next(state.model.parameters()).device
    assert score(state.model, lazy, device=device).tobytes() == score(state.model, at_once, device=device).tobytes()
    found, expected = (evaluate(state.model, data, ["ndcg@5"], device=device) for data in (lazy, at_once))
    assert found["ndcg@5"].tobytes() == expected["ndcg@5"].tobytes()
    ranker = Ranker.of(state.model, SCALING, MODELS["transformer"], lists, device)
    assert ranker.score_lists(lists).tobytes() == score(state.model, at_once, device=device).tobytes()


@pytest.mark.parametrize("members", [Members(), Members(count=4, keep=2, bag=2)], ids=["held out", "bagged"])
def test_a_run_is_the_same_where_no_split_fits(members, tmp_path, monkeypatch):
    """Without a validation split, which is held out or dealt into folds: no selection of lists is a copy."""
    synthetic("tiny").save(tmp_path / "lists")
    config = dataclasses.replace(
        CONFIG,
        data=Data(str(tmp_path / "lists")),
        members=members,
        model=Model(kind="mlp", hidden=(8,)),
        loss=Loss("softmax"),
    )
    reports = {}
    for name in ("roomy", "tight"):
        if name == "tight":
            monkeypatch.setattr("rankgrad.data.memory.free_bytes", lambda: 0)
        *_, last = train_run(tmp_path / name, config)
        assert isinstance(last, Finished)
        reports[name] = last.report["metrics"], read_per_query(tmp_path / name).metrics
    assert reports["roomy"][0] == reports["tight"][0]
    assert str(reports["roomy"][1]) == str(reports["tight"][1])


def test_a_saved_dataset_that_is_scaled_when_asked_for_is_saved_scaled(tmp_path, no_memory):
    lists = scaled(synthetic("tiny"), SCALING)
    back = RankingDataset.open(lists.save(tmp_path / "lists"))
    assert back.features.tobytes() == SCALING.apply(synthetic("tiny").features).tobytes()
