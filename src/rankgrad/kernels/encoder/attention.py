"""Attention within packed lists: every document attends to those of its own list, and there is no padding.

For list b = rows offsets[b] to offsets[b + 1] of one packed projection [T, 3, H, D] (queries, keys, values),

    out_i = sum_j keep_ij / (1 - dropout) P_ij v_j,   P = softmax_j(q_i k_j / sqrt(D)),   i, j in list b

block by block as in FlashAttention 2 (arXiv 2307.08691): nothing of size length x length is kept. Sums are in float32,
or in float64 for a float64 projection. Which weights dropout keeps is a hash of (seed, head, row, column), computed again in the
backward pass. One launch forward, one backward.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# rows and columns of a block, warps, stages; by the bytes of a number (benchmarks/LOG.md has others)
_FORWARD = {2: (64, 64, 4, 1), 4: (32, 32, 4, 2), 8: (16, 16, 4, 1)}
_BACKWARD = {2: (64, 32, 4, 1), 4: (32, 32, 4, 2), 8: (16, 16, 4, 1)}


@triton.jit
def _keep(seed, head, i, j, threshold):
    """A hash of the position of a weight, [I, J]: True with probability 1 - threshold / 2^31."""
    x = (i.to(tl.uint32) * 0x9E3779B1)[:, None] ^ (j.to(tl.uint32) * 0x85EBCA77)[None, :]
    word = (seed + head * 0x9E37).to(tl.uint32)
    x = x ^ word
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ (word * 0xC2B2AE3D)  # twice, so that the masks of two seeds are not permutations of each other
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 1).to(tl.int32) >= threshold


@triton.jit
def _rows(qkv, part, head, row, real, H, D, N: tl.constexpr):
    """Rows of queries (part 0), keys (1) or values (2), [R, N], zero where there is none."""
    d = tl.arange(0, N)
    at = qkv + row.to(tl.int64)[:, None] * (3 * H * D) + (part * H + head) * D + d[None, :]
    return tl.load(at, mask=real[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _flat_rows(flat, head, row, real, H, D, N: tl.constexpr):
    """Rows of [T, H, D], zero where there is none."""
    d = tl.arange(0, N)
    at = flat + row.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    return tl.load(at, mask=real[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _forward(
    qkv, offsets, seeds, out, logs, T, threshold, rescale,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, SCALE: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    b, block, head = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    begin = tl.load(offsets + b)
    count = tl.load(offsets + b + 1) - begin
    scale = tl.full([], SCALE, WIDE)
    if block * BI < count:
        i = block * BI + tl.arange(0, BI)
        real_i = i < count
        q = _rows(qkv, 0, head, begin + i, real_i, H, D, N)
        seed = tl.load(seeds) + begin
        top = tl.zeros([BI], dtype=WIDE) - float("inf")
        total = tl.zeros([BI], dtype=WIDE)
        acc = tl.zeros([BI, N], dtype=WIDE)
        for start in range(0, count, BJ):
            j = start + tl.arange(0, BJ)
            real_j = j < count
            k = _rows(qkv, 1, head, begin + j, real_j, H, D, N)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            s = tl.where(real_j[None, :], s, -float("inf"))
            higher = tl.maximum(top, tl.max(s, axis=1))
            shrink = tl.exp2(top - higher)
            p = tl.exp2(s - higher[:, None])
            total = total * shrink + tl.sum(p, axis=1)
            if DROPOUT:
                p = tl.where(_keep(seed, head, i, j, threshold), p, 0.0)
            v = _rows(qkv, 2, head, begin + j, real_j, H, D, N)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = higher
        acc = acc * (rescale / total)[:, None]
        d = tl.arange(0, N)
        at = (begin + i).to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=real_i[:, None] & (d < D)[None, :])
        tl.store(logs + head * T + begin + i, top + tl.log2(total), mask=real_i)


@triton.jit(do_not_specialize=["blocks"])
def _backward(
    qkv, offsets, seeds, out, logs, grad, into, T, threshold, rescale, blocks,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, SCALE: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The first `blocks` programs of a list and head give d/dq of a block of rows, the others d/dk and d/dv."""
    b, block, head = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    begin = tl.load(offsets + b)
    count = tl.load(offsets + b + 1) - begin
    scale = tl.full([], SCALE, WIDE)
    seed = tl.load(seeds) + begin
    d = tl.arange(0, N)
    if block < blocks:
        if block * BI < count:
            i = block * BI + tl.arange(0, BI)
            real_i = i < count
            q = _rows(qkv, 0, head, begin + i, real_i, H, D, N)
            g = _flat_rows(grad, head, begin + i, real_i, H, D, N)
            o = _flat_rows(out, head, begin + i, real_i, H, D, N)
            log = tl.load(logs + head * T + begin + i, mask=real_i, other=0.0)
            mean = tl.sum(o.to(WIDE) * g.to(WIDE), axis=1)
            dq = tl.zeros([BI, N], dtype=WIDE)
            for start in range(0, count, BJ):
                j = start + tl.arange(0, BJ)
                real_j = j < count
                k = _rows(qkv, 1, head, begin + j, real_j, H, D, N)
                v = _rows(qkv, 2, head, begin + j, real_j, H, D, N)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
                p = tl.where(real_j[None, :], tl.exp2(s - log[:, None]), 0.0)
                dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
                if DROPOUT:
                    dp = tl.where(_keep(seed, head, i, j, threshold), dp * rescale, 0.0)
                ds = (p * (dp - mean[:, None])).to(q.dtype)
                dq += tl.dot(ds, k, input_precision=PRECISION)
            dq = dq * (scale * 0.6931471805599453)
            at = (begin + i).to(tl.int64)[:, None] * (3 * H * D) + head * D + d[None, :]
            tl.store(into + at, dq.to(into.dtype.element_ty), mask=real_i[:, None] & (d < D)[None, :])
    else:
        first = (block - blocks) * BI
        if first < count:
            j = first + tl.arange(0, BI)
            real_j = j < count
            k = _rows(qkv, 1, head, begin + j, real_j, H, D, N)
            v = _rows(qkv, 2, head, begin + j, real_j, H, D, N)
            dk = tl.zeros([BI, N], dtype=WIDE)
            dv = tl.zeros([BI, N], dtype=WIDE)
            for start in range(0, count, BJ):
                i = start + tl.arange(0, BJ)
                real_i = i < count
                q = _rows(qkv, 0, head, begin + i, real_i, H, D, N)
                g = _flat_rows(grad, head, begin + i, real_i, H, D, N)
                o = _flat_rows(out, head, begin + i, real_i, H, D, N)
                log = tl.load(logs + head * T + begin + i, mask=real_i, other=0.0)
                mean = tl.sum(o.to(WIDE) * g.to(WIDE), axis=1)
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale  # [J, I]: threads keep their keys
                p = tl.where(real_i[None, :], tl.exp2(s - log[None, :]), 0.0)
                dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
                kept = p
                if DROPOUT:
                    keep = tl.trans(_keep(seed, head, i, j, threshold))
                    kept = tl.where(keep, p * rescale, 0.0)
                    dp = tl.where(keep, dp * rescale, 0.0)
                dv += tl.dot(kept.to(g.dtype), g, input_precision=PRECISION)
                ds = (p * (dp - mean[None, :])).to(q.dtype)
                dk += tl.dot(ds, q, input_precision=PRECISION)
            dk = dk * (scale * 0.6931471805599453)
            at = (begin + j).to(tl.int64)[:, None] * (3 * H * D) + head * D + d[None, :]
            here = real_j[:, None] & (d < D)[None, :]
            tl.store(into + at + H * D, dk.to(into.dtype.element_ty), mask=here)
            tl.store(into + at + 2 * H * D, dv.to(into.dtype.element_ty), mask=here)


