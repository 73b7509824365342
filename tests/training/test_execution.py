"""Which path a run takes, why not another, and that all of them learn the same."""

import dataclasses

import numpy as np
import pytest
import torch
from test_loop import CPU, TRAIN, VALI, learner_of, run, stops_at, with_

import cuda_on_cpu
from rankgrad.models import MLP, Transformer
from rankgrad.training.build import make_model, make_objective, resolve
from rankgrad.training.config import Model, Train
from rankgrad.training.execution import choose_path, expectations
from rankgrad.training.loop import Epoch, Learner, NonFiniteError, make_optimiser, train

CUDA = torch.device("cuda")
BIG = Transformer(136, width=8, feedforward=8)


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU with 1 MiB of free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**21))
    monkeypatch.setattr("rankgrad.kernels._INSTALLED", True)


def test_a_gpu_takes_everything_and_a_cpu_nothing_but_its_own_memory(gpu):
    on_gpu = choose_path(Train(), BIG, TRAIN, CUDA, steps=30_000)
    assert on_gpu[:4] == (True, True, False, True) and "faster kernels" in on_gpu.why_not["compile"]
    assert choose_path(Train(compile=True), BIG, TRAIN, CUDA, steps=10).compile
    assert expectations(BIG, CUDA)["compile"] == on_gpu.why_not["compile"]
    assert not expectations(MLP(136), CUDA)["compile"]
    other = choose_path(Train(), MLP(136), TRAIN, CUDA, steps=30_000)
    assert other[:4] == (True, True, True, True) and not other.why_not
    assert choose_path(Train(pack=False), BIG, TRAIN, CUDA, steps=30_000).compile
    on_cpu = choose_path(Train(), BIG, TRAIN, CPU, steps=30_000)
    assert on_cpu[:4] == (True, False, False, False) and set(on_cpu.why_not) == {"pack", "compile", "graph"}


def test_what_is_off_has_a_reason(gpu, monkeypatch):
    short = choose_path(Train(), MLP(136), TRAIN, CUDA, steps=100)
    assert short.graph and not short.compile and "100 steps" in short.why_not["compile"]
    shared = choose_path(Train(), BIG, TRAIN, CUDA, steps=30_000, world=2)
    assert shared[:4] == (True, False, False, False) and "2 share" in shared.why_not["graph"]
    wide = choose_path(Train(), Transformer(136, width=256), TRAIN, CUDA, steps=30_000)
    assert not wide.pack and wide.graph and "got 256" in wide.why_not["pack"]
    own = choose_path(Train(), torch.nn.Linear(1, 1), TRAIN, CUDA, steps=30_000)
    assert not own.pack and "Linear has no method packed" in own.why_not["pack"]
    asked = choose_path(Train(graph=False), MLP(136), TRAIN, CUDA, steps=30_000)
    assert not asked.graph and asked.why_not == {"graph": "not asked for"}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**10, 2**21))
    large = choose_path(Train(), BIG, TRAIN, CUDA, steps=30_000)
    assert not large.resident and large.pack and "GiB" in large.why_not["resident"]
    monkeypatch.setattr("rankgrad.kernels._INSTALLED", False)
    bare = choose_path(Train(), BIG, TRAIN, CUDA, steps=30_000)
    assert not bare.compile and bare.why_not["compile"] == "triton is not installed"


def test_what_cannot_be_done_is_refused_when_asked_for():
    with pytest.raises(ValueError, match="train.graph = true cannot be done here: CUDA graphs need a CUDA device; say"):
        choose_path(Train(graph=True), BIG, TRAIN, CPU, steps=10)
    with pytest.raises(ValueError, match="train.pack = true cannot be done here: it works for one process"):
        choose_path(Train(pack=True), BIG, TRAIN, CPU, steps=10, world=3)
    with pytest.raises(ValueError, match="train.pack must be 'auto', true or false, got 'yes'"):
        resolve(with_(train_pack="yes"))


