"""Triton twins against the torch path in float64: on the GPU where there is one, else under TRITON_INTERPRET=1."""

import math
import os
import subprocess
import sys

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # as conftest.py does, for runs without it: read when triton is first imported

pytest.importorskip("triton")

from rankgrad import kernels  # noqa: E402
from rankgrad.losses import LOSSES  # noqa: E402

on_the_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device: programs wait for each other")

PAIRWISE = ["ranknet", "lambdarank", "ndcg_loss1", "ndcg_loss2", "ndcg_loss2pp"]
NDCG = ["neural_ndcg", "neural_ndcg_transposed"]
RELAXED = [*NDCG, "neural_map", "neural_mrr", "neural_err", "neural_precision"]
EVERY = [*PAIRWISE, "approx_ndcg", *RELAXED]


def batch(lengths=(7, 3, 10, 1, 0), width=12, seed=0, spread=1.0, ties=True):
    """Lists with padding in random places and NaN under it; scores with ties."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, n in enumerate(lengths):
        mask[row, torch.randperm(width, generator=draw)[:n]] = True
    scores = spread * torch.randn(mask.shape, generator=draw)
    scores = scores.round(decimals=1) if ties else scores
    labels = torch.randint(0, 5, mask.shape, generator=draw).float()
    scores, labels = scores.masked_fill(~mask, math.nan), labels.masked_fill(~mask, math.nan)
    return scores.to(DEVICE), labels.to(DEVICE), mask.to(DEVICE)


def rounds(name, iters):
    return {"sinkhorn_iters": iters} if name in RELAXED else {}


def run(name, scores, labels, mask, backend, **options):
    scores = scores.detach().clone().requires_grad_()
    torch.use_deterministic_algorithms(backend == "triton", warn_only=True)  # torch.empty holds NaN
    try:
        loss = LOSSES[name](scores, labels, mask, backend=backend, **options)
        weights = torch.linspace(1, 2, max(1, loss.numel()), dtype=loss.dtype, device=loss.device)
        (loss * weights.view(loss.shape)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return loss.detach(), scores.grad


def agree(name, scores, labels, mask=None, tolerance=2e-5, **options):
    """Values of each list and gradients, against float64; the error is relative to the list's gradient."""
    options = {"reduction": "none", **options}
    expected, slope = run(name, scores.double(), labels, mask, "torch", **options)
    value, gradient = run(name, scores, labels, mask, "triton", **options)
    assert value.dtype == torch.float32 and gradient.dtype == scores.dtype and value.shape == expected.shape
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
    off = (gradient.double() - slope).norm(dim=-1)
    assert bool((off <= tolerance * slope.norm(dim=-1) + 1e-6).all()), off / slope.norm(dim=-1)
    if mask is not None:
        assert bool((gradient[~mask] == 0).all())


def check_gain_that_is_not_finite(name):
    """A list without a relevant document teaches nothing, whatever its gains: 0 in value and gradient, and no other list sees it."""
    scores, labels, mask = batch((4, 3), 5, ties=False)
    labels[0] = labels[0] + 1
    labels[1] = torch.where(mask[1], 0.0, math.nan)
    options = {"reduction": "none", "gain": lambda y: y - 0.5, **rounds(name, 1)}  # a negative gain is NaN
    value, gradient = run(name, scores, labels, mask, "triton", **options)
    alone, slope = run(name, scores[:1], labels[:1], mask[:1], "triton", **options)
    assert torch.equal(value, torch.cat([alone, torch.zeros_like(alone)]))
    assert torch.equal(gradient, torch.cat([slope, torch.zeros_like(slope)]))


@pytest.mark.parametrize("name", [*NDCG, "approx_ndcg", "lambdarank", "ndcg_loss1"])
def test_a_gain_that_is_not_finite_where_nothing_is_taught(name):
    check_gain_that_is_not_finite(name)


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("options", [{}, {"k": 3}, {"k": 3, "pairs": "both"}])
def test_pairwise_twins(name, options):
    agree(name, *batch(), **options)


