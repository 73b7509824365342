"""What the kernels of short lists leave for each other: one tensor of float32 words, cut by offsets inside the kernels.

Counters come first, then a record for each list: eight words about it, the prefix sums of its logits, the buffer through which
its two programs exchange sums (later the sums over blocks of rows), its order and gains, and the vectors u, v, w, x of each round.
"""

import triton
import triton.language as tl

HEAD = tl.constexpr(4)  # words before the first record: how many programs have started, how many lists are done
COUNT = tl.constexpr(0)  # words of a record: real documents,
ROUNDS = tl.constexpr(1)  # rounds until the list stopped,
BLOCKS_DONE = tl.constexpr(2)  # blocks of rows that are done,
VALUE_SCALE = tl.constexpr(3)  # these three as in `summary.store_scales`,
GRAD_SCALE = tl.constexpr(4)
WEIGHT = tl.constexpr(5)
VALUE = tl.constexpr(6)  # its value, a part from each program


def words(lists: int, length: int, iters: int, width: int) -> int:
    """The size of the workspace of `lists` lists padded to `length`, `width` the power of two above."""
    return 4 + lists * (12 + 4 * width + max(8 * length, 4 * width) + (2 + 4 * iters) * length)


@triton.jit
def record_of(work, b, L, iters, N: tl.constexpr):
    """The record of list b."""
    return work + HEAD + b.to(tl.int64) * (12 + 4 * N + tl.maximum(8 * L, 4 * N) + (2 + 4 * iters) * L)


@triton.jit
def integers(pointer):
    """Words read as int32."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def prefix_of(record):
    """A and W of `rankgrad.kernels.neural_ndcg.short.launch`, [2, N + 1] float64."""
    return (record + 8).to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def exchange_of(record, N: tl.constexpr):
    """[2, 2, L] int64, by parity of the exchange and by sender; used before for keys [2, N], after for sums [4 blocks, 2, L] float32."""
    return record + (12 + 4 * N)


@triton.jit
def order_of(record, L, N: tl.constexpr):
    """At each rank the document, and the first and the last rank of the same score: eight bits each of a word, [L]."""
    return integers(record + (12 + 4 * N) + tl.maximum(8 * L, 4 * N))


@triton.jit
def gain_of(record, L, N: tl.constexpr):
    """Gains by rank, divided by the ideal DCG, [L]."""
    return record + (12 + 4 * N) + tl.maximum(8 * L, 4 * N) + L


@triton.jit
def vectors_of(record, L, iters, N: tl.constexpr):
    """u_1.., v_1.., w_1.., x_1.., [iters, L] each; u_0 is one everywhere and not kept."""
    u = gain_of(record, L, N) + L
    v = u + iters * L
    w = v + iters * L
    return u, v, w, w + iters * L