def list_attention(qkv: Tensor, offsets: Tensor, longest: int, dropout: float, seed: Tensor, exact: bool) -> Tensor:
    """Attention [T, H, D] of a packed projection [T, 3, H, D].

    offsets [B + 1] int32 cut all T rows into lists of up to `longest`; seed is one int32 on the device; exact asks for
    float32 products where the projection is float32, else they are in TF32.
    """
    return _ListAttention.apply(qkv, offsets, longest, dropout, seed, exact)


class _ListAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, offsets: Tensor, longest: int, dropout: float, seed: Tensor, exact: bool
    ) -> Tensor:
        rows, _, heads, width = qkv.shape
        qkv, meta = qkv.contiguous(), _meta(qkv, dropout, exact, _FORWARD)
        out = qkv.new_empty(rows, heads, width)
        logs = qkv.new_empty(heads, rows, dtype=torch.promote_types(qkv.dtype, torch.float32))
        with torch.cuda.device_of(qkv):
            _forward[(triton.cdiv(longest, meta["BI"]), len(offsets) - 1, heads)](
                qkv, offsets, seed, out, logs, rows, *_rule(dropout), **meta
            )
        ctx.save_for_backward(qkv, offsets, seed, out, logs)
        ctx.how = longest, dropout, exact
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, offsets, seed, out, logs = ctx.saved_tensors
        longest, dropout, exact = ctx.how
        rows, _, heads, _ = qkv.shape
        into, meta = torch.empty_like(qkv), _meta(qkv, dropout, exact, _BACKWARD)
        blocks = triton.cdiv(longest, meta["BI"])
        with torch.cuda.device_of(qkv):
            _backward[(2 * blocks, len(offsets) - 1, heads)](
                qkv, offsets, seed, out, logs, grad.contiguous(), into, rows, *_rule(dropout), blocks, **meta
            )
        return into, None, None, None, None, None


def _rule(dropout: float) -> tuple[int, float]:
    """The threshold of the hash, and the factor of what is kept."""
    return int(dropout * 2**31), 1 / (1 - dropout)


def _meta(qkv: Tensor, dropout: float, exact: bool, table: dict[int, tuple[int, int, int, int]]) -> dict[str, Any]:
    """The kernels' constants."""
    rows, columns, warps, stages = table[qkv.element_size()]
    return {
        "H": qkv.shape[-2],
        "D": qkv.shape[-1],
        "N": max(16, triton.next_power_of_2(qkv.shape[-1])),
        "BI": rows,
        "BJ": columns,
        "SCALE": math.log2(math.e) / math.sqrt(qkv.shape[-1]),
        "DROPOUT": dropout > 0,
        "PRECISION": "ieee" if exact else "tf32",
        "WIDE": tl.float64 if qkv.dtype == torch.float64 else tl.float32,
        "num_warps": warps,
        "num_stages": stages,
    }
