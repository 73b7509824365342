"""Kernels compiled before the first step: every part of a step is there, and nothing is learned."""

import inspect
import re

import pytest
import torch
from training_cases import TRAIN, VALI, new_state, with_

from rankgrad.data.packed import packed_lists
from rankgrad.kernels.encoder import attention, fused, gather
from rankgrad.models import MLP, Transformer
from rankgrad.training.build import make_objectives
from rankgrad.training.config import Config, Loss, Train
from rankgrad.training.loop import train
from rankgrad.training.warmup import compile_kernels

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def launched_by(module):
    """Names of the Triton kernels that a module launches: those it gives a grid."""
    names = set(re.findall(r"\b(\w+)\[.*\]\(", inspect.getsource(module)))
    return {name for name in names if hasattr(getattr(module, name, None), "arg_names")}


KERNELS = {name: module for module in (attention, fused, gather) for name in launched_by(module)}


class OneByOne:
    """Instead of threads, which Triton's interpreter does not bear."""

    def __init__(self, _):
        self.map = map

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    if not CUDA:
        monkeypatch.setattr("rankgrad.training.warmup.ThreadPoolExecutor", OneByOne)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    names = set()

    class Heard:
        def __init__(self, kernel, name):
            self.kernel, self.name = kernel, name

        def __getitem__(self, grid):
            names.add(self.name)
            return self.kernel[grid]

    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, Heard(getattr(module, name), name))
    return names


@pytest.fixture
def batch():
    return next(packed_lists(TRAIN, 4, list_size=16, seed=0, epoch=0, device=DEVICE))


def compiled(model, loss, batches):
    """The shapes a loss saw."""
    (objective,), seen = make_objectives(Config(loss=Loss(loss))).values(), []

    def values(scores, labels, mask, generator):
        seen.append(tuple(scores.shape))
        return objective.values(scores, labels, mask, generator)

    compile_kernels(model.to(DEVICE), objective._replace(values=values), Train(), batches, 136, DEVICE)
    return sorted(seen)


@pytest.mark.parametrize("loss", ["listnet", "ordinal"])  # the second takes other scores, and is left for later
def test_every_kernel_and_every_width_once(launched, loss, batch):
    model = Transformer(136, width=8, layers=2, heads=2, feedforward=16)
    state = torch.get_rng_state()
    assert compiled(model, loss, [batch, batch._replace(width=32), batch]) == [(4, 16), (4, 32)]
    assert launched == set(KERNELS) and launched
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_attention_needs_less(launched, batch):
    assert compiled(MLP(136, hidden=(4,)), "rmse", [batch]) == [(4, 16)]
    assert launched == {name for name, module in KERNELS.items() if module is gather}


def test_the_end_of_an_epoch_has_nothing_to_compile(launched):
    assert compiled(MLP(136, hidden=(4,)), "rmse", []) == []
    assert not launched


def test_what_goes_wrong_is_left_for_the_step_to_say(batch):
    def broken(*_):
        raise IndexError

    (objective,) = make_objectives(Config()).values()
    objective = objective._replace(values=broken)
    compile_kernels(MLP(136, hidden=(4,)).to(DEVICE), objective, Train(), [batch], 136, DEVICE)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_products_have_the_dtype_of_the_run(precision, batch, monkeypatch):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    heard = []

    def attended(qkv, offsets, longest, dropout, seed, exact):
        heard.append((qkv.dtype, exact))
        return qkv.sum(1)

    monkeypatch.setattr(attention, "list_attention", attended)
    monkeypatch.setattr(fused, "add_norm", lambda *given: heard.append((given[1].dtype, given[4])))
    for name in ("relu_dropout", "linear"):  # some CPUs have no bfloat16 products
        monkeypatch.setattr(fused, name, lambda *given: heard.append((given[0].dtype, precision == "float32")))
    model = Transformer(136, width=8, layers=1, feedforward=16).to(DEVICE)
    compile_kernels(model, *make_objectives(Config()).values(), Train(precision=precision), [batch], 136, DEVICE)
    assert heard.count((dtype, precision == "float32")) == 3
    assert set(heard) == {(dtype, precision == "float32"), (dtype, dtype), (dtype, torch.float32)}


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_steps_compile_nothing_more(precision, monkeypatch):
    import triton

    config = with_(train_pack=True, train_precision=precision, train_epochs=1, data_list_size=48, train_batch_size=32)
    config = with_(config, model_kind="transformer", model_width=16, model_feedforward=32)
    in_steps, before = [], []

    def listen(src, **_):
        in_steps.append(src.name)

    def compile_and_note(*given):
        compile_kernels(*given)
        before.extend(in_steps)
        in_steps.clear()

    monkeypatch.setattr("rankgrad.training.loop.compile_kernels", compile_and_note)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    for _ in train(new_state(config, device=DEVICE), make_objectives(config), TRAIN, VALI, config, DEVICE):
        pass
    assert "_add_norm_backward" in before
    assert not in_steps
