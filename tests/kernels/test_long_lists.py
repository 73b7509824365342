"""Relaxed sorts tile by tile, against the torch path in float64: on the GPU where there is one, else in the interpreter.

In the interpreter tiles are made small and lists of any length are sent here, so that a few dozen documents already take
several blocks, chunks and windows.
"""

import math

import pytest
import torch
from kernel_cases import (
    CUDA,
    DEVICE,
    NDCG,
    RELAXED,
    agree,
    batch,
    check_gain_that_is_not_finite,
    check_graph_capture,
    check_repeatable,
    on_the_gpu,
    run,
)

from rankgrad import kernels
from rankgrad.kernels.neural_ndcg.long import launch, windows
from rankgrad.losses import LOSSES

SMALL = launch.Tiles(R=4, G=2, LANES=4, RUN=8)  # blocks of 16 documents, chunks of 8 columns and 16 rows


@pytest.fixture(autouse=True)
def every_list_is_long(monkeypatch):
    monkeypatch.setattr(kernels, "LONGEST_IN_REGISTERS", 0)
    if not CUDA:
        monkeypatch.setattr(launch, "TILES", SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", NDCG)
def test_ragged_lists_with_ties(name):
    agree(name, *batch((9, 35, 0), 36), sinkhorn_iters=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize("fast", [128.0, -1.0], ids=["float32", "float64"])
def test_entries_of_wide_windows(name, fast, monkeypatch):
    """Far entries by multiplication, near ones in either precision; all other tests here take float64 for every entry."""
    monkeypatch.setattr(windows, "WIDE", 0)
    monkeypatch.setattr(windows, "FAST", fast)
    scores, labels, _ = batch((35,), 35, spread=0.3)
    agree(name, scores, labels, sinkhorn_iters=1)
    scores = scores.sort(descending=True).values  # the same with a wide gap in the middle of a chunk of close scores
    agree(name, torch.cat([scores[:, :19] + 1000, scores[:, 19:]], -1), labels, sinkhorn_iters=0)


@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize(
    "options", [{"k": 1, "gain": "linear"}, {"sinkhorn_iters": 0}, {"tau": 0.05}, {"tau": 30.0}, {"tau": 1e-6}]
)
def test_options(name, options):
    agree(name, *batch((17,), 20), **{"sinkhorn_iters": 1, **options})


def test_gains_given_as_a_function():
    agree("neural_ndcg", *batch((17,), 20), sinkhorn_iters=1, gain=torch.sqrt)


@pytest.mark.slow
@pytest.mark.parametrize("name", NDCG)
def test_every_list_stops_by_itself(name):
    scores, labels, mask = batch((17, 14, 6), 18)
    scores[1] *= 1e-3  # nearly equal scores are scaled at once
    agree(name, scores, labels, mask, sinkhorn_iters=4, sinkhorn_tol=0.03)


@pytest.mark.parametrize("name", NDCG)
def test_windows_leave_out_what_is_zero(name):
    """Groups of equal scores far apart: each window is its group, and the blocks next to it are not visited."""
    groups = torch.tensor([3, 20, 9, 8])
    scores = torch.repeat_interleave(torch.tensor([900.0, 40.0, -30.0, -1e30]), groups).to(DEVICE)[None]
    lists = windows.find_windows(scores, torch.tensor([40], dtype=torch.int32, device=DEVICE), 1.0, SMALL)
    assert lists.windows[0, 0, :, :2].tolist() == [[0, 23], [0, 32], [32, 40]]
    assert lists.windows[1, 0, :, :2].tolist() == [[0, 23], [0, 32], [32, 40]]
    first, last = torch.tensor([0, 3, 23, 32]), torch.tensor([2, 22, 31, 39])
    assert lists.spans[0, 0, :40].tolist() == torch.repeat_interleave(first, groups).tolist()
    assert lists.spans[1, 0, :40].tolist() == torch.repeat_interleave(last, groups).tolist()
    labels = torch.randint(0, 5, scores.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    agree(name, scores + torch.linspace(0, 0.1, 40, device=DEVICE), labels, None, sinkhorn_iters=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RELAXED)
def test_other_metrics_and_samples(name):
    scores, labels, mask = batch((17,), 20)
    noise = torch.randn(1, *scores.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    agree(name, scores, labels, mask, noise=noise, log_scores=False, sinkhorn_iters=1)
    if name == "neural_map":
        agree(name, scores, labels, mask, sinkhorn_iters=2, k=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize("spread", [1e4, 1e30])
def test_huge_scores_and_a_huge_outlier(name, spread):
    agree(name, *batch((17,), 20, spread=spread, ties=False), sinkhorn_iters=1)
    scores, labels, mask = batch((17,), 20)
    scores[:, 4] = torch.where(mask[:, 4], spread, scores[:, 4])
    agree(name, scores, labels, mask, sinkhorn_iters=1)


@pytest.mark.parametrize("name", ["neural_ndcg", "neural_map"])
def test_bad_values_are_loud_and_stay_in_their_list(name):
    scores, labels, mask = batch((12, 5, 6), 12)
    scores[1, int(mask[1].nonzero()[0])] = math.nan
    labels[2, int(mask[2].nonzero()[0])] = -1.0
    value, gradient = run(name, scores, labels, mask, "triton", reduction="none", check=False, sinkhorn_iters=0)
    assert value.isnan().tolist() == [False, True, True]
    assert bool(gradient[0].isfinite().all()) and bool((gradient[~mask] == 0).all())
    assert bool(gradient[1:].isnan().any(-1).all())


@pytest.mark.parametrize("name", NDCG)
def test_degenerate_lists_half_precision_and_strides(name):
    scores = torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.2, 0.3], [3.0, 1.0, 2.0], [2.0, 0.0, 1.0]], device=DEVICE)
    labels = torch.tensor([[2, 1, 0], [0, 0, 0], [1, 1, 1], [0, 2, 1]], device=DEVICE)
    agree(name, scores[None], labels[None], None, reduction="mean", sinkhorn_iters=1)
    half = scores.bfloat16().T[:, ::2].T
    value, gradient = run(name, half, labels[::2], None, "triton", sinkhorn_iters=1)
    expected, slope = run(name, half.float(), labels[::2], None, "torch", sinkhorn_iters=1)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.float(), slope, rtol=2e-2, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(default):
    lists = batch((17, 9), 18, ties=False)
    expected = run("neural_ndcg", *lists, "triton", sinkhorn_iters=1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = run("neural_ndcg", *lists, "triton", sinkhorn_iters=1)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(expected, found))


@pytest.mark.parametrize("name", NDCG)
def test_a_gain_that_is_not_finite_in_a_list_that_is_not_informative(name):
    check_gain_that_is_not_finite(name)


def test_the_length_decides(monkeypatch):
    monkeypatch.setattr(kernels, "LONGEST_IN_REGISTERS", 18)
    monkeypatch.setattr(launch, "sort_lists", None)
    monkeypatch.setattr(launch, "find_windows", None)
    scores, labels, mask = batch((17,), 18)
    for name in ("neural_ndcg", "neural_map"):
        run(name, scores, labels, mask, "triton", sinkhorn_iters=1)
        with pytest.raises(TypeError):
            run(name, *(torch.cat([t, t], -1) for t in (scores, labels, mask)), "triton", sinkhorn_iters=1)


@on_the_gpu
@pytest.mark.parametrize("name", RELAXED)
def test_long_lists_on_the_gpu(name):
    lengths = (1500, 257, 300, 2, 1031, 0, 1280, 700)
    agree(name, *batch(lengths, 1501, ties=False), tolerance=1e-4)
    agree(name, *batch(lengths, 1501), tolerance=1e-4, k=10)


@on_the_gpu
@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize(("spread", "tau"), [(1.0, 1.0), (10.0, 1.0), (0.5, 0.1), (1e4, 1.0), (0.0, 1.0)])
def test_accuracy_and_repeatability(name, spread, tau):
    lists = batch((1024, 1000, 513), 1024, spread=spread, ties=False)
    agree(name, *lists, tau=tau, tolerance=1e-4)
    check_repeatable(name, *lists, tau=tau)


@on_the_gpu
@pytest.mark.parametrize("name", NDCG)
def test_one_very_long_list(name):
    agree(name, *batch((9000,), 9001, ties=False), tolerance=1e-4)


@on_the_gpu
def test_memory_is_linear_in_the_length():
    def peak(n):
        scores = torch.randn(1, n, device=DEVICE).tanh().requires_grad_()
        labels = torch.randint(0, 5, (1, n), device=DEVICE)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        LOSSES["neural_ndcg"](scores, labels).backward()
        return torch.cuda.max_memory_allocated() - before

    peak(1000)
    assert peak(64_000) < 2.2 * peak(32_000)


@on_the_gpu
@pytest.mark.parametrize("name", ["neural_ndcg", "neural_ndcg_transposed", "neural_map"])
def test_graph_capture(name):
    check_graph_capture(name, *batch((600, 300, 129), 640, ties=False), replays=2)
