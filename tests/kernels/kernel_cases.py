"""What the tests of the kernels share: lists, comparisons with the torch path in float64, and the tests of short lists.

Kernels run on the GPU where there is one, else in Triton's interpreter (see the conftest.py at the top).
"""

import math

import pytest
import torch

pytest.importorskip("triton")

from rankgrad.losses import LOSSES

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PAIRWISE = ["ranknet", "lambdarank", "ndcg_loss1", "ndcg_loss2", "ndcg_loss2pp"]
NDCG = ["neural_ndcg", "neural_ndcg_transposed"]
RELAXED = [*NDCG, "neural_map", "neural_mrr", "neural_err", "neural_precision"]
EVERY = [*PAIRWISE, "approx_ndcg", *RELAXED]


def on_the_gpu(test):
    """A test that needs a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(not CUDA, reason="needs a CUDA device")(test))


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
    """As few rounds as `iters` for losses that have rounds."""
    return {"sinkhorn_iters": iters} if name in RELAXED else {}


def run(name, scores, labels, mask, backend, **options):
    """The loss and d/d scores."""
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


def check_repeatable(name, *lists, **options):
    first, second = (run(name, *lists, "triton", **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def check_gain_that_is_not_finite(name):
    """A list without a relevant document, whatever its gains: 0 in value and gradient, and no other list is affected."""
    scores, labels, mask = batch((4, 3), 5, ties=False)
    labels[0] = labels[0] + 1
    labels[1] = torch.where(mask[1], 0.0, math.nan)
    options = {"reduction": "none", "gain": lambda y: y - 0.5, **rounds(name, 1)}  # a negative gain is NaN
    value, gradient = run(name, scores, labels, mask, "triton", **options)
    alone, slope = run(name, scores[:1], labels[:1], mask[:1], "triton", **options)
    assert torch.equal(value, torch.cat([alone, torch.zeros_like(alone)]))
    assert torch.equal(gradient, torch.cat([slope, torch.zeros_like(slope)]))


def check_degenerate_lists_and_reductions(name):
    scores = torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.2, 0.3], [3.0, 1.0, 2.0], [2.0, 0.0, 1.0]], device=DEVICE)
    labels = torch.tensor([[2, 1, 0], [0, 0, 0], [1, 1, 1], [0, 2, 1]], device=DEVICE)
    for reduction in ("mean", "sum"):
        agree(name, scores[None], labels[None], None, reduction=reduction, **rounds(name, 2))


def check_half_precision_and_strides(name, dtype):
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


def check_bad_values(name):
    """NaN in value and gradient, in their own list alone; refused on request."""
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


def check_graph_capture(name, scores, labels, mask, replays):
    expected = run(name, scores, labels, mask, "triton")
    leaf = scores.clone().requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        LOSSES[name](leaf, labels, mask).backward()
        leaf.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = LOSSES[name](leaf, labels, mask)
            loss.backward()
    for _ in range(replays):
        loss.detach().fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(loss.detach(), expected[0]) and torch.equal(leaf.grad, expected[1])


class ShortLists:
    """NeuralNDCG of lists of up to 256 documents: what holds for the kernels in Triton and for those in CUDA C++."""

    @pytest.mark.parametrize("name", NDCG)
    @pytest.mark.parametrize("options", [{}, {"k": 1}, {"k": 4}, {"sinkhorn_iters": 0}, {"tau": 0.1}, {"tau": 30.0}])
    def test_options(self, name, options):
        agree(name, *batch((7, 3, 1, 0), 9), **{"sinkhorn_iters": 4, **options})

    @pytest.mark.parametrize("name", NDCG)
    @pytest.mark.parametrize("tau", [1e-50, 1e-39, 1e39])
    def test_temperatures_beyond_float32(self, name, tau):
        agree(name, *batch((7, 3), 9, ties=False), sinkhorn_iters=2, tau=tau)

    @pytest.mark.parametrize("gain", ["linear", torch.sqrt])
    def test_gains(self, gain):
        agree("neural_ndcg", *batch(), gain=gain, sinkhorn_iters=2)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NDCG)
    def test_every_list_stops_by_itself(self, name):
        scores, labels, mask = batch((7, 8, 6), 8)
        scores[1] *= 1e-3  # nearly equal scores are scaled at once
        agree(name, scores, labels, mask, sinkhorn_iters=12, sinkhorn_tol=1e-3)

    @pytest.mark.parametrize("name", NDCG)
    @pytest.mark.parametrize(("n", "width"), [(16, 16), (33, 40), (129, 140)])
    def test_widths(self, name, n, width):
        agree(name, *batch((n,), width), sinkhorn_iters=2)

    @pytest.mark.parametrize("name", NDCG)
    @pytest.mark.parametrize("spread", [1e4, 1e30])
    def test_huge_scores_and_a_huge_outlier(self, name, spread):
        scores, labels, mask = batch((7, 10), 12, spread=spread, ties=False)
        agree(name, scores, labels, mask, sinkhorn_iters=3)
        scores, labels, mask = batch((7, 10), 12)
        scores[:, 4] = torch.where(mask[:, 4], spread, scores[:, 4])
        agree(name, scores, labels, mask, sinkhorn_iters=3)

    @pytest.mark.parametrize("name", NDCG)
    def test_degenerate_lists_and_bad_values(self, name):
        check_degenerate_lists_and_reductions(name)
        check_bad_values(name)
        check_gain_that_is_not_finite(name)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NDCG)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, name, dtype):
        check_half_precision_and_strides(name, dtype)

    @on_the_gpu
    @pytest.mark.parametrize("name", NDCG)
    @pytest.mark.parametrize(("spread", "tau"), [(1.0, 1.0), (10.0, 1.0), (0.5, 0.1), (1e4, 1.0)])
    def test_more_lists_than_the_chip_holds(self, name, spread, tau):
        lists = batch((240,) * 300, 241, spread=spread, ties=False)
        agree(name, *lists, tau=tau, tolerance=1e-4)
        check_repeatable(name, *lists, tau=tau)

    @on_the_gpu
    def test_two_streams_at_once_do_not_wait_for_each_other_forever(self):
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
