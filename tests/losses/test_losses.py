"""Every loss of LOSSES, against its loops and on every kind of input."""

import math

import numpy as np
import pytest
import torch

import rankgrad
from cases import RANDOM_LOSSES, UNITS, Case, exact_rounds, takes, value_and_grad
from rankgrad.losses import LOSS_TABLE, LOSSES
from rankgrad.losses.informative import has_document, has_pair
from rankgrad.metrics import METRICS
from rankgrad.sorting import soft_sort
from references.loops import LOSS_REFERENCES

RULES = {spec.name: spec.counts for spec in LOSS_TABLE}  # which lists a loss counts
BY_DOCUMENT = {spec.name: spec.unit == "document" for spec in LOSS_TABLE}  # what the mean is over
every_loss = pytest.mark.parametrize("name", list(LOSSES))
NEURAL = [name for name in LOSSES if takes(name, "sort")]


def close(actual, expected, rtol=1e-9, atol=1e-11):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_dtype=False)


def finite_and_attached(name, scores, labels, mask=None, **options):
    """The loss is a finite scalar, attached to the graph, with a finite gradient of the scores' shape and dtype."""
    if name in RANDOM_LOSSES and "noise" not in options:
        options["generator"] = torch.Generator().manual_seed(0)
    leaf = scores.detach().requires_grad_()
    value = LOSSES[name](leaf, labels, mask, **options)
    assert value.shape == () and value.requires_grad and torch.isfinite(value)
    value.backward()
    assert leaf.grad.shape == scores.shape and leaf.grad.dtype == scores.dtype
    assert torch.isfinite(leaf.grad).all()
    return value.detach(), leaf.grad


# --- the formula ------------------------------------------------------------------------------------------------------