@pytest.mark.parametrize("name", ["lambdarank", "ndcg_loss2pp", "approx_ndcg"])
def test_lists_of_several_tiles(name):
    agree(name, *batch((67, 131), 133))


@pytest.mark.parametrize("name", ["ndcg_loss2pp", "approx_ndcg", "neural_ndcg"])
@pytest.mark.parametrize("gain", ["linear", torch.sqrt])
def test_gains(name, gain):
    agree(name, *batch(), gain=gain, **rounds(name, 2))


def test_approx_ndcg():
    agree("approx_ndcg", *batch(), alpha=10.0)


@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize("options", [{}, {"k": 1}, {"k": 4}, {"sinkhorn_iters": 0}, {"tau": 0.1}, {"tau": 30.0}])
def test_neural_ndcg_twins(name, options):
    agree(name, *batch((7, 3, 1, 0), 9), **{"sinkhorn_iters": 4, **options})


@pytest.mark.parametrize("name", [*NDCG, "neural_map"])
@pytest.mark.parametrize("tau", [1e-50, 1e-39, 1e39])
def test_temperatures_beyond_float32(name, tau):
    agree(name, *batch((7, 3), 9, ties=False), sinkhorn_iters=2, tau=tau)


@pytest.mark.parametrize("name", NDCG)
def test_every_list_stops_by_itself(name):
    scores, labels, mask = batch((7, 8, 6), 8)
    scores[1] *= 1e-3  # nearly equal scores are scaled at once
    agree(name, scores, labels, mask, sinkhorn_iters=12, sinkhorn_tol=1e-3)


