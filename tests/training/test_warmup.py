"""Kernels compiled before the first step: every part of a step is there, and nothing is learned."""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

pytest.importorskip("triton")

from test_loop import TRAIN, VALI, with_  # noqa: E402

from rankgrad.data.packed import packed_lists  # noqa: E402
from rankgrad.kernels.encoder import attention  # noqa: E402
from rankgrad.kernels.encoder import fused as encoder  # noqa: E402
from rankgrad.kernels.encoder import gather as packing  # noqa: E402
from rankgrad.models import MLP, Transformer  # noqa: E402
from rankgrad.training.build import make_objective  # noqa: E402
from rankgrad.training.config import Config, Loss, Train  # noqa: E402
from rankgrad.training.loop import Learner, make_optimiser, train  # noqa: E402
from rankgrad.training.warmup import rehearse  # noqa: E402

KERNELS = {
    "_forward",
    "_backward",
    "_add_norm",
    "_add_norm_backward",
    "_relu",
    "_sums",
    "_collect",
    "_gather",
    "_spread",
}


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

    for module in (attention, encoder, packing):
        for name in KERNELS & set(vars(module)):
            monkeypatch.setattr(module, name, Heard(getattr(module, name), name))
    return names


@pytest.fixture
def batch():
    return next(packed_lists(TRAIN, 4, list_size=16, seed=0, epoch=0, device=DEVICE))


def rehearsed(model, loss, batches):
    """The shapes a loss saw."""
    objective, seen = make_objective(Config(loss=Loss(loss))), []

    def values(scores, labels, mask, generator):
        seen.append(tuple(scores.shape))
        return objective.values(scores, labels, mask, generator)

    rehearse(model.to(DEVICE), objective._replace(values=values), Train(), batches, 136, DEVICE)
    return sorted(seen)


@pytest.mark.parametrize("loss", ["listnet", "ordinal"])  # the second takes other scores, and is left for later
def test_every_kernel_and_every_width_once(launched, loss, batch):
    model = Transformer(136, width=8, layers=2, heads=2, feedforward=16)
    state = torch.get_rng_state()
    assert rehearsed(model, loss, [batch, batch._replace(width=32), batch]) == [(4, 16), (4, 32)]
    assert launched == KERNELS
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_attention_needs_less(launched, batch):
    assert rehearsed(MLP(136, hidden=(4,)), "rmse", [batch]) == [(4, 16)]
    assert launched == {"_gather", "_spread"}


def test_the_end_of_an_epoch_has_nothing_to_rehearse(launched):
    assert rehearsed(MLP(136, hidden=(4,)), "rmse", []) == []
    assert not launched


def test_what_goes_wrong_is_left_for_the_step_to_say(batch):
    def broken(*_):
        raise IndexError

    objective = make_objective(Config())._replace(values=broken)
    rehearse(MLP(136, hidden=(4,)).to(DEVICE), objective, Train(), [batch], 136, DEVICE)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_products_have_the_dtype_of_the_run(precision, batch, monkeypatch):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    heard = []

    def attended(qkv, offsets, longest, dropout, seed, exact):
        heard.append((qkv.dtype, exact))
        return qkv.sum(1)

    monkeypatch.setattr(attention, "list_attention", attended)
    monkeypatch.setattr(encoder, "add_norm", lambda *given: heard.append((given[1].dtype, given[4])))
    for name in ("relu_dropout", "linear"):  # some CPUs have no bfloat16 products
        monkeypatch.setattr(encoder, name, lambda *given: heard.append((given[0].dtype, precision == "float32")))
    model = Transformer(136, width=8, layers=1, feedforward=16).to(DEVICE)
    rehearse(model, make_objective(Config()), Train(precision=precision), [batch], 136, DEVICE)
    assert heard.count((dtype, precision == "float32")) == 3
    assert set(heard) == {(dtype, precision == "float32"), (dtype, dtype), (dtype, torch.float32)}


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_steps_compile_nothing_more(precision, monkeypatch):
    import triton

    config = with_(train_pack=True, train_precision=precision, train_epochs=1, data_list_size=48, train_batch_size=32)
    config = with_(config, model_kind="transformer", model_width=16, model_feedforward=32, train_compile=False)
    model = Transformer(136, width=16, layers=2, feedforward=32).to(DEVICE)
    compiled, heard = [], {}

    def listen(src, **_):
        compiled.append(src.name)

    def rehearse_and_note(*given):
        rehearse(*given)
        heard["rehearsed"] = list(compiled)
        compiled.clear()

    monkeypatch.setattr("rankgrad.training.loop.rehearse", rehearse_and_note)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    events = train(
        Learner(model, make_optimiser(model, config.optimiser)), make_objective(config), TRAIN, VALI, config, DEVICE
    )
    for _ in events:
        pass
    assert "_add_norm_backward" in heard["rehearsed"]
    assert not compiled