VARIANTS = [
    *((name, {}) for name in LOSSES),
    *((name, {"k": k}) for name in LOSSES if takes(name, "k") for k in (1, 3, 50)),
    *((name, {"gain": "linear"}) for name in LOSSES if takes(name, "gain")),
    *((name, {"gain": lambda y: y**2}) for name in LOSSES if takes(name, "gain")),
    *((name, {"gain": [0, 1, 1.5, 8, 9]}) for name in LOSSES if takes(name, "gain")),
    *((name, {"k": 4, "pairs": "both"}) for name in LOSSES if takes(name, "pairs")),
    *((name, {"tau": 0.3, "sinkhorn_iters": n}) for name in NEURAL for n in (0, 1, 7)),
    *((name, {"threshold": 3}) for name in LOSSES if takes(name, "threshold")),
    ("neural_err", {"max_label": 2}),
    ("neural_err", {"k": 4, "max_label": 6}),
    ("approx_ndcg", {"alpha": 10.0}),
    ("soft_rank", {"method": "exact"}),
    ("soft_rank", {"method": "exact", "k": 2, "sigma": 0.5}),
    ("soft_rank", {"sigma": 0.2}),
    ("ndcg_loss2pp", {"mu": 3.0}),
    ("rmse", {"levels": 3.0}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_equals_its_loops(name, options):
    case = Case(name)
    values = case(reduction="none", **options)
    for row in range(len(case.lengths)):
        given = {key: case.real(row, value).tolist() for key, value in case.options.items()}
        expected = LOSS_REFERENCES[name](
            case.real(row, case.scores).tolist(), case.real(row, case.labels).tolist(), **given, **options
        )
        close(values[row], torch.tensor(expected, dtype=torch.float64))


def test_every_loss_has_its_loops_and_its_name_at_the_top():
    assert LOSS_REFERENCES.keys() == LOSSES.keys()
    for name, function in LOSSES.items():
        assert getattr(rankgrad, name) is function


@pytest.mark.parametrize("name", NEURAL)
def test_another_sort_is_scaled_the_same_way(name):
    from references.loops import soft_sort as slow_soft_sort

    case = Case(name)
    values = case(reduction="none", sort=soft_sort, tau=0.5)
    for row in range(len(case.lengths)):
        scores, labels = case.real(row, case.scores).tolist(), case.real(row, case.labels).tolist()
        expected = LOSS_REFERENCES[name](scores, labels, sort=slow_soft_sort, tau=0.5)
        close(values[row], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", NEURAL)
@pytest.mark.parametrize(
    "options", [{}, {"perturb": "allrank"}, {"log_scores": False}, {"beta": 0.7}, {"k": 2, "tau": 0.5}]
)
def test_stochastic_form_equals_its_loops(name, options):
    case = Case(name)
    noise = torch.randn(3, *case.labels.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    values = case(reduction="none", noise=noise, **options)
    slow = {("perturb_as" if key == "perturb" else key): value for key, value in options.items()}
    for row in range(len(case.lengths)):
        expected = LOSS_REFERENCES[name](
            case.real(row, case.scores).tolist(),
            case.real(row, case.labels).tolist(),
            noise=noise[:, row][:, case.mask[row]].tolist(),
            **slow,
        )
        close(values[row], torch.tensor(expected, dtype=torch.float64), rtol=1e-7)


def test_listmle_random_ties_equal_their_loops():
    case = Case("listmle")
    noise = torch.rand(case.labels.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = case(reduction="none", ties="random", noise=noise)
    for row in range(len(case.lengths)):
        expected = LOSS_REFERENCES["listmle"](
            case.real(row, case.scores).tolist(),
            case.real(row, case.labels).tolist(),
            ties="random",
            noise=case.real(row, noise).tolist(),
        )
        close(values[row], torch.tensor(expected, dtype=torch.float64))
    assert (values - case(reduction="none")).abs().max() > 1e-3


# --- gradients --------------------------------------------------------------------------------------------------------


@every_loss
def test_gradcheck(name):
    case = Case(name, lengths=(5, 2, 4), width=6)
    options = exact_rounds(name)
    scores = case.scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: case(s, reduction="none", **options), (scores,), atol=1e-6)


@pytest.mark.parametrize("name", NEURAL)
@pytest.mark.parametrize("options", [{"k": 2}, {"sort": soft_sort, "tau": 0.5}, {"samples": 2}])
def test_gradcheck_of_the_variants(name, options):
    case = Case(name, lengths=(5, 2, 4), width=6)
    options = dict(options)
    if options.pop("samples", None):
        options["noise"] = torch.randn(2, *case.labels.shape, generator=torch.Generator().manual_seed(2)).double()
    scores = case.scores.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: case(s, reduction="none", sinkhorn_tol=0.0, **options), (scores,), atol=1e-6
    )


@pytest.mark.parametrize("options", [{"method": "exact"}, {"k": 2, "sigma": 0.5}])
def test_gradcheck_of_soft_rank(options):
    case = Case("soft_rank", lengths=(5, 2, 4), width=6)
    assert torch.autograd.gradcheck(lambda s: case(s, reduction="none", **options), (case.scores.requires_grad_(),))


# --- weights ----------------------------------------------------------------------------------------------------------

WEIGHTED = [spec.name for spec in LOSS_TABLE if spec.weights]
every_weighted_loss = pytest.mark.parametrize("name", WEIGHTED)


def weights_of(case):
    """Weights with zeros among them; the fifth list keeps one document that weighs anything."""
    weights = 2 * torch.rand(case.labels.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    weights[0, case.mask[0].nonzero()[::3]] = 0.0
    weights[-1, case.mask[-1].nonzero()[1:]] = 0.0
    return weights


def test_the_table_says_which_losses_take_weights():
    assert [name for name in LOSSES if takes(name, "weights")] == WEIGHTED and len(WEIGHTED) == 13


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in WEIGHTED), *((name, {"k": 3}) for name in WEIGHTED if takes(name, "k"))],
)
def test_weights_equal_their_loops(name, options):
    case = Case(name)
    weights = weights_of(case)
    values = case(reduction="none", weights=weights, **options)
    for row in range(len(case.lengths)):
        given = {key: case.real(row, value).tolist() for key, value in case.options.items()}
        expected = LOSS_REFERENCES[name](
            case.real(row, case.scores).tolist(),
            case.real(row, case.labels).tolist(),
            weights=case.real(row, weights).tolist(),
            **given,
            **options,
        )
        close(values[row], torch.tensor(expected, dtype=torch.float64))
    counted = RULES[name](case.labels, case.mask & (weights > 0))
    assert counted.tolist() == [
        True,
        True,
        True,
        name in ("rmse", "bce", "ordinal"),
        name in ("rmse", "bce", "ordinal"),
    ]
    total = weights.masked_fill(~case.mask, 0.0)[counted].sum() if BY_DOCUMENT[name] else counted.sum()
    close(case(weights=weights, **options), values.sum() / total)


@every_weighted_loss
def test_weights_of_one_change_nothing(name):
    case = Case(name, dtype=torch.float32)
    value, grad = value_and_grad(lambda s: case(s), case.scores)
    for weights in (torch.ones(case.labels.shape), torch.ones(case.labels.shape, dtype=torch.int64)):
        again, again_grad = value_and_grad(lambda s, w=weights: case(s, weights=w), case.scores)
        close(again, value, rtol=1e-6)
        close(again_grad, grad, rtol=1e-5, atol=1e-7)


@every_weighted_loss
def test_gradcheck_of_weights(name):
    case = Case(name, lengths=(5, 2, 4), width=6)
    weights = weights_of(case)
    scores = case.scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: case(s, reduction="none", weights=weights), (scores,), atol=1e-6)


@every_weighted_loss
@pytest.mark.parametrize("poison", [math.nan, math.inf, -1.0])
def test_weights_under_the_padding_cannot_matter(name, poison):
    case = Case(name)
    weights = weights_of(case)
    value, grad = value_and_grad(lambda s: case(s, weights=weights), case.scores)
    weights[~case.mask] = poison
    dirty_value, dirty_grad = value_and_grad(lambda s: case(s, weights=weights), case.scores)
    assert torch.equal(dirty_value, value) and torch.equal(dirty_grad, grad)


@pytest.mark.parametrize("name", ["rmse", "bce", "ordinal", "ranknet", "query_rmse"])
def test_a_weight_of_zero_is_as_if_the_document_were_not_there(name):
    case = Case(name)
    weights = (torch.rand(case.labels.shape, generator=torch.Generator().manual_seed(4)) < 0.7).double()
    value, grad = value_and_grad(lambda s: case(s, weights=weights), case.scores)
    case.mask = case.mask & (weights > 0)
    without, without_grad = value_and_grad(lambda s: case(s), case.scores)
    close(value, without)
    close(grad, without_grad)


@pytest.mark.parametrize("name", ["rmse", "bce", "ordinal", "ranknet", "query_rmse"])
@pytest.mark.parametrize("check", [None, False])
def test_the_score_of_a_document_that_weighs_nothing_cannot_matter(name, check):
    scores, labels = shaped(name, 2, 4), torch.tensor([[0, 1, 2, 0], [1, 0, 0, 3]])
    weights = torch.tensor([[1.0, 0.0, 1.0, 0.5], [1.0, 2.0, 1.0, 1.0]])
    value, grad = value_and_grad(LOSSES[name], scores, labels, weights=weights, check=check)
    scores[0, 1] = 3e38  # would have the whole list scaled down
    again, again_grad = value_and_grad(LOSSES[name], scores, labels, weights=weights, check=check)
    assert torch.equal(again, value) and torch.equal(again_grad, grad)


