"""Pointwise and listwise losses, SoftRank and the metrics: the kernels against the torch path in float64."""

import math
from functools import partial

import pytest
import torch
from kernel_cases import DEVICE, batch, on_the_gpu

from rankgrad import metrics
from rankgrad.losses import LOSSES
from rankgrad.metrics import METRICS

UNITS = 3
DOCUMENTS = ["listnet", "softmax", "xe_ndcg", "query_rmse", "rmse", "bce", "ordinal", "listmle", "soft_rank"]
OPTIONS = {
    "query_rmse": [{}, {"count_empty": True}],
    "rmse": [{}, {"levels": 3.0}],
    "bce": [{}, {"threshold": 2.0}],
    "listmle": [{}, {"ties": "random"}],
    "soft_rank": [{}, {"k": 3}, {"sigma": 0.1}, {"gain": "linear"}, {"gain": torch.sqrt}],
}
GRADED = [{}, {"k": 3}, {"gain": "linear"}, {"gain": torch.sqrt, "k": 2}]
BINARY = [{}, {"k": 1}, {"k": 4, "threshold": 2.0}]
METRIC_OPTIONS = {"ndcg": GRADED, "dcg": GRADED, "err": [{}, {"k": 3}, {"max_label": 3.0}]}
every_loss = pytest.mark.parametrize("name", DOCUMENTS)


def loss(name, scores, labels, mask, backend, **options):
    """The loss and d/d scores, with several units for `ordinal` and given noise where a loss is random."""
    if name == "ordinal":
        scores = scores[..., None] * torch.linspace(1, -1, UNITS, device=scores.device, dtype=scores.dtype)
    if name == "xe_ndcg" or options.get("ties") == "random":
        draws = torch.rand(labels.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        options["noise"] = draws.to(labels.device)
    scores = scores.detach().clone().requires_grad_()
    value = LOSSES[name](scores, labels, mask, backend=backend, **options)
    weights = torch.linspace(1, 2, max(1, value.numel()), dtype=value.dtype, device=value.device)
    (value * weights.view(value.shape)).sum().backward()
    return value.detach(), scores.grad


def agree(name, scores, labels, mask=None, tolerance=2e-5, **options):
    for reduction in ("none", "mean", "sum"):
        given = {"reduction": reduction, **options}
        expected, slope = loss(name, scores.double(), labels, mask, "torch", **given)
        value, gradient = loss(name, scores, labels, mask, "triton", **given)
        assert value.dtype == torch.float32 and gradient.dtype == scores.dtype
        torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        slope, gradient = (g.flatten(labels.dim() - 1).double() for g in (slope, gradient))
        off = (gradient - slope).norm(dim=-1)
        assert bool((off <= tolerance * slope.norm(dim=-1) + 1e-6).all()), (off, slope.norm(dim=-1))


@pytest.mark.parametrize(("name", "options"), [(n, o) for n in DOCUMENTS for o in OPTIONS.get(n, [{}])])
def test_values_and_gradients(name, options):
    agree(name, *batch(), **options)


@every_loss
def test_lists_of_several_tiles(name):
    agree(name, *batch((67, 71), 73))


@every_loss
def test_degenerate_lists(name):
    scores = torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.2, 0.3], [3.0, 1.0, 2.0], [2.0, 0.0, 1.0]], device=DEVICE)
    labels = torch.tensor([[2, 1, 0], [0, 0, 0], [1, 1, 1], [0, 2, 1]], device=DEVICE)
    agree(name, scores[None], labels[None])
    agree(name, scores[1:2], labels[1:2])  # nothing to learn from, for most: a mean over no list
    agree(name, scores[0], labels[0])
    agree(name, scores[:, :1], labels[:, :1])


@every_loss
def test_bad_values_are_loud_and_stay_in_their_list(name):
    scores, labels, mask = batch((7, 5, 6), 9)
    scores[1, int(mask[1].nonzero()[0])] = math.nan
    labels[2, int(mask[2].nonzero()[0])] = -1.0
    value, gradient = loss(name, scores, labels, mask, "triton", reduction="none", check=False)
    assert value.isnan().tolist() == [False, True, True]
    gradient = gradient.flatten(2) if gradient.dim() > 2 else gradient[..., None]
    assert bool(gradient[0].isfinite().all()) and bool((gradient[~mask] == 0).all())
    assert bool(gradient[1:].isnan().any(-1).any(-1).all())
    with pytest.raises(ValueError, match="real documents"):
        loss(name, scores, labels, mask, "triton", check=True)


