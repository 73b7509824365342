"""Relaxed sorts and Sinkhorn scaling: the paper's worked example, limits, accuracy, padding, the transport identity."""

import math
import warnings

import pytest
import torch

from rankgrad import ndcg, neural_ndcg, neural_ndcg_transposed, neural_sort, ot_sort, sinkhorn, soft_sort
from rankgrad.core.sinkhorn import _exact_logits, _separable_logits, chunks
from rankgrad.sorting import gumbel
from references import loops as references

SORTS = [neural_sort, soft_sort, ot_sort]
every_sort = pytest.mark.parametrize("sort", SORTS)


def draws(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def textbook(scores, labels, *, tau=1.0, rounds=30, transposed=False):
    """NeuralNDCG as written, autograd through every round; no padding."""
    n = scores.shape[-1]
    ranks = torch.arange(1, n + 1, dtype=scores.dtype)
    b = (scores[..., :, None] - scores[..., None, :]).abs().sum(-1)
    matrix = torch.softmax(((n + 1 - 2 * ranks)[:, None] * scores[..., None, :] - b[..., None, :]) / tau, -1)
    matrix = matrix.mT if transposed else matrix
    for _ in range(rounds):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    gains, discounts = 2**labels - 1, 1 / torch.log2(ranks + 1)
    best = (gains.sort(dim=-1, descending=True).values * discounts).sum(-1)
    left, right = (gains, discounts) if transposed else (discounts, gains)
    return -((left * (matrix @ right[..., None])[..., 0]).sum(-1) / best)


# --- the paper's worked example ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tau", "printed", "total"),
    [
        (0.01, [4, 4, 3.0000, 2, 0.99992, 0.00012339], 14.0000),
        (0.1, [3.9995, 3.8909, 2.8239, 1.9730, 0.9989, 0.3136], 13.9997),
        (1.0, [3.3893, 2.9820, 2.4965, 2.0191, 1.6097, 1.2815], 13.7781),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_example_of_the_paper(tau, printed, total, dtype):
    labels = torch.tensor([4, 2, 1, 0, 4, 3], dtype=dtype)
    scores = torch.tensor([0.5, 0.2, 0.1, 0.01, 0.65, 0.3], dtype=dtype)
    values = (neural_sort(scores, tau=tau) @ labels).tolist()
    for value, digits in zip(values, printed):
        decimals = len(repr(digits).partition(".")[2]) if digits < 0.01 else 5 if digits == 0.99992 else 4
        assert f"{value:.{decimals}f}" == f"{digits:.{decimals}f}"
    assert round(sum(values), 4) == total


# --- matrices ---------------------------------------------------------------------------------------------------------


@every_sort
def test_equals_its_loops(sort):
    scores = draws(3, 6)
    slow = {neural_sort: references.neural_sort, soft_sort: references.soft_sort, ot_sort: references.transport_plan}
    for row, matrix in zip(scores, sort(scores, tau=0.7)):
        expected = torch.tensor(slow[sort](row.tolist(), 0.7), dtype=torch.float64)
        torch.testing.assert_close(matrix, expected, rtol=1e-8, atol=1e-8)


@every_sort
def test_rows_are_ranks_and_padding_is_exactly_zero(sort):
    scores = draws(4, 6)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    expected = sort(scores, mask, tau=0.5)
    matrix = sort(scores.masked_fill(~mask, math.nan), mask, tau=0.5)
    assert torch.equal(matrix, expected)
    for m, s, keep in zip(matrix, scores, mask):
        n = int(keep.sum())
        assert not m[n:].any() and not m[:, ~keep].any()
        if n:
            torch.testing.assert_close(m[:n, keep], sort(s[keep], tau=0.5))
            torch.testing.assert_close(m[:n].sum(-1), torch.ones(n, dtype=torch.float64))


@every_sort
def test_the_cold_limit_is_the_sorting_permutation(sort):
    scores = draws(5, 9)
    order = scores.argsort(descending=True)
    permutation = torch.nn.functional.one_hot(order, 9).double()
    torch.testing.assert_close(sort(scores, tau=1e-4), permutation, atol=1e-8, rtol=0)


@every_sort
def test_gradcheck(sort):
    mask = torch.tensor([[True, False, True, True, True], [True, True, False, False, False]])
    scores = draws(2, 5).requires_grad_()
    options = {"iters": 300, "tol": 1e-12} if sort is ot_sort else {}
    assert torch.autograd.gradcheck(lambda s: sort(s, mask, tau=0.8, **options), (scores,), atol=1e-6)


def test_gradient_with_ties_is_that_of_the_textbook():
    scores = torch.tensor([[0.5, 0.1, 0.5, 0.1, 0.3, 0.5]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[3.0, 0, 1, 2, 0, 4]], dtype=torch.float64)
    (expected,) = torch.autograd.grad(textbook(scores, labels).sum(), scores)
    (grad,) = torch.autograd.grad(neural_ndcg(scores, labels, sinkhorn_tol=0), scores)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


@every_sort
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_come_back_as_they_were(sort, dtype):
    scores = draws(2, 5).to(dtype).requires_grad_()
    matrix = sort(scores)
    assert matrix.dtype == dtype
    matrix.sum().backward()
    assert scores.grad.dtype == dtype
    torch.testing.assert_close(matrix.double(), sort(scores.double()), atol=2 * torch.finfo(dtype).eps, rtol=0)


@every_sort
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 4), (1,), (2, 1), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes(sort, shape, dtype):
    scores = draws(*shape, dtype=dtype).requires_grad_()
    matrix = sort(scores)
    assert matrix.shape == (*shape, shape[-1])
    matrix.sum().backward()
    assert scores.grad.shape == shape


@every_sort
def test_refusals(sort):
    for tau in (0, -1, math.nan, "1"):
        with pytest.raises(ValueError, match="^tau must be a finite number above 0"):
            sort(draws(3), tau=tau)
    with pytest.raises(ValueError, match="scores must be of a floating-point dtype"):
        sort(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"mask must have the shape \(3,\)"):
        sort(draws(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="scores of real documents must be finite"):
        sort(torch.tensor([0.0, math.nan]))


# --- accuracy in float32 ----------------------------------------------------------------------------------------------

SCORES = {"tanh": torch.tanh, "normal": lambda x: x, "wide": lambda x: 10 * x}


@pytest.mark.parametrize("n", [240, 1024])
@pytest.mark.parametrize(("kind", "tau"), [("tanh", 1.0), ("normal", 1.0), ("wide", 1.0), ("tanh", 0.1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_float32_gradients_are_accurate(n, kind, tau, transposed):
    scores = SCORES[kind](draws(1, n, dtype=torch.float32))
    labels = torch.randint(0, 5, (1, n), generator=torch.Generator().manual_seed(1)).double()
    exact = scores.double().requires_grad_()
    value = textbook(exact, labels, tau=tau, transposed=transposed)
    (expected,) = torch.autograd.grad(value.sum(), exact)
    scores.requires_grad_()
    loss = (neural_ndcg_transposed if transposed else neural_ndcg)(scores, labels, tau=tau, sinkhorn_tol=0)
    (grad,) = torch.autograd.grad(loss, scores)
    assert abs(loss.item() - value.item()) <= 1e-6
    assert (grad - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("tau", [1e-4, 1.0, 1e4])
def test_float32_matrices_are_accurate_over_the_whole_range(size, tau):
    scores = size * draws(30, dtype=torch.float32)
    expected = torch.tensor(references.neural_sort(scores.double().tolist(), tau), dtype=torch.float64)
    torch.testing.assert_close(neural_sort(scores, tau=tau).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_both_ways_of_making_the_logits_agree(size):
    ordered = (size * draws(4, 200)).sort(dim=-1, descending=True).values
    ordered[1, 50:80] = ordered[1, 50]  # ties
    torch.testing.assert_close(_separable_logits(ordered), _exact_logits(ordered), rtol=1e-9, atol=1e-8 * size)


# --- the cold limit of the loss, and the two forms --------------------------------------------------------------------


@pytest.mark.parametrize("loss", [neural_ndcg, neural_ndcg_transposed])
def test_cold_losses_are_the_metric(loss):
    scores = draws(20, 12)
    labels = torch.randint(0, 5, (20, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.rand(20, 12, generator=torch.Generator().manual_seed(2)) < 0.8
    for k in (None, *range(1, 14)):
        expected = ndcg(scores, labels, mask, k=k, empty=0.0)
        value = -loss(scores, labels, mask, k=k, tau=1e-5, reduction="none")
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=0)


def test_the_two_forms_differ_at_thirty_rounds_and_agree_when_converged():
    scores = draws(1, 40)
    labels = torch.randint(0, 5, (1, 40), generator=torch.Generator().manual_seed(1))
    gap = abs(neural_ndcg(scores, labels) - neural_ndcg_transposed(scores, labels)).item()
    assert gap > 1e-6
    converged = {"sinkhorn_iters": 3000, "sinkhorn_tol": 0.0}
    gap = abs(neural_ndcg(scores, labels, **converged) - neural_ndcg_transposed(scores, labels, **converged)).item()
    assert gap < 1e-10


# --- Sinkhorn ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iters", [0, 1, 2, 30])
@pytest.mark.parametrize("tol", [0.0, 1e-6, 1e-1])
def test_sinkhorn_equals_its_loops(iters, tol):
    matrix = draws(4, 5, 5).abs() + 0.01
    matrix[1, 2] = 0.0
    matrix[1, :, 3] = 0.0
    matrix[2] = 0.0
    scaled = sinkhorn(matrix, iters=iters, tol=tol)
    for slow, fast in zip(matrix.tolist(), scaled):
        expected = torch.tensor(references.sinkhorn(slow, iters, tol), dtype=torch.float64)
        torch.testing.assert_close(fast, expected, rtol=1e-10, atol=1e-12)
    assert not scaled[1, 2].any() and not scaled[1, :, 3].any() and not scaled[2].any()


def test_each_matrix_stops_by_itself():
    near, far = sinkhorn(draws(4, 4).abs(), iters=100), draws(4, 4, seed=1).abs() ** 3
    together = sinkhorn(torch.stack([near, far]))
    assert torch.equal(together[0], sinkhorn(near)) and torch.equal(together[1], sinkhorn(far))


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5)])
def test_sinkhorn_gradcheck(shape):
    matrix = (draws(*shape).abs() + 0.05).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: sinkhorn(m, iters=5, tol=0), (matrix,))


def test_sinkhorn_gradient_where_lists_stop_early():
    matrices = torch.stack([draws(3, 3).abs(), torch.full((3, 3), 0.5)]).double().requires_grad_()
    weights = draws(2, 3, 3, seed=3)
    (together,) = torch.autograd.grad((sinkhorn(matrices, tol=1e-3) * weights).sum(), matrices)
    for i in range(2):
        alone = matrices[i].detach().requires_grad_()
        (grad,) = torch.autograd.grad((sinkhorn(alone, tol=1e-3) * weights[i]).sum(), alone)
        torch.testing.assert_close(together[i], grad)


def test_sinkhorn_survives_entries_beyond_float32():
    matrix = torch.tensor([[1e-40, 2e-40], [1e-40, 1e-3]])
    assert sinkhorn(matrix, iters=200, tol=0).isfinite().all()


def test_sinkhorn_refuses_negative_numbers():
    with pytest.raises(ValueError, match="matrix must not hold negative numbers, got -1.0"):
        sinkhorn(-torch.ones(2, 2))


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), [[1.0]]])
def test_sinkhorn_refusals(bad):
    with pytest.raises(ValueError, match="matrix must be a floating-point tensor of shape"):
        sinkhorn(bad)


# --- optimal transport ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 6, 30, 50])
def test_converged_neural_sort_is_the_transport_plan(n):
    """The identity nobody wrote down: scaling absorbs what tells NeuralSort from the transport kernel."""
    scores = draws(n, seed=n)
    plan = torch.tensor(references.transport_plan(scores.tolist(), 1.0), dtype=torch.float64)
    scaled = sinkhorn(neural_sort(scores), iters=5000, tol=1e-13)
    assert (scaled - plan).abs().max() <= 1e-8
    assert (ot_sort(scores) - plan).abs().max() <= 1e-8


def test_ot_sort_keeps_no_rounds():
    scores = draws(2, 60).requires_grad_()
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        ot_sort(scores)
    assert sum(held) < 20 * 2 * 60 * 60


def test_ot_sort_warns_when_it_has_not_converged():
    with pytest.warns(UserWarning, match="ot_sort stopped after 3 rounds with a column sum off by"):
        ot_sort(draws(20), iters=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ot_sort(draws(20))


# --- noise, chunks ----------------------------------------------------------------------------------------------------


def test_gumbel_noise_is_gumbel_and_repeatable():
    like = torch.zeros(1)
    noise = gumbel((100_000,), like, torch.Generator().manual_seed(0))
    assert noise.isfinite().all() and noise.dtype == torch.float32
    assert abs(noise.mean() - 0.5772) < 0.02 and abs(noise.std() - math.pi / 6**0.5) < 0.02
    assert torch.equal(noise, gumbel((100_000,), like, torch.Generator().manual_seed(0)))


def test_chunks_hold_every_list_once_and_fit_it():
    counts = torch.tensor([0, 700, 3, 1, 1200, 3, 0, 40])
    seen = []
    for lists, width in chunks(counts, 1300):
        assert int(counts[lists].max()) == width
        seen += lists.tolist()
    assert sorted(seen) == [i for i, n in enumerate(counts.tolist()) if n or i in seen]
    assert {1, 2, 3, 4, 5, 7} <= set(seen)