@every_weighted_loss
@pytest.mark.parametrize("weight", [1e20, 1e37])
def test_a_list_that_cannot_teach_is_0_whatever_its_documents_weigh(name, weight):
    scores, labels = shaped(name, 2, 4), torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 4, [True] + [False] * 3])
    counted = RULES[name](labels, mask)
    weights = torch.full((2, 4), weight)
    values, grad = value_and_grad(LOSSES[name], scores, labels, mask, weights=weights, reduction="none")
    assert not values[~counted].any() and not grad[~counted].any()


@every_weighted_loss
def test_a_list_of_documents_that_weigh_nothing_does_not_count(name):
    case = Case(name)
    weights = torch.ones_like(case.labels)
    weights[2] = 0.0
    value, grad = value_and_grad(lambda s: case(s, weights=weights), case.scores)
    case.mask[2] = False
    without, without_grad = value_and_grad(lambda s: case(s), case.scores)
    close(value, without)
    close(grad, without_grad)


@every_weighted_loss
@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
def test_bad_weights_of_real_documents(name, bad):
    case = Case(name)
    weights = weights_of(case)
    good = case(reduction="none", weights=weights)
    weights[2, case.mask[2].nonzero()[0, 0]] = bad
    with pytest.raises(ValueError, match=rf"weights of real documents must be finite.*got .*{bad}.*at index \(2, "):
        case(weights=weights)
    values = case(check=False, reduction="none", weights=weights)
    assert values[2].isnan() and torch.equal(values[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


@every_weighted_loss
def test_wrong_weights_are_refused(name):
    case = Case(name)
    for weights, message in (
        ([1.0], "weights must be a torch.Tensor, got list"),
        (torch.ones(5, 1), r"weights must have the shape \(5, 12\).*nothing is broadcast.*got \(5, 1\)"),
        (torch.ones(5, 12, dtype=torch.complex64), "weights must be of a real dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            case(weights=weights, check=False)


@pytest.mark.parametrize("name", [name for name in WEIGHTED if takes(name, "backend")])
def test_kernels_refuse_weights(name):
    case = Case(name, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"backend='triton'.*weights.*backend='auto'"):
        case(weights=weights_of(case), backend="triton")


# --- lists never see each other, nor their padding --------------------------------------------------------------------


@every_loss
def test_together_equals_alone(name):
    case = Case(name)
    together, grad = value_and_grad(lambda s: case(s, reduction="none"), case.scores)
    for row in range(len(case.lengths)):
        own = {key: case.real(row, value) for key, value in case.options.items()}
        alone, own_grad = value_and_grad(
            LOSSES[name], case.real(row, case.scores), case.real(row, case.labels), **own, reduction="none"
        )
        close(together[row], alone, rtol=1e-6)
        close(case.real(row, grad), own_grad, rtol=1e-6, atol=1e-9)


@every_loss
def test_stochastic_or_not_the_padding_gets_no_gradient(name):
    case = Case(name)
    _, grad = value_and_grad(lambda s: case(s), case.scores)
    assert not grad[~case.mask].any()


@every_loss
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30, -1.0])
def test_what_lies_under_the_padding_cannot_matter(name, poison):
    case = Case(name)
    value, grad = value_and_grad(lambda s: case(s), case.scores)
    case.labels[~case.mask] = poison
    case.options = {key: torch.where(case.mask, v, poison) for key, v in case.options.items()}
    dirty = case.scores.clone()
    dirty[~case.mask] = poison
    dirty_value, dirty_grad = value_and_grad(lambda s: case(s), dirty)
    assert torch.equal(dirty_value, value) and torch.equal(dirty_grad, grad)


@pytest.mark.parametrize("name", NEURAL)
def test_noise_under_the_padding_cannot_matter(name):
    case = Case(name)
    noise = torch.randn(2, *case.labels.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    value, grad = value_and_grad(lambda s: case(s, noise=noise), case.scores)
    noise[:, ~case.mask] = math.nan
    dirty_value, dirty_grad = value_and_grad(lambda s: case(s, noise=noise), case.scores)
    assert torch.equal(dirty_value, value) and torch.equal(dirty_grad, grad)


@every_loss
def test_permuting_documents_permutes_gradients(name):
    case = Case(name)
    value, grad = value_and_grad(lambda s: case(s), case.scores)
    order = torch.randperm(case.labels.shape[1], generator=torch.Generator().manual_seed(3))
    moved = Case(name)
    moved.labels, moved.mask = case.labels[:, order], case.mask[:, order]
    moved.options = {key: v[:, order] for key, v in case.options.items()}
    moved_value, moved_grad = value_and_grad(lambda s: moved(s), case.scores[:, order])
    close(moved_value, value)
    close(moved_grad, grad[:, order])


@every_loss
def test_reductions_are_consistent(name):
    case = Case(name)
    case.labels[0] = 1.0  # ties: pairwise losses learn nothing from it
    case.labels[1] = 0.0  # nothing relevant
    values = case(reduction="none")
    assert values.shape == (5,)
    close(case(reduction="sum"), values.sum())
    pointwise, pairwise = RULES[name] is has_document, RULES[name] is has_pair
    lists = 5 if pointwise else (2 if pairwise else 3)
    close(case(reduction="mean"), values.sum() / (7 + 10 + 5 if BY_DOCUMENT[name] else lists))
    if not pointwise:
        assert values[1] == 0 and values[3] == 0
    if pairwise:
        assert values[0] == 0


@every_loss
def test_any_leading_dimensions(name):
    case = Case(name, lengths=(4, 2, 5, 3, 5, 1), width=6)
    flat = case(reduction="none")
    fold = lambda t: t.view(2, 3, *t.shape[1:])  # noqa: E731
    options = {key: fold(v) for key, v in case.options.items()}
    folded = LOSSES[name](fold(case.scores), fold(case.labels), fold(case.mask), **options, reduction="none")
    assert torch.equal(folded, flat.view(2, 3))
    alone = LOSSES[name](
        case.scores[0], case.labels[0], case.mask[0], **{k: v[0] for k, v in case.options.items()}, reduction="none"
    )
    assert alone.shape == ()
    close(alone, flat[0])


# --- dtypes and layouts -----------------------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name, dtype):
    case = Case(name, dtype=dtype)
    options = {"k": 3} if takes(name, "k") else {}  # precision over the whole list has no gradient to speak of
    value, grad = value_and_grad(lambda s: case(s, **options), case.scores)
    exact, exact_grad = value_and_grad(lambda s: case(s, **options), case.scores.double())
    half = dtype in (torch.bfloat16, torch.float16)
    assert value.dtype == (torch.float32 if half else dtype) and grad.dtype == dtype
    close(value.double(), exact, rtol=1e-5)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    assert (grad.double() - exact_grad).norm() <= tolerance * exact_grad.norm()


@every_loss
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.float32, torch.bfloat16])
def test_label_dtypes(name, dtype):
    case = Case(name)
    expected = case()
    case.labels = case.labels.to(dtype)
    close(case(), expected)


@every_loss
def test_bool_labels(name):
    case = Case(name)
    case.labels = (case.labels > 1).double()
    expected = case()
    case.labels = case.labels.bool()
    close(case(), expected)


@every_loss
def test_non_contiguous_and_stride_zero_inputs(name):
    case = Case(name)
    expected, grad = value_and_grad(lambda s: case(s), case.scores)
    wide = case.scores.repeat_interleave(2, dim=1)
    strided = wide[:, ::2]
    assert not strided.is_contiguous()
    case.labels, case.mask = case.labels.t().contiguous().t(), case.mask.t().contiguous().t()
    value, strided_grad = value_and_grad(lambda s: case(s), strided)
    close(value, expected)
    close(strided_grad, grad)
    row = torch.randn(1, 6, UNITS) if name == "ordinal" else torch.randn(1, 6)
    expanded = row.expand(3, *row.shape[1:])
    labels = torch.tensor([[2, 0, 1, 0, 3, 0]]).expand(3, 6)
    options = {"noise": torch.rand(1, 6).expand(3, 6)} if name in RANDOM_LOSSES else {}
    values = LOSSES[name](
        expanded, labels, torch.ones(1, 6, dtype=torch.bool).expand(3, 6), **options, reduction="none"
    )
    close(values, values[:1].expand(3))


@every_loss
def test_under_no_grad_inference_mode_and_another_default_dtype(name):
    case = Case(name, dtype=torch.float32)
    expected = case()
    with torch.no_grad():
        assert torch.equal(case(), expected)
    with torch.inference_mode():
        assert torch.equal(case(), expected)
        assert not case().requires_grad
    torch.set_default_dtype(torch.float64)
    try:
        value, grad = value_and_grad(lambda s: case(s), case.scores)
        assert torch.equal(value, expected) and grad.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


# --- degenerate and extreme inputs ------------------------------------------------------------------------------------


def shaped(name, *shape, generator=None, dtype=torch.float32):
    full = (*shape, UNITS) if name == "ordinal" else shape
    return torch.randn(full, generator=generator or torch.Generator().manual_seed(0)).to(dtype)


@every_loss
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (0,), (2, 0, 4), (3, 1), (1,), (1, 1)])
def test_empty_and_tiny_shapes(name, shape):
    value, grad = finite_and_attached(name, shaped(name, *shape), torch.ones(shape))
    if name not in ("rmse", "bce", "ordinal") or 0 in shape:
        assert value == 0 and not grad.any()


