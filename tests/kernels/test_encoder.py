"""What is between the products of an encoder block: the kernels against torch in float64, values and gradients."""

import copy

import pytest
import torch
from kernel_cases import CUDA, DEVICE

from rankgrad.kernels.encoder import fused, reference
from rankgrad.models import PackedLayout, Transformer

# beside, at and beyond a program's rows and columns
WIDE = pytest.param((3, 2500), marks=pytest.mark.slow)
SHAPES = [(1, 1), (5, 3), (37, 96), (200, 17), (40, 130), WIDE]
HALF = pytest.param(
    torch.bfloat16, 2e-2, marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def make_norm(width, eps=1e-5):
    norm = torch.nn.LayerNorm(width, eps, device=DEVICE)
    with torch.no_grad():  # one and zero, its start, would hide a forgotten parameter
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


def agree(kernel, plain, inputs, tolerance, norm=None):
    """Outputs of the kernel and of torch in float64, and the gradients of every input, by the same slopes."""
    wide = [given if given is None else given.detach().double().requires_grad_() for given in inputs]
    wide_norm = None if norm is None else copy.deepcopy(norm).double()
    outs, expected = kernel(*inputs, norm), plain(*wide, wide_norm)
    slopes = [torch.randn_like(out, dtype=torch.float32) for out in expected]
    torch.autograd.backward(outs, [slope.to(out.dtype) for slope, out in zip(slopes, outs, strict=True)])
    torch.autograd.backward(expected, [slope.double() for slope in slopes])
    for out, value in zip(outs, expected, strict=True):
        torch.testing.assert_close(out.double(), value, atol=tolerance, rtol=tolerance)
    if norm is not None:
        inputs, wide = [*inputs, *norm.parameters()], [*wide, *wide_norm.parameters()]
    for given, other in zip(inputs, wide, strict=True):
        if given is not None:
            assert given.grad.dtype == given.dtype
            size = float(other.grad.abs().max())
            torch.testing.assert_close(given.grad.double(), other.grad, atol=tolerance * max(1.0, size), rtol=0)


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """So few that each has several blocks of documents, as in a large step."""
    monkeypatch.setattr(fused, "_PROGRAMS", 2)


@pytest.fixture
def seeds():
    torch.manual_seed(0)
    return torch.tensor([123456789, -987654321], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != WIDE])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), HALF])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_add_norm(shape, first, dtype, tolerance, dropout, seeds):
    columns = shape[1]
    agree(
        lambda *given: fused.add_norm(*given, dtype, dropout, seeds),
        lambda *given: reference.add_norm(*given, dtype, dropout, seeds),
        [None if first else draw(*shape), draw(*shape, dtype=dtype), draw(columns, dtype=dtype)],
        tolerance,
        make_norm(columns, 0.1),
    )


def test_a_total_that_only_the_norm_uses_has_its_gradient_from_the_norm_alone(seeds):
    agree(
        lambda *given: fused.add_norm(*given, torch.float32, 0.3, seeds)[1:],
        lambda *given: reference.add_norm(*given, torch.float32, 0.3, seeds)[1:],
        [draw(9, 20), draw(9, 20), draw(20)],
        2e-5,
        make_norm(20),
    )


@pytest.mark.slow
def test_add_norm_of_wide_documents(seeds):
    test_add_norm((3, 2500), False, torch.float32, 2e-5, 0.3, seeds)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), HALF])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_relu_dropout(shape, dtype, tolerance, dropout, seeds):
    agree(
        lambda product, bias, _: [fused.relu_dropout(product, bias, dropout, seeds)],
        lambda product, bias, _: [reference.relu_dropout(product, bias, dropout, seeds)],
        [draw(*shape, dtype=dtype), draw(shape[1], dtype=dtype)],
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), HALF])
def test_linear(dtype, tolerance, seeds):
    agree(
        lambda x, weight, bias, _: [fused.linear(x, weight, bias)],
        lambda x, weight, bias, _: [reference.linear(x, weight, bias)],
        [draw(70, 5, dtype=dtype), draw(130, 5, dtype=dtype), draw(130, dtype=dtype)],
        tolerance,
    )


