"""Into packed lists and out of them, a launch each: rows of a table, and scores to padded lists with their labels.

Twins of what `rankgrad.training.step.packed_scores` does with torch. Rows beyond the lists are padding: zeros, and never read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ENTRIES, _ROWS, _PLACES = 4096, 128, 128  # of a program, at most


@triton.jit
def _gather(table, rows, slots, out, T, W, limit, R: tl.constexpr, N: tl.constexpr):
    place, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, N)
    real = (place < T) & (tl.load(slots + place, mask=place < T, other=limit) < limit)
    row = tl.load(rows + place, mask=real, other=0)
    inside = (column < W)[None, :]
    x = tl.load(table + row.to(tl.int64)[:, None] * W + column[None, :], mask=real[:, None] & inside, other=0.0)
    at = out + place.to(tl.int64)[:, None] * W + column[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=(place < T)[:, None] & inside)


@triton.jit
def _spread(scores, labels, rows, offsets, out, out_labels, mask, L, U, N: tl.constexpr):
    """A list: its scores [T, U], its labels by `rows`, and which places of [L] have a document."""
    b, j = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    begin = tl.load(offsets + b)
    real = j < tl.load(offsets + b + 1) - begin
    place = b.to(tl.int64) * L + j
    row = tl.load(rows + begin + j, mask=real, other=0)
    tl.store(out_labels + place, tl.load(labels + row, mask=real, other=0), mask=j < L)
    tl.store(mask + place, real.to(tl.int8), mask=j < L)
    for unit in range(U):
        score = tl.load(scores + (begin + j).to(tl.int64) * U + unit, mask=real, other=0.0)
        tl.store(out + place * U + unit, score, mask=j < L)


def gather(table: Tensor, rows: Tensor, slots: Tensor, limit: int, dtype: torch.dtype) -> Tensor:
    """table[rows] [T, W] in a dtype, zeros where slots [T] are not below `limit`; has no gradient."""
    (count,), width = rows.shape, table.shape[1]
    out = table.new_empty(count, width, dtype=dtype)
    columns = triton.next_power_of_2(width)
    meta = {"R": min(_ROWS, max(1, _ENTRIES // columns)), "N": columns}
    with torch.cuda.device_of(table):
        _gather[(triton.cdiv(count, meta["R"]),)](table, rows, slots, out, count, width, limit, **meta)
    return out


def spread(
    scores: Tensor, labels: Tensor, rows: Tensor, slots: Tensor, offsets: Tensor, lists: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [T, ...] of packed lists as padded lists [B, width, ...], zeros under the padding; labels[rows] likewise; and the mask."""
    return _Spread.apply(scores, labels, rows, slots, offsets, lists, width)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, rows: Tensor, slots: Tensor, offsets: Tensor, lists: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = scores.contiguous()
        out = scores.new_empty(lists, width, *scores.shape[1:])
        out_labels, mask = labels.new_empty(lists, width), labels.new_empty(lists, width, dtype=torch.bool)
        units = scores.shape[1:].numel()
        with torch.cuda.device_of(scores):
            _spread[(lists, triton.cdiv(width, _PLACES))](
                scores, labels, rows, offsets, out, out_labels, mask.view(torch.int8), width, units, N=_PLACES
            )
        ctx.save_for_backward(slots)
        ctx.mark_non_differentiable(out_labels, mask)
        return out, out_labels, mask

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        flat = grad.flatten(0, 1)
        flat = flat[:, None] if flat.dim() == 1 else flat
        into = gather(flat.contiguous(), slots, slots, len(flat), grad.dtype)
        return into.view(-1, *grad.shape[2:]), None, None, None, None, None, None