@every_loss
def test_all_padded_and_nothing_relevant(name):
    scores = shaped(name, 3, 4)
    value, grad = finite_and_attached(name, scores, torch.ones(3, 4), torch.zeros(3, 4, dtype=torch.bool))
    assert value == 0 and not grad.any()
    value, grad = finite_and_attached(name, scores, torch.zeros(3, 4))
    if name not in ("rmse", "bce", "ordinal"):
        assert value == 0 and not grad.any()


@every_loss
def test_all_tied(name):
    scores = torch.full_like(shaped(name, 3, 6), 0.3)
    finite_and_attached(name, scores, torch.tensor([[0, 1, 2, 3, 4, 0]]).repeat(3, 1))
    finite_and_attached(name, scores, torch.full((3, 6), 2))


@every_loss
@pytest.mark.parametrize("k", [1, 3, 6, 1000])
def test_cut_offs(name, k):
    if takes(name, "k"):
        finite_and_attached(name, shaped(name, 3, 6), torch.tensor([[0, 1, 2, 3, 4, 0]]).repeat(3, 1), k=k)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_up_to_thirty(name, dtype):
    labels = torch.randint(0, 31, (3, 8), generator=torch.Generator().manual_seed(0))
    labels[0, 0] = 30
    finite_and_attached(name, shaped(name, 3, 8, dtype=dtype), labels)