@pytest.mark.parametrize("name", RELAXED)
def test_relaxed_metrics_and_samples(name):
    scores, labels, mask = batch((7, 3), 9)
    noise = torch.randn(2, *scores.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    options = {} if name in NDCG else {"k": 3}
    agree(name, scores, labels, mask, noise=noise, log_scores=False, sinkhorn_iters=3, **options)
    if name not in NDCG:
        agree(name, scores, labels, mask, sinkhorn_iters=3, **options)


@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize(("n", "width"), [(16, 16), (33, 40), (129, 140)])
def test_widths_of_neural_ndcg(name, n, width):
    agree(name, *batch((n,), width), sinkhorn_iters=2)


@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize("spread", [1e4, 1e30])
def test_huge_scores_and_a_huge_outlier(name, spread):
    scores, labels, mask = batch((7, 10), 12, spread=spread, ties=False)
    agree(name, scores, labels, mask, sinkhorn_iters=3)
    scores, labels, mask = batch((7, 10), 12)
    scores[:, 4] = torch.where(mask[:, 4], spread, scores[:, 4])
    agree(name, scores, labels, mask, sinkhorn_iters=3)


@pytest.mark.parametrize("name", ["lambdarank", "ranknet", "approx_ndcg"])
def test_huge_score_gaps(name):
    scores, labels, mask = batch((7, 10), 12, spread=1e4, ties=False)
    agree(name, scores, labels, mask)


@pytest.mark.parametrize("name", EVERY)
def test_degenerate_lists_and_reductions(name):
    scores = torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.2, 0.3], [3.0, 1.0, 2.0], [2.0, 0.0, 1.0]], device=DEVICE)
    labels = torch.tensor([[2, 1, 0], [0, 0, 0], [1, 1, 1], [0, 2, 1]], device=DEVICE)
    for reduction in ("mean", "sum"):
        agree(name, scores[None], labels[None], None, reduction=reduction, **rounds(name, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY)
def test_half_precision_and_strides(name, dtype):
    scores, labels, mask = batch((7, 5), 9)
    half = scores.to(dtype)[:, None, :].expand(2, 3, 9)[:, ::2]
    options = rounds(name, 2)
    labels, mask = (t[:, None, :].expand(2, 2, 9) for t in (labels, mask))
    value, gradient = run(name, half, labels, mask, "triton", **options)
    expected, slope = run(name, half.double(), labels, mask, "torch", **options)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    assert gradient.dtype == dtype and bool(gradient.isfinite().all())
    off = (gradient.double() - slope).norm(dim=-1)
    step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # of the smallest numbers: some gradients here are 1e-6
    assert bool((off <= 2e-2 * slope.norm(dim=-1) + 3 * step).all()), off


def test_the_gradient_is_scaled_before_it_is_rounded():
    scores = torch.tensor([20.0, 0.0], dtype=torch.float16, device=DEVICE, requires_grad=True)
    loss = LOSSES["ranknet"](scores, torch.tensor([1, 0], device=DEVICE), backend="triton")
    loss.backward(torch.tensor(2.0**16, device=DEVICE))  # as a loss scaler does; float16 has no number near exp(-20)
    expected = 2.0**16 * math.exp(-20)
    torch.testing.assert_close(scores.grad.tolist(), [-expected, expected], rtol=2e-3, atol=0)


def test_the_workspace_of_64_lists_of_240_is_less_than_8_mebibytes():
    from rankgrad.kernels.neural_ndcg.short.workspace import words

    assert 4 * (words(64, 240, 30, 256) + 64 * 240) < 8 * 2**20
    assert words(64, 480, 30, 512) < 2.01 * words(64, 240, 30, 256)


@pytest.mark.skipif(CUDA, reason="looks at kernels that are interpreted, whatever the device of their tensors")
def test_programs_that_run_one_after_the_other_do_not_wait_for_each_other(monkeypatch):
    from torch._subclasses import FakeTensorMode

    from rankgrad.kernels.neural_ndcg.short import launch as scaled_sort

    asked = []
    launch = type(scaled_sort.rounds_kernel)
    monkeypatch.setattr(launch, "__getitem__", lambda _, grid: lambda *_, **how: asked.append((grid, how["SPLIT"])))
    with FakeTensorMode():
        scores = torch.empty(3, 200, device="cuda")
    scaled_sort._rounds(scores, *[scores] * 4, 1, 0.0, 200, False, forward=True, backward=True)
    assert scores.is_cuda and asked == [((3,), 1)]


@pytest.mark.parametrize("name", EVERY)
def test_bad_values_are_loud_and_stay_in_their_list(name):
    scores, labels, mask = batch((7, 5, 6), 9)
    scores[1, int(mask[1].nonzero()[0])] = math.nan
    labels[2, int(mask[2].nonzero()[0])] = -1.0
    options = {"reduction": "none", "check": False, **rounds(name, 2)}
    value, gradient = run(name, scores, labels, mask, "triton", **options)
    assert value.isnan().tolist() == [False, True, True]
    assert bool(gradient[0].isfinite().all()) and bool((gradient[~mask] == 0).all())
    assert bool(gradient[1:].isnan().any(-1).all())
    with pytest.raises(ValueError, match="real documents"):
        LOSSES[name](scores, labels, mask, check=True, backend="triton")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64, torch.bfloat16])
def test_label_dtypes(dtype):
    scores, labels, mask = batch((7, 5), 9)
    labels = labels.nan_to_num(0).to(dtype)
    agree("lambdarank", scores, labels, mask)
    agree("lambdarank", scores[0][mask[0]], labels[0][mask[0]], None)


@pytest.mark.parametrize("name", EVERY)
def test_empty_tensors_take_the_torch_path(name):
    for shape in ((0, 5), (3, 0)):
        scores = torch.zeros(shape, device=DEVICE, requires_grad=True)
        LOSSES[name](scores, torch.zeros(shape, device=DEVICE), backend="triton").backward()
        assert scores.grad.shape == shape


