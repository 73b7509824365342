"""Every loss and metric under torch.compile, torch.export and torch.func: the same values and gradients as in eager mode.

The compiler's front end (backend "aot_eager") runs here; `make test-compile` sets COMPILE_BACKEND=inductor and runs the same
tests with the code generator.
"""

import os

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cases import Case, takes, value_and_grad
from rankgrad import sorting
from rankgrad.losses import LOSS_TABLE, LOSSES
from rankgrad.metrics import METRICS

# torch's code generator itself imports something of torch that warns
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

BACKEND = os.environ.get("COMPILE_BACKEND", "aot_eager")
CUDA = torch.cuda.is_available()
FUNCTIONS = {**LOSSES, **METRICS}
EVERYDAY = ("neural_ndcg", "lambdarank", "listnet", "ndcg")  # of each kind one; the others take seconds each
WITH_KERNELS = ("ranknet", "approx_ndcg", "neural_ndcg", "neural_map")  # one for each operator

every_function = pytest.mark.parametrize("name", list(FUNCTIONS))
every_loss = pytest.mark.parametrize("name", list(LOSSES))
when_compiled = pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS]
)


def inputs(name, width=12, dtype=torch.float32):
    """Scores, labels and mask, and noise for the losses that need it."""
    case = Case(name if name in LOSSES else "listnet", width=width, dtype=dtype)
    return case.scores, case.labels, case.mask, *case.options.values()


def function_of(name, **options):
    """The loss or metric as a function of tensors alone."""

    def function(scores, labels, mask, noise=None):
        given = options if noise is None else {**options, "noise": noise}
        return FUNCTIONS[name](scores, labels, mask, **given)

    return function


def close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def agree(compiled, eager, *given):
    """Value and, where there is one, gradient."""
    if not eager(*given).requires_grad and not eager(given[0].clone().requires_grad_(), *given[1:]).requires_grad:
        close(compiled(*given), eager(*given))
        return
    value, gradient = value_and_grad(compiled, *given)
    expected, slope = value_and_grad(eager, *given)
    close(value, expected)
    close(gradient, slope)


def check_compiled(eager, *batches):
    """One program for batches of several lengths, without a graph break."""
    torch.compiler.reset()
    programs = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=programs)
    agree(compiled, eager, *batches[0])
    first = programs.frame_count
    for batch in batches[1:]:
        agree(compiled, eager, *batch)
    assert first >= 1 and programs.frame_count == first


@when_compiled
def test_compiled_once_for_all_lengths(name):
    check_compiled(function_of(name), inputs(name), inputs(name, width=17), inputs(name, width=30))


VARIANTS = [
    ("neural_ndcg", {"k": 3, "tau": 0.5, "sort": sorting.soft_sort, "sinkhorn_iters": 3}),
    ("neural_ndcg", {"gain": torch.sqrt, "sinkhorn_iters": 0}),
    ("neural_map", {"sort": sorting.neural_sort, "sinkhorn_tol": 0.0}),
    ("neural_mrr", {"sort": sorting.ot_sort, "sinkhorn_iters": 3}),
    ("soft_rank", {"method": "exact", "k": 3}),
    ("lambdarank", {"k": 3, "pairs": "both", "gain": "linear"}),
    ("ndcg", {"k": 3, "empty": float("nan")}),
    *((spec.name, {"weights": True}) for spec in LOSS_TABLE if spec.weights),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_options_are_compiled(name, options):
    given = inputs(name)
    if "weights" in options:
        options = {"weights": torch.rand(given[1].shape, generator=torch.Generator().manual_seed(0))}
    check_compiled(function_of(name, **options), given)


@pytest.mark.slow
def test_random_losses_are_compiled():
    scores, labels, mask = inputs("neural_ndcg")
    noise = torch.randn(3, *scores.shape, generator=torch.Generator().manual_seed(0))
    check_compiled(function_of("neural_ndcg"), (scores, labels, mask, noise))
    draws = torch.compile(function_of("neural_ndcg", samples=3), fullgraph=True, backend=BACKEND)
    with torch.random.fork_rng():
        values = [torch.manual_seed(seed) and draws(scores, labels, mask) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


def test_values_are_not_checked_while_compiling_or_transforming():
    scores, labels, mask = inputs("listnet")
    scores[2, mask[2].nonzero()[0]] = torch.nan
    with pytest.raises(ValueError, match="scores of real documents"):
        LOSSES["listnet"](scores, labels, mask)
    per_list = function_of("listnet", reduction="none")
    for values in (
        torch.compile(per_list, fullgraph=True, backend="eager")(scores, labels, mask),
        torch.func.vmap(per_list)(scores, labels, mask),
    ):
        assert values.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS]
)
def test_exported_with_lists_of_any_length(name):
    class Module(torch.nn.Module):
        def forward(self, *given):
            return function_of(name)(*given)

    given, eager = inputs(name), function_of(name)
    lists, length = torch.export.Dim("lists", min=2, max=4096), torch.export.Dim("length", min=3, max=4096)
    shapes = (tuple({0: lists, 1: length} for _ in given),)
    for strict in (False, True):
        program = torch.export.export(Module(), given, dynamic_shapes=shapes, strict=strict).module()
        for batch in (given, inputs(name, width=30)):
            close(program(*batch), eager(*batch))