@every_loss
@pytest.mark.parametrize("size", [1e4, -1e4, 1e30, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_scores_in_the_right_and_the_wrong_order(name, size, dtype):
    labels = torch.tensor([[0, 1, 2, 3, 4, 2, 1, 0]]).repeat(2, 1)
    scores = (labels - 2).to(dtype) * size
    scores = scores[..., None].expand(2, 8, UNITS).clone() if name == "ordinal" else scores
    finite_and_attached(name, scores, labels)
    finite_and_attached(name, scores + shaped(name, 2, 8, dtype=dtype), labels)


@every_loss
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.float64, 1.7e308)])
@pytest.mark.parametrize("check", [None, False])
def test_the_largest_scores_there_are(name, dtype, size, check):
    labels, mask = torch.tensor([[0, 1, 2, 3, 4, 2, 1, 0]]).repeat(2, 1), torch.ones(2, 8, dtype=torch.bool)
    mask[1, 3] = False
    order = (labels - 2).clamp(-1, 1).to(dtype)
    for scores in (size * order, -size * order, size * (labels == 4).to(dtype), torch.full_like(order, -size)):
        scores = scores[..., None].expand(2, 8, UNITS).clone() if name == "ordinal" else scores
        finite_and_attached(name, scores, labels, mask, check=check)


@pytest.mark.parametrize("name", ["listnet", "softmax", "xe_ndcg", "query_rmse", "ranknet", "lambdarank"])
def test_the_largest_scores_are_still_pulled_the_right_way(name):
    _, grad = finite_and_attached(name, torch.tensor([3e38, -3e38, 0.0]), torch.tensor([0, 4, 0]))
    assert grad[1] < 0 < grad[0]


def test_query_rmse_takes_lists_without_a_relevant_document_if_asked():
    scores, labels = torch.tensor([[1.0, 3.0], [2.0, 2.0], [0.0, 4.0]]), torch.tensor([[0, 2], [0, 0], [0, 0]])
    assert LOSSES["query_rmse"](scores, labels, reduction="none").tolist() == [0.0, 0.0, 0.0]
    assert LOSSES["query_rmse"](scores, labels, reduction="none", count_empty=True).tolist() == [0.0, 0.0, 8.0]
    assert LOSSES["query_rmse"](scores, labels, count_empty=True).item() == pytest.approx(8 / 6)
    with pytest.raises(ValueError, match="count_empty"):
        LOSSES["query_rmse"](scores, labels, count_empty=1)


@pytest.mark.parametrize("name", ["neural_ndcg", "neural_ndcg_transposed"])
def test_huge_scores_give_the_metric(name):
    labels = torch.tensor([[0.0, 1, 2, 3, 4, 2, 1, 0]])
    for size in (1e4, -1e4, 1e30, -1e30):
        for dtype in (torch.float32, torch.float64):
            scores = (labels * size).to(dtype)
            close(-LOSSES[name](scores, labels), rankgrad.ndcg(scores, labels)[0], rtol=1e-6)
    mixed = torch.tensor([[1e30, 0.3, -1e30, 0.1, 0.2]])  # one wild score does not blur the others
    plain = torch.tensor([[9.0, 0.3, -9.0, 0.1, 0.2]])
    labels = torch.tensor([[0.0, 1, 2, 3, 4]])
    close(LOSSES[name](mixed, labels, tau=0.01), LOSSES[name](plain, labels, tau=0.01), rtol=1e-6)