def test_the_reference_is_the_formula(seeds):
    hidden, product, bias, norm = draw(9, 20), draw(9, 20), draw(20), make_norm(20)
    kept = reference.kept((9, 20), 0.3, seeds)
    total, normed = reference.add_norm(hidden, product, bias, norm, torch.float32, 0.3, seeds)
    torch.testing.assert_close(total, hidden + torch.where(kept, (product + bias) / 0.7, 0.0))
    torch.testing.assert_close(normed, norm(total))
    inner = reference.relu_dropout(product, bias, 0.3, seeds)
    torch.testing.assert_close(inner, torch.where(kept, (product + bias).clamp(min=0) / 0.7, 0.0))


def test_nan_stays_nan(seeds):
    product = draw(4, 3)
    with torch.no_grad():
        product[2, 1] = torch.nan
    bias = draw(3)
    out = fused.relu_dropout(product, bias, 0.0, seeds)
    assert out.isnan().sum() == 1
    out.sum().backward()
    total, normed = fused.add_norm(None, product, bias, make_norm(3), torch.float32, 0.0, seeds)
    assert total.isnan().sum() == 1
    assert normed.isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.slow
def test_the_same_step_gives_the_same_bits(seeds):
    inputs, norm = [draw(300, 96), draw(300, 96), draw(96)], make_norm(96)

    def slopes():
        total, normed = fused.add_norm(*inputs, norm, torch.float32, 0.1, seeds)
        return torch.autograd.grad((total * normed).sum(), [*inputs, *norm.parameters()])

    for one, other in zip(slopes(), slopes(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_learns_with_the_kernels_as_without(layers, noise):
    torch.manual_seed(0)
    model = Transformer(5, width=8, layers=layers, heads=2, feedforward=12, dropout=0.0, input_noise=noise, tanh=True)
    model = model.to(DEVICE)
    for number, layer in enumerate(layer for layer in model.modules() if isinstance(layer, torch.nn.LayerNorm)):
        layer.eps = 0.1 * (1 + number)
    offsets = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=DEVICE)
    features, slope = torch.randn(11, 5).to(DEVICE), torch.randn(11).to(DEVICE)
    found = []
    for kernel in (False, True):
        torch.manual_seed(1)
        scores = model.packed(features, PackedLayout(offsets, 7, kernel=kernel))
        found.append([scores, *torch.autograd.grad(scores, list(model.parameters()), slope)])
    for plain, by_kernels in zip(*found, strict=True):
        torch.testing.assert_close(by_kernels, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_dropout_in_a_model_keeps_its_share_and_ends_with_training():
    torch.manual_seed(0)
    model = Transformer(5, width=32, layers=2, feedforward=32, dropout=0.5).to(DEVICE)
    lists = PackedLayout(torch.tensor([0, 60], dtype=torch.int32, device=DEVICE), 60, kernel=True)
    features = torch.randn(60, 5).to(DEVICE)
    one, two = model.packed(features, lists), model.packed(features, lists)
    assert not torch.equal(one, two)
    torch.manual_seed(3)
    one = model.packed(features, lists)
    torch.manual_seed(3)
    assert torch.equal(one, model.packed(features, lists))
    model.eval()
    torch.testing.assert_close(
        model.packed(features, lists), model.packed(features, lists._replace(kernel=False)), atol=1e-5, rtol=1e-4
    )


@pytest.mark.slow
def test_every_dropout_of_a_model_has_seeds_of_its_own():
    torch.manual_seed(0)
    model, p = Transformer(5, width=12, layers=2, heads=2, feedforward=20, dropout=0.4).to(DEVICE), 0.4
    lists = PackedLayout(torch.tensor([0, 30, 50], dtype=torch.int32, device=DEVICE), 30, kernel=True)
    features, slope = torch.randn(50, 5).to(DEVICE), torch.randn(50).to(DEVICE)
    torch.manual_seed(7)
    scores = model.packed(features, lists)
    torch.manual_seed(7)
    draws = torch.randint(-(2**31), 2**31 - 1, (2, 4, 4), dtype=torch.int32, device=DEVICE)

    def dropped(x, seeds):
        return torch.where(reference.kept(x.shape, p, seeds), x / (1 - p), 0.0)

    hidden = model.input(features)
    for block, seeds in zip(model.blocks, draws, strict=True):
        found = block.attention(block.attention_norm(hidden), lists, reference.linear, seeds[0])
        hidden = hidden + dropped(block.attention.merge(found), seeds[1])
        inner = dropped(block.widen(block.feedforward_norm(hidden)).relu(), seeds[2])
        hidden = hidden + dropped(block.narrow(inner), seeds[3])
    plain = model.output(model.norm(hidden))[:, 0]
    torch.testing.assert_close(scores, plain, atol=1e-5, rtol=1e-4)
    for one, other in zip(
        *(torch.autograd.grad(s, list(model.parameters()), slope) for s in (scores, plain)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-3)


def test_tensors_need_not_be_contiguous(seeds):
    def turned(*shape):
        return torch.randn(*shape[::-1], device=DEVICE).t().requires_grad_()

    hidden, product, bias, norm = turned(9, 20), turned(9, 20), draw(20), make_norm(20)

    def turned_sum(out):
        """Its gradient comes back turned."""
        return (out.t() * torch.arange(1.0, 1 + out.numel(), device=DEVICE).view(out.t().shape)).sum()

    def outputs(operators):
        added = operators.add_norm(hidden, product, bias, norm, torch.float32, 0.3, seeds)
        linear = operators.linear(product, norm.weight.expand(4, 20), norm.bias[:4])
        return *added, operators.relu_dropout(product, bias, 0.3, seeds), linear

    leaves = [hidden, product, bias, *norm.parameters()]
    for outs in zip(outputs(fused), outputs(reference), strict=True):
        torch.testing.assert_close(*outs)
        grads = (
            torch.autograd.grad(turned_sum(out), leaves, retain_graph=True, materialize_grads=True) for out in outs
        )
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def test_weights_of_float32_learn_under_autocast():
    torch.manual_seed(0)
    model = Transformer(5, width=8, layers=1, feedforward=12, dropout=0.0).to(DEVICE)
    offsets = torch.tensor([0, 4, 11], dtype=torch.int32, device=DEVICE)
    features = torch.randn(11, 5).to(DEVICE)
    found = []
    for half in (False, True):
        with torch.autocast(DEVICE, torch.float16, enabled=half):
            scores = model.packed(features, PackedLayout(offsets, 7, kernel=True))
        found.append(torch.autograd.grad(scores.sum(), list(model.parameters())))
    for plain, low in zip(*found, strict=True):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, plain, atol=2e-2, rtol=5e-2)


def test_float64_is_not_rounded_on_the_way():
    torch.manual_seed(0)
    model = Transformer(5, width=8, layers=1, feedforward=12, dropout=0.0).to(DEVICE).double()
    lists = PackedLayout(torch.tensor([0, 4, 11], dtype=torch.int32, device=DEVICE), 7)
    features = torch.randn(11, 5, dtype=torch.float64).to(DEVICE)
    by_kernel, plain = (model.packed(features, lists._replace(kernel=kernel)) for kernel in (True, False))
    torch.testing.assert_close(by_kernel, plain, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_the_hash_keeps_its_share(dropout, seeds):
    share = reference.kept((400, 500), dropout, seeds).double()
    assert abs(share.mean() - (1 - dropout)) < 0.005
    for dim, count in ((0, 400), (1, 500)):  # by column, by row: binomial
        assert share.mean(dim).std().item() == pytest.approx((dropout * (1 - dropout) / count) ** 0.5, rel=0.15)
    one, other = (reference.kept((400, 500), dropout, seeds + n) for n in (0, 1))
    both = (~one & ~other).double().mean().item()
    assert both == pytest.approx(dropout**2, abs=0.004)  # independent of another seed's
