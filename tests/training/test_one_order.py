"""Gradients that do not depend on the number of threads: those of torch, in another order."""

import pytest
import torch
from torch.nn import functional

from rankgrad.models import MLP, Transformer
from rankgrad.training import one_order
from rankgrad.training.one_order import InOneOrder, kept, sum_of_products, sum_of_rows, times
from rankgrad.training.threads import torch_threads


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def values_and_gradients(compute, given, slope):
    torch.manual_seed(1)
    found = compute()
    return found, *torch.autograd.grad(found, given, slope)


def expect_torchs(compute, given, torchs=None):
    """Values and gradients within `InOneOrder` are those without it, or of `torchs`; and our own functions have given them."""
    slope = torch.randn_like(compute())
    expected = values_and_gradients(torchs or compute, given, slope)
    with InOneOrder():
        found = values_and_gradients(compute, given, slope)
    assert found[0].grad_fn.name() != expected[0].grad_fn.name()
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(1,), (255,), (257,), (3, 200), (2, 3, 128)])
@pytest.mark.parametrize("width", [1, 3])
def test_linear_layers_are_torchs(width, leading, bias, monkeypatch):
    layer = torch.nn.Linear(5, width, bias=bias, dtype=torch.float64)
    x = draw(*leading, 5)
    for largest in (one_order.LARGEST_AT_ONCE, 16):  # all parts at once, or one by one
        monkeypatch.setattr(one_order, "LARGEST_AT_ONCE", largest)
        expect_torchs(lambda: layer(x), [x, *layer.parameters()])


def test_a_linear_layer_of_inputs_that_do_not_learn():
    layer, x = torch.nn.Linear(5, 1), torch.randn(4, 5)
    with InOneOrder():
        layer(x).sum().backward()  # whose slope has no memory of its own
    torch.testing.assert_close(layer.weight.grad, x.sum(0, keepdim=True))
    assert layer.bias.grad == 4


@pytest.mark.parametrize("width", [1, 2])
def test_products_of_no_rows_are_zero(width):
    assert torch.equal(sum_of_products(torch.ones(0, width), torch.ones(0, 3)), torch.zeros(width, 3))


@pytest.mark.parametrize("width", [1, 3, 96])
@pytest.mark.parametrize("leading", [(5,), (4, 7), (2, 3, 4)])
def test_layer_norms_are_torchs(leading, width):
    norm = torch.nn.LayerNorm(width, 1e-4, dtype=torch.float64)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = draw(*leading, width)
    expect_torchs(lambda: norm(x), [x, *norm.parameters()])