@every_loss
@pytest.mark.parametrize("tau", [1e-4, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperatures(name, tau, dtype):
    if takes(name, "tau"):
        labels = torch.randint(0, 5, (3, 8), generator=torch.Generator().manual_seed(0))
        finite_and_attached(name, shaped(name, 3, 8, dtype=dtype), labels, tau=tau)
        finite_and_attached(name, 1e4 * shaped(name, 3, 8, dtype=dtype), labels, tau=tau)


@every_loss
def test_a_common_offset(name):
    case = Case(name)
    value, grad = value_and_grad(lambda s: case(s, **exact_rounds(name)), case.scores)
    far, far_grad = value_and_grad(lambda s: case(s, **exact_rounds(name)), case.scores + 1e6)
    assert torch.isfinite(far) and torch.isfinite(far_grad).all()
    if name not in ("rmse", "bce", "ordinal"):  # the others depend on differences alone
        close(far, value, rtol=1e-6, atol=1e-8)
        close(far_grad, grad, rtol=1e-5, atol=1e-7)


@every_loss
def test_two_thousand_documents(name):
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (1, 2000), generator=draw)
    finite_and_attached(name, shaped(name, 1, 2000, generator=draw), labels)


@pytest.mark.parametrize("name", NEURAL)
@pytest.mark.parametrize("options", [{"perturb": "paper"}, {"perturb": "allrank"}, {"log_scores": False}])
def test_stochastic_form_on_hard_inputs(name, options):
    labels = torch.tensor([[0, 1, 2, 3, 4, 2, 1, 0]]).repeat(2, 1)
    huge = 3.4e38 * (labels - 2).clamp(-1, 1).float()  # whose differences overflow
    for scores in (
        torch.zeros(2, 8),
        1e30 * (labels - 2).float(),
        huge,
        1e4 * (2 - labels).float(),
        shaped(name, 2, 8),
    ):
        finite_and_attached(name, scores, labels, samples=3, generator=torch.Generator().manual_seed(0), **options)
    finite_and_attached(name, torch.zeros(3, 0), torch.zeros(3, 0), noise=torch.zeros(2, 3, 0), **options)


@every_loss
def test_autocast_does_not_reach_into_the_loss(name):
    case = Case(name, dtype=torch.float32)
    options = {"k": 3} if takes(name, "k") else {}
    value, grad = value_and_grad(lambda s: case(s, **options), case.scores)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, cast_grad = value_and_grad(lambda s: case(s, **options), case.scores)
    assert cast.dtype == torch.float32
    close(cast, value, rtol=1e-6)
    close(cast_grad, grad, rtol=1e-5, atol=1e-7)


@every_loss
def test_labels_and_masks_made_in_inference_mode(name):
    case = Case(name)
    expected, _ = value_and_grad(lambda s: case(s), case.scores)
    with torch.inference_mode():
        case.labels, case.mask = case.labels.clone(), case.mask.clone()
    value, _ = value_and_grad(lambda s: case(s), case.scores)
    assert torch.equal(value, expected)


@pytest.mark.parametrize("name", NEURAL)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_a_narrow_default_dtype_changes_nothing(name, default):
    scores, labels = shaped(name, 1, 700, dtype=torch.float64), torch.randint(0, 5, (1, 700))
    expected, grad = value_and_grad(LOSSES[name], scores, labels, tau=100.0)
    torch.set_default_dtype(default)
    try:
        value, narrow_grad = value_and_grad(LOSSES[name], scores, labels, tau=100.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(value, expected) and torch.equal(narrow_grad, grad)


@pytest.mark.parametrize("name", NEURAL)
def test_second_derivatives_are_refused_not_zero(name):
    case = Case(name)
    scores = case.scores.requires_grad_()
    (grad,) = torch.autograd.grad(case(scores), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(grad.square().sum(), scores)


@pytest.mark.parametrize("name", NEURAL)
def test_backward_frees_what_the_rounds_left(name):
    case = Case(name)
    value = case(case.scores.requires_grad_())
    value.backward()
    node = value
    with pytest.raises(RuntimeError, match="second time"):
        node.backward()


# --- randomness -------------------------------------------------------------------------------------------------------


def random_form(name):
    """The options that make a loss draw random numbers; {} for a loss that always does, None for one that never does."""
    if not takes(name, "generator"):
        return None
    return {"samples": 4} if takes(name, "samples") else ({"ties": "random"} if takes(name, "ties") else {})


@every_loss
def test_the_global_random_state_is_read_only_by_random_forms_without_a_generator(name):
    case, options = Case(name), random_form(name)
    before = torch.get_rng_state()
    case()
    if options is not None:
        case.options = {}
        case(generator=torch.Generator().manual_seed(0), **options)
    assert torch.equal(torch.get_rng_state(), before)
    if options is not None:
        case(**options)
        assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [name for name in LOSSES if takes(name, "generator")])
def test_torch_manual_seed_makes_random_losses_repeatable(name):
    case, options = Case(name), random_form(name)
    case.options = {}

    def draw(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return case(**options)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("name", [name for name in LOSSES if takes(name, "generator")])
def test_a_generator_makes_random_losses_repeatable(name):
    case, options = Case(name), random_form(name)
    case.options = {}

    def draw(seed):
        return case(generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


def test_the_stochastic_form_samples_plackett_luce():
    """perturb="paper" ranks first with probability s'_i / sum s', the Plackett-Luce model of the shifted scores."""
    scores, labels = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([0, 0, 1])
    draws = -LOSSES["neural_precision"](
        scores, labels, k=1, tau=1e-6, samples=20_000, generator=torch.Generator().manual_seed(0)
    )
    assert abs(draws.item() - 3 / 4) < 0.01


# --- refusals ---------------------------------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize(("what", "bad"), [("scores", math.nan), ("scores", math.inf), ("labels", math.nan),
                                           ("labels", -1.0), ("labels", math.inf)])  # fmt: skip
def test_bad_values_of_real_documents(name, what, bad):
    case = Case(name)
    good = case(reduction="none")
    place = tuple(case.mask[2].nonzero()[0].tolist())
    getattr(case, what)[2][place] = bad
    for check in (None, True):
        with pytest.raises(ValueError, match=rf"{what} of real documents must be finite.*got .*{bad}.*at index \(2, "):
            case(check=check)
    values = case(check=False, reduction="none")
    assert values[2].isnan() and torch.equal(values[[0, 1, 3, 4]], good[[0, 1, 3, 4]])
    assert case(check=False).isnan()
    _, grad = value_and_grad(lambda s: case(s, check=False), case.scores)
    assert grad[2].isnan().any() and grad[[0, 1, 3, 4]].isfinite().all()


@every_loss
def test_a_bad_list_is_nan_even_where_it_is_not_informative(name):
    case = Case(name)
    case.labels[2] = 0.0
    case.scores[2][case.mask[2].nonzero()[0, 0]] = math.nan
    assert case(check=False, reduction="none")[2].isnan() and case(check=False).isnan()


REFUSALS = [
    ("scores", lambda s, y, m: ([1.0], y, m), "scores must be a torch.Tensor, got list"),
    ("scores", lambda s, y, m: (s.long(), y, m), "scores must be of a floating-point dtype, got torch.int64"),
    ("labels", lambda s, y, m: (s, y.to(torch.complex64), m), "labels must be of a real dtype .* got torch.complex64"),
    ("labels", lambda s, y, m: (s, y[:, :-1], m), r"labels must have the shape \(5, 12\).*got \(5, 11\)"),
    ("labels", lambda s, y, m: (s, y[:1], m), r"labels must have the shape \(5, 12\).*nothing is broadcast.*\(1, 12\)"),
    ("labels", lambda s, y, m: (s, y[0], m), r"labels must have the shape \(5, 12\).*got \(12,\)"),
    ("mask", lambda s, y, m: (s, y, m[:, :3]), r"mask must have the shape \(5, 12\).*got \(5, 3\)"),
    ("mask", lambda s, y, m: (s, y, m.float()), "mask must be of dtype torch.bool .* got torch.float32"),
    ("mask", lambda s, y, m: (s, y, m.int()), "mask must be of dtype torch.bool .* got torch.int32"),
]


@every_loss
@pytest.mark.parametrize(("argument", "spoil", "message"), REFUSALS)
def test_wrong_tensors_are_refused(name, argument, spoil, message):
    case = Case(name)
    with pytest.raises(ValueError, match=message):
        LOSSES[name](*spoil(case.scores, case.labels, case.mask), check=False)


@every_loss
def test_scores_without_a_document_dimension_are_refused(name):
    with pytest.raises(ValueError, match=r"scores must have the shape \[\.\.\., L"):
        LOSSES[name](torch.tensor(1.0), torch.tensor(1.0))


PARAMETERS = {
    "k": [0, -1, 1.5, "10", True],
    "tau": [0, -1.0, math.nan, math.inf, "1", None, 10**400, torch.tensor(1.0, requires_grad=True)],
    "alpha": [0, math.nan],
    "sigma": [0, -1],
    "levels": [0, math.inf],
    "threshold": [0, -1, math.nan],
    "max_label": [0, -1, 2000],
    "mu": [-1, math.nan],
    "beta": [-0.1, math.nan],
    "samples": [0, -3, 2.5],
    "sinkhorn_iters": [-1, 2.5],
    "sinkhorn_tol": [-1e-6, math.nan],
    "gain": ["exp", 3, None],
    "pairs": ["all", None],
    "ties": ["first"],
    "method": ["fast"],
    "perturb": ["gumbel"],
    "reduction": ["avg", None],
    "sort": ["neural_sort"],
    "check": ["yes", 1],
    "log_scores": ["no", 1],
    "generator": [42],
}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(n, o, v) for o, values in PARAMETERS.items() for n in LOSSES if takes(n, o) for v in values],
)
def test_wrong_parameters_are_refused_by_name(name, option, value):
    case = Case(name)
    case.options = {}
    needed = {"samples": 2} if option == "generator" and takes(name, "samples") else {}
    needed |= {"ties": "random"} if option == "generator" and takes(name, "ties") else {}
    with pytest.raises(ValueError, match=f"^{option} must"):
        case(**{option: value}, **needed)


