"""Attention within packed lists: the kernel against softmax(Q K^T) V of each list in float64."""

import functools
import math

import pytest
import torch
from kernel_cases import DEVICE, on_the_gpu

from rankgrad.kernels.encoder.attention import list_attention
from rankgrad.models import PackedLayout, SharedTransformer, Transformer


def case(lengths, heads, width, dtype=torch.float32):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    projection = torch.randn(sum(lengths), 3, heads, width).to(DEVICE, dtype)
    return projection.requires_grad_(), offsets


def kept(projection, offsets, dropout, seed):
    """The dropout factors of each list [H, n, n]: what the kernel makes of constant weights and unit values."""
    heads, width = projection.shape[2:]
    factors = []
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        n = end - first
        list_factors = torch.zeros(heads, n, n, dtype=torch.float64, device=DEVICE)
        for start in range(0, n, width):  # as many columns as a value has dimensions, at a time
            flat = torch.zeros_like(projection)
            columns = torch.arange(start, min(start + width, n), device=DEVICE)
            flat[first + columns, 2, :, columns - start] = 1.0
            out = list_attention(flat.detach(), offsets, max(1, int(offsets.diff().max())), dropout, seed, True)
            seen = out[first:end].transpose(0, 1)[..., : len(columns)].double()  # [H, n, columns]
            list_factors[:, :, start : start + len(columns)] = seen * n
        factors.append(list_factors)
    return factors


def expected(projection, offsets, factors):
    outs = []
    for number, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        query, key, value = (projection[first:end, part].transpose(0, 1) for part in range(3))
        weights = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1)
        weights = weights if factors is None else weights * factors[number]
        outs.append((weights @ value).transpose(0, 1))
    return torch.cat(outs)


def agree(projection, offsets, dropout, tolerance, exact=True):
    seed = torch.tensor([11], dtype=torch.int32, device=DEVICE)
    longest = int(offsets.diff().max())
    out = list_attention(projection, offsets, longest, dropout, seed, exact)
    slope = torch.randn_like(out)
    out.backward(slope)
    wide = projection.detach().double().requires_grad_()
    factors = kept(projection.float(), offsets, dropout, seed) if dropout else None
    plain = expected(wide, offsets, factors)
    plain.backward(slope.double())
    torch.testing.assert_close(out.double(), plain, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(projection.grad.double(), wide.grad, atol=tolerance, rtol=tolerance)


def test_values_and_gradients_of_lists_of_every_length():
    agree(*case((5, 40, 1, 0, 33), 1, 24), 0.0, 1e-5)


def test_blocks_need_not_be_square(monkeypatch):
    monkeypatch.setattr("rankgrad.kernels.encoder.attention._BACKWARD", {4: (32, 16, 4, 1)})
    monkeypatch.setattr("rankgrad.kernels.encoder.attention._FORWARD", {4: (16, 32, 4, 1)})
    agree(*case((5, 40), 1, 24), 0.2, 1e-5)


def test_heads_do_not_mix():
    agree(*case((3, 7), 2, 16), 0.0, 1e-5)


def test_dropout_scales_what_it_keeps_and_the_gradient_knows():
    projection, offsets = case((6, 35), 2, 16)
    agree(projection, offsets, 0.25, 1e-5)


def test_dropout_keeps_its_share_and_depends_on_seed_list_and_head():
    projection, offsets = case((30, 30), 2, 32)
    one, two = (kept(projection, offsets, 0.3, torch.tensor([s], dtype=torch.int32, device=DEVICE)) for s in (1, 2))
    masks = [factor > 0 for factor in (one[0][0], one[0][1], one[1][0], two[0][0])]
    for mask in masks:
        assert 0.62 < mask.double().mean() < 0.78
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert 0.48 < (mask == other).double().mean() < 0.68  # independent masks agree in 0.58
    torch.testing.assert_close(one[0].max().item(), 1 / 0.7, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", [Transformer, functools.partial(SharedTransformer, members=3)], ids=["one", "members"])
def test_a_model_with_the_kernel_scores_as_without(kind):
    torch.manual_seed(0)
    model = kind(5, width=8, layers=1, heads=2, feedforward=8, dropout=0.0).to(DEVICE)
    offsets = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=DEVICE)
    features = torch.randn(11, 5).to(DEVICE)
    plain = model.packed(features, PackedLayout(offsets, 7))
    fused = model.packed(features, PackedLayout(offsets, 7, kernel=True))
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


def test_float64_is_computed_in_float64():
    agree(*case((5, 40, 1), 2, 24, torch.float64), 0.0, 1e-12)


@on_the_gpu  # the interpreter computes neither in bfloat16 nor in TF32
@pytest.mark.parametrize(("dtype", "exact", "tolerance"), [(torch.bfloat16, False, 4e-2), (torch.float32, False, 1e-2)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_paper_s_shape_in_lower_precision(dtype, exact, tolerance, dropout):
    torch.manual_seed(0)
    lengths = torch.randint(1, 241, (64,)).tolist()
    agree(*case(lengths, 1, 96, dtype), dropout, tolerance, exact)
