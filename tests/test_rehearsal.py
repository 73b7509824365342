"""Kernels compiled before the first step: every part of a step is there, and nothing is learned."""

import contextlib
import os

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

pytest.importorskip("triton")

from rankgrad.config import Config, Loss, Train  # noqa: E402
from rankgrad.data.packing import packed_lists  # noqa: E402
from rankgrad.models import MLP, Transformer  # noqa: E402
from rankgrad.rehearsal import rehearse  # noqa: E402
from rankgrad.resolve import make_objective  # noqa: E402
from rankgrad.train import Learner, make_optimiser, train  # noqa: E402
from test_train import TRAIN, VALI, with_  # noqa: E402


class OneByOne(contextlib.nullcontext):
    """Instead of threads, which Triton's interpreter does not bear."""

    map = staticmethod(map)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    if not CUDA:
        monkeypatch.setattr("rankgrad.rehearsal.ThreadPoolExecutor", lambda _: OneByOne(OneByOne))


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    from rankgrad.kernels import attention, encoder, packing

    names = set()

    class Heard:
        def __init__(self, kernel, name):
            self.kernel, self.name = kernel, name

        def __getitem__(self, grid):
            names.add(self.name)
            return self.kernel[grid]

    for module in (attention, encoder, packing):
        for name in (
            "_forward",
            "_backward",
            "_add_norm",
            "_add_norm_backward",
            "_relu",
            "_sums",
            "_collect",
            "_gather",
            "_spread",
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Heard(getattr(module, name), name))
    return names


def rehearsed(model, loss, batches):
    """The shapes a loss saw."""
    objective, seen = make_objective(Config(loss=Loss(loss))), []

    def values(scores, labels, mask, generator):
        seen.append(tuple(scores.shape))
        return objective.values(scores, labels, mask, generator)

    rehearse(model.to(DEVICE), objective._replace(values=values), Train(), batches, DEVICE)
    return sorted(set(seen))


@pytest.mark.parametrize("loss", ["listnet", "ordinal"])  # the second takes other scores, and is left for later
def test_every_kernel_and_every_width_once(launched, loss):
    model = Transformer(136, width=8, layers=2, heads=2, feedforward=16)
    batch, *_ = packed_lists(TRAIN, 4, list_size=16, seed=0, epoch=0, device=DEVICE)
    state = torch.get_rng_state()
    assert rehearsed(model, loss, [batch, batch._replace(width=32), batch]) == [(4, 16), (4, 32)]
    assert launched == {
        *(
            "_forward",
            "_backward",
            "_add_norm",
            "_add_norm_backward",
            "_relu",
            "_sums",
            "_collect",
            "_gather",
            "_spread",
        )
    }
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_attention_needs_less(launched):
    batch, *_ = packed_lists(TRAIN, 4, list_size=16, seed=0, epoch=0, device=DEVICE)
    assert rehearsed(MLP(136, hidden=(4,)), "rmse", [batch]) == [(4, 16)]
    assert launched == {"_gather", "_spread"}


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

    monkeypatch.setattr("rankgrad.train.rehearse", rehearse_and_note)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    events = train(
        Learner(model, make_optimiser(model, config.optimiser)), make_objective(config), TRAIN, VALI, config, DEVICE
    )
    for _ in events:
        pass
    assert "_add_norm_backward" in heard["rehearsed"]
    assert not compiled