@pytest.mark.parametrize("name", NEURAL)
def test_noise_of_another_shape_is_refused(name):
    case = Case(name)
    for noise, options in (
        (torch.zeros(5, 12), {}),
        (torch.zeros(2, 5, 11), {}),
        (torch.zeros(2, 5, 12), {"samples": 3}),
    ):
        with pytest.raises(ValueError, match="noise must have"):
            case(noise=noise, **options)


def test_exact_soft_rank_counts_documents_not_padding():
    mask = torch.zeros(2, 600, dtype=torch.bool)
    mask[0, ::60], mask[1, 5:100:7] = True, True
    scores, labels = shaped("soft_rank", 2, 600, dtype=torch.float64), torch.randint(0, 5, (2, 600))
    values, grad = value_and_grad(LOSSES["soft_rank"], scores, labels, mask, method="exact", reduction="none")
    for row in range(2):
        alone, own = value_and_grad(
            LOSSES["soft_rank"], scores[row, mask[row]], labels[row, mask[row]], method="exact", reduction="none"
        )
        close(values[row], alone)
        close(grad[row, mask[row]], own)


def test_exact_soft_rank_of_a_long_list_is_accurate():
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(1, 100, generator=draw), torch.randint(0, 5, (1, 100), generator=draw)
    _, grad = value_and_grad(LOSSES["soft_rank"], scores, labels, method="exact")
    _, exact = value_and_grad(LOSSES["soft_rank"], scores.double(), labels, method="exact")
    assert (grad - exact).norm() <= 1e-5 * exact.norm()


def test_exact_soft_rank_refuses_long_lists():
    with pytest.raises(ValueError, match="up to 512 documents, got 513"):
        LOSSES["soft_rank"](torch.zeros(513), torch.ones(513), method="exact")


# --- properties of single losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ranknet", "lambdarank", "ndcg_loss2", "ndcg_loss2pp"])
def test_a_relevant_document_below_the_cut_off_is_taught_unless_both_must_be_above(name):
    scores, labels = torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 2])
    _, grad = value_and_grad(LOSSES[name], scores, labels, k=2)
    assert grad[3] < 0
    _, grad = value_and_grad(LOSSES[name], scores, labels, k=2, pairs="both")
    assert grad[3] == 0


def test_rmse_has_a_finite_gradient_at_a_perfect_fit():
    value, grad = value_and_grad(LOSSES["rmse"], torch.zeros(1, 3), torch.full((1, 3), 2.5))
    assert value == 0 and not grad.any()