PATHS = [{"pack": True}, {"resident": False}, {"pack": True, "resident": False}]
if torch.cuda.is_available():
    PATHS += [{"graph": True}, {"pack": True, "graph": True}, {"pack": True, "graph": True, "resident": False}]


def ended(config, device, **changes):
    """Metrics and losses of a run, and its weights, but for the keys' bias, which has no gradient."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device=device.type, **changes))
    model = learner_of(config).model.to(device)
    learner = Learner(model, make_optimiser(model, config.optimiser))
    events = list(train(learner, make_objective(config), TRAIN, VALI, config, device))
    for name, wish in changes.items():
        assert getattr(learner.path, name) == wish, learner.path
    weights = {k: v.cpu() for k, v in learner.model.state_dict().items() if not k.endswith("key.bias")}
    return [e for e in events if isinstance(e, Epoch)], weights


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("kind", ["transformer", "mlp"])
@pytest.mark.parametrize("loss", ["neural_ndcg", "rmse"])
def test_every_path_learns_the_same(path, kind, loss):
    device = CUDA if torch.cuda.is_available() else CPU
    model = Model(kind=kind, width=8, layers=1, heads=2, feedforward=16, hidden=(8,), dropout=0.0)
    config = dataclasses.replace(with_(loss_name=loss, data_list_size=6, train_epochs=6), model=model)
    off = {"pack": False, "graph": False, "compile": False, "resident": True}
    expected, weights = ended(config, device, **off)
    found, others = ended(config, device, **{**off, **path})
    assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], abs=2e-5)
    assert [e.metric for e in found] == pytest.approx([e.metric for e in expected], abs=2e-3)
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, atol=2e-3, rtol=1e-2)


@pytest.mark.skipif(not cuda_on_cpu.COMPILER, reason="torch.compile needs g++ on a CPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when its compiler is first imported
def test_a_compiled_run_learns_the_same_and_refuses_the_same():
    device = CUDA if torch.cuda.is_available() else CPU
    model = Model(kind="mlp", hidden=(8,), dropout=0.0)
    config = dataclasses.replace(with_(loss_name="listnet", data_list_size=6, train_epochs=4), model=model)
    expected, _ = ended(config, device, pack=True, compile=False)
    found, _ = ended(config, device, pack=True, compile=True)
    assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], abs=2e-5)
    features = TRAIN.features.copy()
    features[TRAIN.offsets[3]] = np.nan
    config = with_(config, train_pack=True, train_compile=True, train_nonfinite="skip")
    _, epochs, _ = run(config, dataclasses.replace(TRAIN, features=features))
    assert [e.skipped for e in epochs] == [1, 1, 1, 1]


@pytest.mark.parametrize("at", [2, 5])
def test_a_packed_run_resumes_exactly(at):
    config = with_(loss_name="xe_ndcg", data_list_size=6, train_pack=True)
    whole, expected, _ = run(config)
    first, before, _ = run(config, stop=stops_at(at))
    second = learner_of(config, seed=5)
    second.restore({name: tensor.clone() for name, tensor in first.tensors().items()}, first.facts())
    _, after, _ = run(config, learner=second)
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
        torch.manual_seed(0)
        model = make_model(config.model, 136, 4, "ordinal")
        learner = Learner(model, make_optimiser(model, config.optimiser))
        _, epochs, _ = run(with_(config, train_pack=pack), learner=learner)
        ends.append(([e.loss for e in epochs], model.output.weight))
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


def test_the_filling_of_a_step_cannot_spoil_it():
    features = TRAIN.features.copy()
    features[0] = np.inf  # fills up every step, and belongs to one
    data = dataclasses.replace(TRAIN, features=features)
    _, epochs, _ = run(with_(train_pack=True, train_nonfinite="skip"), data)
    assert [e.skipped for e in epochs] == [1, 1]
