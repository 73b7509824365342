"""What the kernels of short lists leave for each other: one tensor of float32 words, cut by offsets inside the kernels.

Two words of tickets come first, then a page for each list: eight words about it, the prefix sums of its logits, the mail of
its two programs (later the sums over blocks of rows), its order and gains, and the vectors u, v, w, x of each round.
"""

import triton
import triton.language as tl

HEAD = tl.constexpr(4)  # words before the first page: programs that started, lists that are done
COUNT = tl.constexpr(0)  # words of a page: real documents,
DONE = tl.constexpr(1)  # rounds until the list stopped,
ENDED = tl.constexpr(2)  # blocks of rows that are done,
VALUE_SCALE = tl.constexpr(3)  # 1 where a list teaches, 0 where not, NaN where it is unsound,
GRAD_SCALE = tl.constexpr(4)  # the same, but 0 where an unsound list does not teach,
WEIGHS = tl.constexpr(5)  # 1 where a list counts in the mean,
VALUE = tl.constexpr(6)  # its value, a part from each program


def words(lists: int, length: int, iters: int, width: int) -> int:
    """The size of the workspace of `lists` lists padded to `length`, `width` the power of two above."""
    return 4 + lists * (12 + 4 * width + max(8 * length, 4 * width) + (2 + 4 * iters) * length)


@triton.jit
def page(work, b, L, iters, N: tl.constexpr):
    """The page of list b."""
    return work + HEAD + b.to(tl.int64) * (12 + 4 * N + tl.maximum(8 * L, 4 * N) + (2 + 4 * iters) * L)


@triton.jit
def whole(pointer):
    """Words read as int32."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def prefix_of(page):
    """A and W of `rankgrad.kernels.neural_ndcg.short.launch`, [2, N + 1] float64."""
    return (page + 8).to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def mail_of(page, N: tl.constexpr):
    """[2, 2, L] int64, by parity of the exchange and sender; before it keys [2, N], after it sums [4 blocks, 2, L] float32."""
    return page + (12 + 4 * N)


@triton.jit
def order_of(page, L, N: tl.constexpr):
    """At each rank the document, and the first and the last rank of the same score: eight bits each of a word, [L]."""
    return whole(page + (12 + 4 * N) + tl.maximum(8 * L, 4 * N))


@triton.jit
def gain_of(page, L, N: tl.constexpr):
    """Gains by rank, divided by the ideal DCG, [L]."""
    return page + (12 + 4 * N) + tl.maximum(8 * L, 4 * N) + L


@triton.jit
def vectors_of(page, L, iters, N: tl.constexpr):
    """u_1.., v_1.., w_1.., x_1.., [iters, L] each; u_0 is one everywhere and not kept."""
    u = gain_of(page, L, N) + L
    v = u + iters * L
    w = v + iters * L
    return u, v, w, w + iters * L