def test_listmle_does_not_lose_the_gradient_of_a_wide_gap():
    _, grad = value_and_grad(LOSSES["listmle"], torch.tensor([0.0, 200.0]), torch.tensor([1, 0]))
    close(grad, torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize("name", ["ranknet", "lambdarank"])
def test_pairwise_losses_do_not_lose_the_gradient_of_a_wide_gap(name):
    _, grad = value_and_grad(LOSSES[name], torch.tensor([0.0, 200.0]), torch.tensor([1, 0]))
    assert grad[0] < -0.3 and grad[1] > 0.3


def test_transposed_with_linear_gains_scores_a_perfect_ranking_as_one():
    labels = torch.tensor([[4.0, 3, 2, 1, 0]], dtype=torch.float64)
    close(LOSSES["neural_ndcg_transposed"](labels, labels, gain="linear", tau=1e-3), torch.tensor(-1.0).double())


def test_negative_gains_are_loud():
    scores, labels = torch.tensor([[0.1, 0.5, 0.3, 0.7]]), torch.tensor([[1, 0, 2, 0]])
    for name in LOSSES:
        if takes(name, "gain"):
            assert LOSSES[name](scores, labels, gain=lambda y: y - 0.5).isnan()
    assert rankgrad.ndcg(scores, labels, gain=lambda y: y - 0.5).isnan().all()


@pytest.mark.parametrize("name", [*(name for name in LOSSES if takes(name, "gain")), "ndcg", "dcg"])
def test_a_label_that_a_table_has_no_gain_for_is_refused_or_loud(name):
    function = {**LOSSES, **METRICS}[name]
    scores, mask = torch.rand(2, 3), torch.tensor([[True, True, True], [True, True, False]])
    for label in (3.0, 0.5):
        labels = torch.tensor([[0.0, label, 1.0], [0.0, 1.0, 9.0]])  # the last is padding
        with pytest.raises(ValueError, match=rf"label {label:g} at index \(0, 1\) has no gain.*0 to 2"):
            function(scores, labels, mask, gain=[0, 1, 3])
        options = {} if name in METRICS else {"reduction": "none"}
        values = function(scores, labels, mask, gain=(0, 1, 3), check=False, **options)
        assert values.isnan().tolist() == [True, False]
    labels = torch.tensor([[0, 2, 1], [0, 1, 0]])
    expected = function(scores, labels, mask, gain=lambda y: torch.exp2(y) - 1)
    assert torch.equal(function(scores, labels, mask, gain=np.array([0, 1, 3])), expected)
    for bad in ([], [0], [0, -1], [0, math.nan], [[0, 1], [1, 2]], [0, "a"]):
        with pytest.raises(ValueError, match="gain"):
            function(scores, labels, mask, gain=bad)


@pytest.mark.parametrize("name", [name for name in LOSSES if takes(name, "gain")])
def test_a_gain_that_is_not_finite_in_a_list_that_is_not_informative(name):
    """A list without a relevant document, whatever its gains: 0 in value and gradient, and no other list is affected."""
    case = Case(name, lengths=(4, 3, 5))
    case.labels[0] += 1
    case.labels[1], case.labels[2] = 0.0, 0.0

    for gain in (lambda y: y - 0.5, lambda y: torch.where(y > 0, y, math.inf)):  # a negative gain is NaN
        options = {"gain": gain, "check": False, "reduction": "none"}
        value, gradient = value_and_grad(case, case.scores, **options)
        first = case.labels[:1], case.mask[:1]
        alone, slope = value_and_grad(LOSSES[name], case.scores[:1], *first, **options)
        close(value, torch.cat([alone, torch.zeros(2)]))
        close(gradient[:1], slope)
        assert slope.isfinite().all() and torch.equal(gradient[1:], torch.zeros_like(gradient[1:]))


@every_loss
def test_labels_beyond_every_gain_do_no_harm_in_a_list_that_is_not_informative(name):
    case = Case(name, lengths=(4, 1, 3))
    case.labels[1] = 2000.0
    silent = ~RULES[name](case.labels, case.mask)
    if silent.any():  # a single document is enough for the pointwise losses
        _, gradient = value_and_grad(case, case.scores, check=False)
        assert silent.tolist() == [False, True, False]
        assert gradient.isfinite().all() and (gradient[1] == 0).all()


def test_listmle_takes_noise_only_to_break_ties():
    with pytest.raises(ValueError, match="noise must be None for ties='group'"):
        LOSSES["listmle"](torch.zeros(3), torch.ones(3), noise=torch.zeros(3))


GRADED = [*(name for name in LOSSES if takes(name, "gain")), "xe_ndcg", "ndcg", "dcg"]


@pytest.mark.parametrize("name", GRADED)
def test_labels_beyond_every_gain_are_refused_or_loud(name):
    function = LOSSES.get(name) or getattr(rankgrad.metrics, name)
    scores, labels, mask = torch.randn(2, 3), torch.tensor([[2000, 1, 0], [2, 1, 0]]), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"label 2000 at index \(0, 0\) .*2\^y - 1.*; map your labels"):
        function(scores, labels, mask)
    assert not function(scores, labels, mask, check=False).isfinite().all()
    assert function(scores, labels, mask & (labels < 2000)).isfinite().all()  # under the padding
    assert not function(scores, labels.clamp(max=1020), mask).isnan().any()
    if name != "xe_ndcg":
        for gain in ("linear", lambda y: y.clamp(max=4)):
            assert function(scores, labels, mask, gain=gain).isfinite().all()


@every_loss
def test_the_mean_counts_the_lists_that_the_table_s_rule_names(name):
    case = Case(name, lengths=(7, 3, 10, 1, 5, 0, 4))
    case.labels[0], case.labels[1] = 1.0, 0.0
    counted = RULES[name](case.labels.masked_fill(~case.mask, 9.0), case.mask)
    close(case(reduction="mean"), case(reduction="sum") / (case.mask[counted] if BY_DOCUMENT[name] else counted).sum())
