"""What stands between the products of an encoder block: the kernels against torch in float64, values and gradients."""

import os

import pytest
import torch
from torch.nn import functional

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

pytest.importorskip("triton")

from rankgrad.kernels.encoder import fused as encoder  # noqa: E402
from rankgrad.models import EndToEnd, Transformer, kept  # noqa: E402

SHAPES = [
    (1, 1),
    (5, 3),
    (37, 96),
    (200, 17),
    (40, 130),
    (3, 2500),
]  # rows and columns beside, at and beyond a program's
HALF = pytest.param(torch.bfloat16, 2e-2, marks=pytest.mark.skipif(not CUDA, reason="needs a CUDA device"))


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def agree(kernel, plain, inputs, tolerance):
    """Outputs of the kernel and of torch in float64, and the gradients of every input, by the same slopes."""
    wide = [given if given is None else given.detach().double().requires_grad_() for given in inputs]
    outs, expected = kernel(*inputs), plain(*wide)
    slopes = [torch.randn_like(out, dtype=torch.float32) for out in expected]
    torch.autograd.backward(outs, [slope.to(out.dtype) for slope, out in zip(slopes, outs, strict=True)])
    torch.autograd.backward(expected, [slope.double() for slope in slopes])
    for out, value in zip(outs, expected, strict=True):
        torch.testing.assert_close(out.double(), value, atol=tolerance, rtol=tolerance)
    for given, other in zip(inputs, wide, strict=True):
        if given is not None:
            assert given.grad.dtype == given.dtype
            size = float(other.grad.abs().max())
            torch.testing.assert_close(given.grad.double(), other.grad, atol=tolerance * max(1.0, size), rtol=0)


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """So few that each has several blocks of documents, as in a large step."""
    monkeypatch.setattr(encoder, "_PROGRAMS", 2)


@pytest.fixture
def seeds():
    torch.manual_seed(0)
    return torch.tensor([123456789, -987654321], dtype=torch.int32, device=DEVICE)


def dropped(x, dropout, seeds):
    return x * kept(x.shape, dropout, seeds) / (1 - dropout)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), HALF])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_branch_is_added_and_normed(shape, first, dtype, tolerance, dropout, seeds):
    columns, eps = shape[1], 0.1
    inputs = [
        None if first else draw(*shape),
        draw(*shape, dtype=dtype),
        draw(columns, dtype=dtype),
        draw(columns),
        draw(columns),
    ]

    def kernel(hidden, product, bias, weight, shift):
        return encoder.add_norm(hidden, product, bias, (weight, shift, eps), dtype, dropout, seeds)

    def plain(hidden, product, bias, weight, shift):
        total = dropped(product + bias, dropout, seeds) + (0 if hidden is None else hidden)
        return total, functional.layer_norm(total, (columns,), weight, shift, eps)

    agree(kernel, plain, inputs, tolerance)


def test_a_total_that_goes_no_further_has_its_gradient_from_the_norm_alone(seeds):
    hidden, product, bias, weight, shift = draw(9, 20), draw(9, 20), draw(20), draw(20), draw(20)
    _, normed = encoder.add_norm(hidden, product, bias, (weight, shift, 1e-5), torch.float32, 0.3, seeds)
    slope = torch.randn_like(normed)
    normed.backward(slope)
    wide = hidden.detach().requires_grad_()
    functional.layer_norm(wide + dropped(product.detach() + bias.detach(), 0.3, seeds), (20,), weight, shift).backward(
        slope
    )
    torch.testing.assert_close(hidden.grad, wide.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), HALF])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_relu_and_dropout_are_one(shape, dtype, tolerance, dropout, seeds):
    agree(
        lambda product, bias: [encoder.relu_dropout(product, bias, dropout, seeds)],
        lambda product, bias: [dropped((product + bias).relu(), dropout, seeds)],
        [draw(*shape, dtype=dtype), draw(shape[1], dtype=dtype)],
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), HALF])
def test_linear_is_torch_s(dtype, tolerance, seeds):
    agree(
        lambda x, weight, bias: [encoder.linear(x, weight, bias)],
        lambda x, weight, bias: [functional.linear(x, weight, bias)],
        [draw(70, 5, dtype=dtype), draw(130, 5, dtype=dtype), draw(130, dtype=dtype)],
        tolerance,
    )


def test_what_is_not_a_number_stays_so(seeds):
    product = draw(4, 3)
    with torch.no_grad():
        product[2, 1] = torch.nan
    bias = draw(3)
    out = encoder.relu_dropout(product, bias, 0.0, seeds)
    assert out.isnan().sum() == 1
    out.sum().backward()
    total, normed = encoder.add_norm(None, product, bias, (draw(3), draw(3), 1e-5), torch.float32, 0.0, seeds)
    assert total.isnan().sum() == 1
    assert normed.isnan().any(1).tolist() == [False, False, True, False]


def test_the_same_step_gives_the_same_bits(seeds):
    inputs = [draw(300, 96), draw(300, 96), draw(96), draw(96), draw(96)]

    def slopes():
        hidden, product, bias, weight, shift = inputs
        total, normed = encoder.add_norm(hidden, product, bias, (weight, shift, 1e-5), torch.float32, 0.1, seeds)
        return torch.autograd.grad((total * normed).sum(), inputs)

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
        scores = model.packed(features, EndToEnd(offsets, 7, kernel=kernel))
        found.append([scores, *torch.autograd.grad(scores, list(model.parameters()), slope)])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, atol=2e-5, rtol=1e-4)


