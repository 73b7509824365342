"""How a run is executed, why not otherwise, and that every way learns the same."""

import dataclasses

import numpy as np
import pytest
import torch
from training_cases import CPU, TRAIN, VALI, new_state, run, stops_at, with_

from rankgrad.errors import NonFiniteError
from rankgrad.models import MLP, Transformer
from rankgrad.training.build import make_objectives, validate
from rankgrad.training.config import Model, Train
from rankgrad.training.execution import expectations, plan_execution
from rankgrad.training.loop import Epoch, train

CUDA = torch.device("cuda")
BIG = Transformer(136, width=8, feedforward=8)


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU with 1 MiB of free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**21))
    monkeypatch.setattr("rankgrad.kernels._INSTALLED", True)


def test_a_gpu_takes_everything_and_a_cpu_nothing_but_its_own_memory(gpu):
    for model in (BIG, MLP(136)):
        on_gpu = plan_execution(Train(), model, TRAIN, CUDA)
        assert on_gpu[:3] == (True, True, True) and not on_gpu.why_not
        assert not any(expectations(model, CUDA).values())
    on_cpu = plan_execution(Train(), BIG, TRAIN, CPU)
    assert on_cpu[:3] == (True, False, False) and set(on_cpu.why_not) == {"pack", "graph"}
    assert {name for name, reason in expectations(BIG, CPU).items() if reason} == {"pack", "graph"}


def test_what_is_off_has_a_reason(gpu, monkeypatch):
    shared = plan_execution(Train(), BIG, TRAIN, CUDA, world=2)
    assert shared[:3] == (True, False, False) and "2 share" in shared.why_not["graph"]
    wide = plan_execution(Train(), Transformer(136, width=256), TRAIN, CUDA)
    assert not wide.pack and wide.graph and "256" in wide.why_not["pack"]
    own = plan_execution(Train(), torch.nn.Linear(1, 1), TRAIN, CUDA)
    assert not own.pack and "Linear" in own.why_not["pack"]
    asked = plan_execution(Train(graph=False), MLP(136), TRAIN, CUDA)
    assert not asked.graph and asked.why_not == {"graph": "not asked for"}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**10, 2**21))
    large = plan_execution(Train(), BIG, TRAIN, CUDA)
    assert not large.resident and large.pack and "GiB" in large.why_not["resident"]
    monkeypatch.setattr("rankgrad.kernels._INSTALLED", False)
    bare = plan_execution(Train(), BIG, TRAIN, CUDA)
    assert not bare.pack and "triton" in bare.why_not["pack"]


def test_what_turns_out_not_to_work_is_off_with_its_reason():
    plan = plan_execution(Train(graph=False, pack=True), BIG, TRAIN, CPU)
    assert plan.without(pack="") == plan
    off = plan.without(pack="it broke")
    assert not off.pack and off.why_not == {"graph": "not asked for", "pack": "it broke"}


def test_what_cannot_be_done_is_refused_when_asked_for():
    with pytest.raises(ValueError, match="train.graph = true.*CUDA device.*'auto' or false"):
        plan_execution(Train(graph=True), BIG, TRAIN, CPU)
    with pytest.raises(ValueError, match="train.pack = true.*one process"):
        plan_execution(Train(pack=True), BIG, TRAIN, CPU, world=3)
    with pytest.raises(ValueError, match="train.pack.*'auto', true or false.*'yes'"):
        validate(with_(train_pack="yes"))


PLANS = [{"pack": True}, {"resident": False}, {"pack": True, "resident": False}]
if torch.cuda.is_available():
    PLANS += [{"graph": True}, {"pack": True, "graph": True}, {"pack": True, "graph": True, "resident": False}]


def ended(config, device, **changes):
    """Metrics and losses of a run, and its weights, but for the keys' bias, which has no gradient."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device=device.type, **changes))
    state = new_state(config, device=device)
    events = list(train(state, make_objectives(config), TRAIN, VALI, config, device))
    for name, wish in changes.items():
        assert getattr(state.plan, name) == wish, state.plan
    weights = {k: v.cpu() for k, v in state.model.state_dict().items() if not k.endswith("key.bias")}
    return [e for e in events if isinstance(e, Epoch)], weights


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("kind", ["transformer", "mlp"])
@pytest.mark.parametrize("loss", ["neural_ndcg", "rmse"])
def test_every_plan_learns_the_same(plan, kind, loss):
    device = CUDA if torch.cuda.is_available() else CPU
    model = Model(kind=kind, width=8, layers=1, heads=2, feedforward=16, hidden=(8,), dropout=0.0)
    config = dataclasses.replace(with_(loss_name=loss, data_list_size=6, train_epochs=6), model=model)
    off = {"pack": False, "graph": False, "resident": True}
    expected, weights = ended(config, device, **off)
    found, others = ended(config, device, **{**off, **plan})
    assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], abs=2e-5)
    assert [e.metric for e in found] == pytest.approx([e.metric for e in expected], abs=2e-3)
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("at", [2, 5])
def test_a_packed_run_resumes_exactly(at):
    config = with_(loss_name="xe_ndcg", data_list_size=6, train_pack=True)
    whole, expected, _ = run(config)
    first, before, _ = run(config, stop=stops_at(at))
    second = new_state(config, seed=5)
    second.restore({name: tensor.clone() for name, tensor in first.tensors().items()}, first.facts())
    _, after, _ = run(config, state=second)
    assert before + after == expected
    assert all(torch.equal(tensor, second.tensors()[name]) for name, tensor in whole.tensors().items())


def test_weights_reach_the_packed_step():
    weights = np.linspace(0.5, 2.0, len(TRAIN))
    data = dataclasses.replace(TRAIN, weights=weights)
    config = with_(loss_name="lambdarank", model_dropout=0.0)
    _, expected, _ = run(config, data)
    _, found, _ = run(with_(config, train_pack=True), data)
    assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], abs=1e-6)
    unweighted = run(config)[1]
    assert found[0].loss != pytest.approx(unweighted[0].loss, abs=1e-4)


def test_units_reach_the_packed_step():
    config = with_(loss_name="ordinal", data_list_size=6, model_dropout=0.0)
    ends = []
    for pack in (False, True):
        state = new_state(config, units=4)
        _, epochs, _ = run(with_(config, train_pack=pack), state=state)
        ends.append(([e.loss for e in epochs], state.model.output.weight))
    assert ends[0][0] == pytest.approx(ends[1][0], abs=1e-6)
    torch.testing.assert_close(ends[0][1], ends[1][1], atol=1e-5, rtol=1e-4)


def test_a_bad_list_is_named_and_refused_in_a_packed_step_too():
    features = TRAIN.features.copy()
    features[TRAIN.offsets[3]] = np.nan
    data = dataclasses.replace(TRAIN, features=features)
    config = with_(train_pack=True, train_nonfinite="skip", model_kind="transformer", model_width=8)
    _, epochs, _ = run(config, data)
    assert [e.skipped for e in epochs] == [1, 1]
    with pytest.raises(NonFiniteError, match=f"look at query {TRAIN.query_ids[3]}, "):
        run(with_(config, train_nonfinite="stop"), data)


def test_the_padding_rows_of_a_step_cannot_spoil_it():
    features = TRAIN.features.copy()
    features[0] = np.inf  # the padding rows of every step are its copies, and it belongs to one step
    data = dataclasses.replace(TRAIN, features=features)
    _, epochs, _ = run(with_(train_pack=True, train_nonfinite="skip"), data)
    assert [e.skipped for e in epochs] == [1, 1]
