"""Relaxed sorts of lists of up to 256 documents in Triton, against the torch path in float64."""

import pytest
import torch
from kernel_cases import (
    CUDA,
    DEVICE,
    NDCG,
    RELAXED,
    ShortLists,
    agree,
    batch,
    check_bad_values,
    check_degenerate_lists_and_reductions,
    check_graph_capture,
    check_half_precision_and_strides,
    on_the_gpu,
)

from rankgrad.kernels.neural_ndcg.short import launch
from rankgrad.kernels.neural_ndcg.short.workspace import words

OTHERS = [name for name in RELAXED if name not in NDCG]


class TestNeuralNdcg(ShortLists):
    pass


@pytest.mark.parametrize("tau", [1e-50, 1e-39, 1e39])
def test_temperatures_beyond_float32(tau):
    agree("neural_map", *batch((7, 3), 9, ties=False), sinkhorn_iters=2, tau=tau)


@pytest.mark.parametrize("name", RELAXED)
def test_other_metrics_and_samples(name):
    scores, labels, mask = batch((7, 3), 9)
    noise = torch.randn(2, *scores.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    options = {} if name in NDCG else {"k": 3}
    agree(name, scores, labels, mask, noise=noise, log_scores=False, sinkhorn_iters=3, **options)
    if name not in NDCG:
        agree(name, scores, labels, mask, sinkhorn_iters=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_degenerate_lists_and_bad_values(name):
    check_degenerate_lists_and_reductions(name)
    check_bad_values(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strides(name, dtype):
    check_half_precision_and_strides(name, dtype)


def test_the_workspace_of_64_lists_of_240_is_less_than_8_mebibytes():
    assert 4 * (words(64, 240, 30, 256) + 64 * 240) < 8 * 2**20
    assert words(64, 480, 30, 512) < 2.01 * words(64, 240, 30, 256)


@pytest.mark.skipif(CUDA, reason="looks at kernels that are interpreted, whatever the device of their tensors")
def test_programs_that_run_one_after_the_other_do_not_wait_for_each_other(monkeypatch):
    from torch._subclasses import FakeTensorMode

    asked = []
    kernel = type(launch.rounds_kernel)
    monkeypatch.setattr(kernel, "__getitem__", lambda _, grid: lambda *_, **how: asked.append((grid, how["SPLIT"])))
    with FakeTensorMode():
        scores = torch.empty(3, 200, device="cuda")
    launch._rounds(scores, *[scores] * 4, 1, 0.0, 200, False, forward=True, backward=True)
    assert scores.is_cuda and asked == [((3,), 1)]


@on_the_gpu
@pytest.mark.parametrize("name", RELAXED)
def test_lists_of_up_to_256_on_the_gpu(name):
    agree(name, *batch((240, 200, 129, 128, 3, 256), 256, ties=False), tolerance=5e-5)


@on_the_gpu
@pytest.mark.parametrize("name", RELAXED)
def test_graph_capture(name):
    check_graph_capture(name, *batch((240, 200, 129), 240, ties=False), replays=3)