def test_dropout_in_a_model_keeps_its_share_and_ends_with_training():
    torch.manual_seed(0)
    model = Transformer(5, width=32, layers=2, feedforward=32, dropout=0.5).to(DEVICE)
    lists = EndToEnd(torch.tensor([0, 60], dtype=torch.int32, device=DEVICE), 60, kernel=True)
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


def test_every_dropout_of_a_model_has_seeds_of_its_own():
    torch.manual_seed(0)
    model, p = Transformer(5, width=12, layers=2, heads=2, feedforward=20, dropout=0.4).to(DEVICE), 0.4
    lists = EndToEnd(torch.tensor([0, 30, 50], dtype=torch.int32, device=DEVICE), 30, kernel=True)
    features, slope = torch.randn(50, 5).to(DEVICE), torch.randn(50).to(DEVICE)
    torch.manual_seed(7)
    scores = model.packed(features, lists)
    torch.manual_seed(7)
    draws = torch.randint(-(2**31), 2**31 - 1, (2, 4, 4), dtype=torch.int32, device=DEVICE)
    hidden = model.input(features)
    for block, seeds in zip(model.blocks, draws, strict=True):
        found = block.attention.packed(block.attention_norm(hidden), lists, seeds[0])
        hidden = hidden + dropped(block.attention.merge(found), p, seeds[1])
        inner = dropped(block.widen(block.feedforward_norm(hidden)).relu(), p, seeds[2])
        hidden = hidden + dropped(block.narrow(inner), p, seeds[3])
    plain = model.output(model.norm(hidden))[:, 0]
    torch.testing.assert_close(scores, plain, atol=1e-5, rtol=1e-4)
    for one, other in zip(
        *(torch.autograd.grad(s, list(model.parameters()), slope) for s in (scores, plain)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-3)


def test_tensors_need_not_be_contiguous(seeds):
    def turned(*shape):
        return torch.randn(*shape[::-1], device=DEVICE).t().requires_grad_()

    hidden, product, bias, weight, shift = turned(9, 20), turned(9, 20), draw(20), draw(20), draw(20)

    def turned_sum(out):
        """Its gradient comes back turned."""
        return (out.t() * torch.arange(1.0, 1 + out.numel(), device=DEVICE).view(out.t().shape)).sum()

    def kernel():
        total, normed = encoder.add_norm(hidden, product, bias, (weight, shift, 1e-5), torch.float32, 0.3, seeds)
        linear = encoder.linear(product, weight.expand(4, 20), shift[:4])
        return total, normed, encoder.relu_dropout(product, bias, 0.3, seeds), linear

    def plain():
        total = hidden + dropped(product + bias, 0.3, seeds)
        linear = functional.linear(product, weight.expand(4, 20), shift[:4])
        normed = functional.layer_norm(total, (20,), weight, shift)
        return total, normed, dropped((product + bias).relu(), 0.3, seeds), linear

    leaves = [hidden, product, bias, weight, shift]
    for outs in zip(kernel(), plain(), strict=True):
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
            scores = model.packed(features, EndToEnd(offsets, 7, kernel=True))
        found.append(torch.autograd.grad(scores.sum(), list(model.parameters())))
    for plain, low in zip(*found, strict=True):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, plain, atol=2e-2, rtol=5e-2)


def test_float64_is_not_rounded_on_the_way():
    torch.manual_seed(0)
    model = Transformer(5, width=8, layers=1, feedforward=12, dropout=0.0).to(DEVICE).double()
    with torch.no_grad():
        model.blocks[0].attention.merge.weight.zero_()  # the attention kernel computes in float32
    lists = EndToEnd(torch.tensor([0, 4, 11], dtype=torch.int32, device=DEVICE), 7)
    features = torch.randn(11, 5, dtype=torch.float64).to(DEVICE)
    fused, plain = (model.packed(features, lists._replace(kernel=kernel)) for kernel in (True, False))
    torch.testing.assert_close(fused, plain, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_the_hash_keeps_its_share(dropout, seeds):
    share = kept((400, 500), dropout, seeds).double().mean()
    assert abs(share - (1 - dropout)) < 0.005
    assert 0.4 < (kept((400, 500), 0.5, seeds) == kept((400, 500), 0.5, seeds + 1)).double().mean() < 0.6


def test_a_compiled_model_scores_the_same_at_every_size():
    torch.manual_seed(0)
    model = Transformer(5, width=8, layers=1, heads=2, feedforward=12, dropout=0.0).to(DEVICE)
    compiled = torch.compile(
        lambda features, offsets, longest: model.packed(features, EndToEnd(offsets, longest, kernel=True)),
        dynamic=True,
        backend="aot_eager",
        fullgraph=True,
    )
    for lengths in ([4, 0, 7], [16, 3], [5, 5, 5, 1]):
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        features = torch.randn(sum(lengths), 5).to(DEVICE)
        plain = model.packed(features, EndToEnd(offsets, max(lengths)))
        torch.testing.assert_close(compiled(features, offsets, max(lengths)), plain, atol=1e-5, rtol=1e-5)