@every_loss
@pytest.mark.parametrize("size", [1e4, 1e20, 3e38])
def test_huge_scores_are_as_by_torch(name, size):
    """The loss of scores whose sums overflow is that of scores scaled down: finite, by the kernel and by torch in float32."""
    scores, labels, mask = batch((7, 10), 12, ties=False)
    scores = scores / scores[mask].abs().max() * size
    value, gradient = loss(name, scores, labels, mask, "triton", reduction="none")
    expected, slope = loss(name, scores, labels, mask, "torch", reduction="none")
    assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())
    torch.testing.assert_close(value, expected, rtol=2e-5, atol=2e-5)
    if (
        name == "listmle" and size > 1e15
    ):  # torch's logcumsumexp loses the logarithm beside such scores: 1 of every 2 shares
        slope = loss(name, scores / size * 1e4, labels, mask, "torch", reduction="none")[1]
        slope = slope * (2.0**-24 if size == 3e38 else 1.0)
    torch.testing.assert_close(gradient, slope, rtol=2e-4, atol=1e-6 + 2e-5 * float(slope.abs().max()))


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strides(name, dtype):
    scores, labels, mask = batch((7, 5), 9)
    half = scores.to(dtype)[:, None, :].expand(2, 3, 9)[:, ::2]
    labels, mask = (t[:, None, :].expand(2, 2, 9) for t in (labels, mask))
    value, gradient = loss(name, half, labels, mask, "triton")
    expected, slope = loss(name, half.float(), labels, mask, "torch")
    assert gradient.dtype == dtype
    torch.testing.assert_close(value, expected, rtol=1e-2 if name == "ordinal" else 1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.float(), slope, rtol=2e-2, atol=1e-2 * float(slope.abs().max()))


@every_loss
def test_second_derivatives_are_those_of_the_torch_path(name):
    scores, labels, mask = batch((7, 3), 9)
    scores = scores.nan_to_num(0.5)
    if name == "ordinal":
        scores = scores[..., None].expand(2, 9, UNITS)
    noise = {"noise": torch.full(labels.shape, 0.5, device=DEVICE)} if name == "xe_ndcg" else {}
    results = []
    for backend in ("triton", "torch"):
        leaf = scores.clone().requires_grad_()
        value = LOSSES[name](leaf, labels, mask, backend=backend, **noise)
        (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), leaf)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-7)


def test_lists_that_are_too_long_take_the_torch_path_or_are_refused():
    scores, labels = torch.zeros(1, 5000, device=DEVICE), torch.ones(1, 5000, device=DEVICE)
    for function in (LOSSES["listnet"], LOSSES["listmle"], METRICS["ndcg"]):
        with pytest.raises(ValueError, match="lists of up to"):
            function(scores, labels, backend="triton")
    with pytest.raises(ValueError, match="float32 holds"):
        LOSSES["bce"](scores[:, :5], labels[:, :5], threshold=0.1, backend="triton")
    with pytest.raises(ValueError, match="weights"):
        LOSSES["bce"](scores[:, :5], labels[:, :5], weights=labels[:, :5], backend="triton")


@pytest.mark.parametrize(("name", "options"), [(n, o) for n in METRICS for o in METRIC_OPTIONS.get(n, BINARY)])
def test_metrics(name, options):
    metric = partial(METRICS[name], **options)
    some, all_of_them = (math.nan,), (0.0, 1.0, math.nan)  # what an empty list counts as
    cases = [(batch(), all_of_them), (batch((67, 71), 73), some), (batch((3, 3), 3), some)]
    cases.append((tuple(t[:, None, ::2].expand(5, 2, 6) for t in batch()), all_of_them))  # views
    for (scores, labels, mask), empties in cases:
        for empty in empties:
            value = metric(scores, labels, mask, empty=empty, backend="triton")
            expected = metric(scores, labels, mask, empty=empty, backend="torch")
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    scores, labels = torch.tensor([1.0, 3.0, 3.0], device=DEVICE), torch.tensor([0, 2, 0], device=DEVICE)
    for given in (scores, scores.half()):
        assert metric(given, labels, backend="triton") == metric(given, labels, backend="torch")


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_bad_values(name):
    scores, labels, mask = batch((7, 5, 6), 9)
    scores[1, int(mask[1].nonzero()[0])] = math.inf
    labels[2, int(mask[2].nonzero()[0])] = math.nan
    value = METRICS[name](scores, labels, mask, check=False, backend="triton")
    assert value.isnan().tolist() == [False, True, True]
    with pytest.raises(ValueError, match="real documents"):
        METRICS[name](scores, labels, mask, check=True, backend="triton")
    with pytest.raises(ValueError, match="empty must be"):
        METRICS[name](scores, labels, mask, check=False, empty=math.inf, backend="triton")


def test_metrics_refuse_a_grade_without_a_gain():
    with pytest.raises(ValueError, match="max_label"):
        metrics.err(torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE), max_label=1001.0, backend="triton")


@on_the_gpu
@every_loss
def test_on_the_gpu(name):
    agree(name, *batch((240, 200, 129, 128, 3, 256), 256, ties=False), tolerance=5e-5)
    agree(name, *batch((900, 1000, 1024), 1024, ties=False), tolerance=5e-5)
    if name not in ("listmle", "soft_rank"):
        agree(name, *batch((3000, 4000), 4096, ties=False), tolerance=5e-5)


@on_the_gpu
@every_loss
def test_graph_capture(name):
    scores, labels, mask = batch((240, 200, 129), 240, ties=False)
    options = {"noise": torch.rand(labels.shape, device=DEVICE)} if name == "xe_ndcg" else {}
    leaf = scores[..., None].repeat(1, 1, UNITS) if name == "ordinal" else scores.clone()
    leaf.requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = LOSSES[name](leaf, labels, mask, **options)
        expected.backward()
        slope, leaf.grad = leaf.grad, None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            value = LOSSES[name](leaf, labels, mask, **options)
            value.backward()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(value.detach(), expected.detach()) and torch.equal(leaf.grad, slope)