def test_arguments_are_validated_on_this_path_too():
    scores = torch.zeros(2, 3, device=DEVICE)
    for options, message in (
        ({"reduction": "median"}, "reduction"),
        ({"gain": "cubic"}, "gain"),
        ({"k": 0}, "k must"),
        ({"check": 3}, "check"),
    ):
        for name in ("lambdarank", "neural_ndcg"):
            with pytest.raises(ValueError, match=message):
                LOSSES[name](scores, scores, backend="triton", **options)
    with pytest.raises(ValueError, match="shape"):
        LOSSES["ranknet"](scores, scores[:1], backend="triton")


def test_which_path_a_tensor_gets(monkeypatch):
    scores = torch.zeros(2, 3)
    assert kernels.choose("auto", scores) == kernels.choose("torch", scores) == "torch"
    for backend, tensor, message in (
        ("triton", scores.double(), "float64"),
        ("fast", scores, "'auto', 'torch', 'triton', got 'fast'"),
    ):
        if CUDA and backend == "triton":
            tensor = tensor.cuda()
            assert kernels.choose("auto", tensor) == "torch"
        with pytest.raises(ValueError, match=message):
            kernels.choose(backend, tensor)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="scores are on cpu"):
        kernels.choose("triton", scores)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_INSTALLED", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        kernels.choose("triton", scores)


def test_losses_do_not_import_triton_until_used():
    code = "import sys, torch, rankgrad.losses as l; l.neural_ndcg(torch.zeros(3), torch.ones(3)); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@on_the_gpu
@pytest.mark.parametrize("name", EVERY)
def test_long_lists_on_the_gpu(name):
    agree(name, *batch((240, 200, 129, 128, 3, 256), 256, ties=False), tolerance=5e-5)


@on_the_gpu
@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize(("spread", "tau"), [(1.0, 1.0), (10.0, 1.0), (0.5, 0.1), (1e4, 1.0)])
def test_more_lists_than_the_chip_holds(name, spread, tau):
    scores, labels, mask = batch((240,) * 300, 241, spread=spread, ties=False)
    agree(name, scores, labels, mask, tau=tau, tolerance=1e-4)
    first = run(name, scores, labels, mask, "triton", tau=tau)
    second = run(name, scores, labels, mask, "triton", tau=tau)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@on_the_gpu
def test_two_streams_at_once_do_not_wait_for_each_other_forever():
    scores, labels, mask = batch((240,) * 200, 240, ties=False)
    expected = run("neural_ndcg", scores, labels, mask, "triton")
    streams = [torch.cuda.Stream() for _ in range(3)]
    leaves = [scores.clone().requires_grad_() for _ in streams]
    torch.cuda.synchronize()
    for _ in range(5):
        for stream, leaf in zip(streams, leaves):
            with torch.cuda.stream(stream):
                leaf.grad = None
                LOSSES["neural_ndcg"](leaf, labels, mask).backward()
    torch.cuda.synchronize()
    assert all(torch.equal(leaf.grad, expected[1]) for leaf in leaves)


@on_the_gpu
@pytest.mark.parametrize("name", PAIRWISE)
def test_very_long_lists_on_the_gpu(name):
    agree(name, *batch((3000, 2500), 3001, ties=False), tolerance=5e-5)


@on_the_gpu
@pytest.mark.parametrize("name", EVERY)
def test_automatic_choice_and_graph_capture(name):
    scores, labels, mask = batch((240, 200, 129), 240, ties=False)
    expected = run(name, scores, labels, mask, "triton")
    automatic = run(name, scores, labels, mask, "auto")
    assert all(torch.equal(a, b) for a, b in zip(expected, automatic))
    leaf = scores.clone().requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        LOSSES[name](leaf, labels, mask).backward()
        leaf.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = LOSSES[name](leaf, labels, mask)
            loss.backward()
    for _ in range(3):
        loss.detach().fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(loss.detach(), expected[0]) and torch.equal(leaf.grad, expected[1])