@every_loss
def test_gradients_by_torch_func(name):
    scores, *others = inputs(name, dtype=torch.float64)
    _, expected = value_and_grad(function_of(name), scores, *others)
    close(torch.func.grad(function_of(name))(scores, *others), expected)


@every_function
def test_vmap_over_lists(name):
    scores, *others = inputs(name, dtype=torch.float64)
    alone = function_of(name, **({"reduction": "none"} if name in LOSSES else {}))
    close(torch.func.vmap(alone)(scores, *others), alone(scores, *others))
    if name in LOSSES:
        _, expected = value_and_grad(alone, scores, *others)
        close(torch.func.vmap(torch.func.grad(alone))(scores, *others), expected)
        close(torch.func.grad(lambda s: torch.func.vmap(alone)(s, *others).sum())(scores), expected)


@pytest.mark.parametrize("name", [name for name in LOSSES if takes(name, "sort")])
def test_second_derivatives_by_torch_func_are_refused(name):
    scores, *others = inputs(name, dtype=torch.float64)
    slope = torch.func.grad(function_of(name))
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.func.grad(lambda s: slope(s, *others).square().sum())(scores)


@pytest.mark.parametrize("sort", [sorting.neural_sort, sorting.soft_sort, sorting.ot_sort])
def test_sorts_by_torch_func(sort):
    scores, _, mask = inputs("neural_ndcg", dtype=torch.float64)
    weights = torch.rand(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def value(scores, mask):
        return (sorting.sinkhorn(sort(scores, mask)) * weights).sum((-1, -2))

    expected, slope = value_and_grad(value, scores, mask)
    close(torch.func.vmap(value)(scores, mask), expected)
    close(torch.func.vmap(torch.func.grad(value))(scores, mask), slope)


# --- kernels ----------------------------------------------------------------------------------------------------------


def on_the_device(given):
    return [tensor.cuda() for tensor in given] if CUDA else given


def few_rounds(name, backend="triton"):
    return {"backend": backend, **({"sinkhorn_iters": 2} if takes(name, "sinkhorn_iters") else {})}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernels_are_compiled_as_operators(name):
    pytest.importorskip("triton")
    function = function_of(name, **few_rounds(name))
    check_compiled(function, on_the_device(inputs(name)), on_the_device(inputs(name, width=17)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "triton") for name in WITH_KERNELS), ("neural_ndcg", "numba"), ("neural_map", "numba")],
)
def test_kernels_by_torch_func(name, backend):
    pytest.importorskip(backend)
    scores, *others = [tensor[:2] for tensor in inputs(name)]
    if backend == "triton":
        scores, *others = on_the_device([scores, *others])
    rounds = few_rounds(name, backend)
    for reduction in ("none", "mean"):
        alone = function_of(name, reduction=reduction, **rounds)
        per_list = function_of(name, reduction="none", **rounds)
        expected, slope = value_and_grad(per_list, scores, *others)
        close(torch.func.vmap(alone)(scores, *others), expected)
        close(torch.func.vmap(torch.func.grad(alone))(scores, *others), slope)
    mean = function_of(name, **rounds)
    _, slope = value_and_grad(mean, scores, *others)
    close(torch.func.grad(mean)(scores, *others), slope)
    pairs = [torch.stack([tensor, tensor.flip(0)]) for tensor in (scores, *others)]  # batches of lists
    close(torch.func.vmap(mean)(*pairs), torch.stack([mean(scores, *others)] * 2))
    if name != "neural_map":
        with pytest.raises(RuntimeError, match="differentiated once"):
            torch.func.grad(lambda s: torch.func.grad(mean)(s, *others).square().sum())(scores)


@pytest.mark.slow
def test_kernels_are_exported_as_operators():
    pytest.importorskip("triton")

    class Module(torch.nn.Module):
        def forward(self, *given):
            return function_of("lambdarank", backend="triton")(*given)

    given = tuple(on_the_device(inputs("lambdarank")))
    program = torch.export.export(Module(), given)
    assert "rankgrad.pairs" in str(program.graph)
    close(program.module()(*given), Module()(*given))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in LOSSES if takes(name, "backend")])
def test_on_a_gpu_kernels_are_compiled_too(name):
    check_compiled(function_of(name), *(on_the_device(inputs(name, width=width)) for width in (40, 240, 300)))