SHAPES = [(1, 1, 40, 8), (3, 1, 5, 8), (7, 2, 37, 12), (20, 1, 120, 32)]  # lists, heads, documents, a head's width


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_is_its_formula(shape, masked):
    given = [draw(*shape) for _ in range(3)]
    seen = (torch.rand(shape[0], 1, 1, shape[2]) < 0.6).index_fill_(-1, torch.tensor(1), True) if masked else None
    attend = functional.scaled_dot_product_attention

    def formula():
        query, key, value = given
        weights = query @ key.mT / shape[-1] ** 0.5
        weights = (weights if seen is None else weights.masked_fill(~seen, -torch.inf)).softmax(-1)
        return (weights * kept(weights, 0.3)) @ value

    expect_torchs(lambda: attend(*given, attn_mask=seen, dropout_p=0.3), given, formula)
    with InOneOrder():
        assert torch.equal(attend(*given, attn_mask=seen), attend(*given, attn_mask=seen, dropout_p=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dropout", [1e-9, 0.1, 0.5, 0.97, 1 - 1e-9])
def test_dropout_drops_as_many_as_it_should_anywhere(dropout, dtype):
    """Each of the four units that share a random number, and each independently of the one beside it."""
    torch.manual_seed(0)
    x = torch.ones(1000, 401, dtype=dtype).mT.requires_grad_()
    with InOneOrder():
        found = functional.dropout(x, dropout)
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert found.dtype == dtype and torch.equal(found, slope)
    left = found.detach().contiguous().flatten()
    assert left.unique().numel() <= 2 and left.min() in (0, left.max())
    probability = min(round(dropout * 2**16) / 2**16, 1 - 2**-16)
    within = 5 * (probability * (1 - probability) / (len(left) // 4)) ** 0.5
    for place in range(4):
        assert abs((left[place::4] == 0).double().mean() - probability) <= within
    both = ((left[1:] == 0) & (left[:-1] == 0)).double().mean()
    assert abs(both - probability**2) <= within
    if dropout < 0.9:
        torch.testing.assert_close(left.mean(), torch.ones((), dtype=dtype), atol=4 * within, rtol=0)


def test_without_training_nothing_is_dropped():
    x = torch.ones(3)
    with InOneOrder():
        assert functional.dropout(x, 0.5, training=False) is x
        assert functional.dropout(x, 0.0) is x


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_the_same_with_any_number_of_threads(shape):
    given = [draw(*shape, dtype=torch.float32) for _ in range(3)]
    rows, norm = draw(40 * shape[2], 96, dtype=torch.float32), torch.nn.LayerNorm(96)
    layers = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 1))
    slopes = torch.randn(shape), torch.randn(len(rows), 1)

    def found():
        with InOneOrder():
            attended = functional.scaled_dot_product_attention(*given, dropout_p=0.3)
            torch.manual_seed(1)
            scores = layers(norm(rows))
        of_layers = torch.autograd.grad(scores, [rows, *norm.parameters(), *layers.parameters()], slopes[1])
        return attended, scores, *torch.autograd.grad(attended, given, slopes[0]), *of_layers

    def with_threads(number):
        torch.manual_seed(1)
        with torch_threads(number):
            return found()

    one = with_threads(1)
    for number in (2, 3, 4, 8, 14):
        assert all(map(torch.equal, one, with_threads(number)))


@pytest.mark.parametrize("rows", [1, 2, 7, 17, 100, 511, 513, 700, 1600, 7681, 40_000])
@pytest.mark.parametrize(("before", "after"), [(96, 1), (136, 32), (32, 136), (5, 3)])
def test_products_are_the_same_with_any_number_of_threads(rows, before, after):
    """Many draws, because two orders often round alike."""
    weight, bias = torch.randn(before, after), torch.randn(after)
    given = [(torch.randn(rows, before), torch.randn(rows, after)) for _ in range(20 if rows * after < 10**5 else 1)]

    def found(threads):
        with torch_threads(threads):
            return [
                found
                for x, slope in given
                for found in (
                    times(x, weight, bias),
                    times(slope, weight.T),
                    sum_of_products(slope, x),
                    sum_of_rows(slope),
                )
            ]

    one = found(1)
    for number in (2, 3, 4, 8, 14, 16):
        assert all(map(torch.equal, one, found(number)))
    torch.testing.assert_close(one[0], given[0][0] @ weight + bias, rtol=1e-4, atol=1e-4)


def test_autocast_keeps_torchs_operators():
    model, features = MLP(4, hidden=(8,)), torch.randn(2, 3, 4)
    gradients = []
    for within in (lambda score: score, InOneOrder.of):
        with torch.autocast("cpu", torch.bfloat16):
            scores = within(model)(features)
        gradients.append(torch.autograd.grad(scores.sum(), list(model.parameters())))
    assert all(map(torch.equal, *gradients))


def test_nothing_stays_behind():
    model = Transformer(4, width=8, feedforward=8)
    InOneOrder.of(model)(torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match="features must have the shape"):
        InOneOrder.of(model)(torch.randn(2, 3, 5))
    assert functional.linear(torch.ones(1, 2), torch.ones(1, 2, requires_grad=True)).grad_fn.name() != "_LinearBackward"
