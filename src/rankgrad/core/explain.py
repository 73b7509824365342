"""What the parameters of losses, metrics and sorts mean, said once and shown by `help` of each function, in the order of its signature."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

SHARED = {
    "scores": "[..., L], any floating-point dtype; bfloat16 and float16 are computed in float32.",
    "labels": "relevance, [..., L], 0 or above, of any real dtype.",
    "mask": "[..., L] bool, True at real documents; None: all are real. Padding may stand anywhere and hold anything.",
    "k": "rank cut-off; None takes the whole list.",
    "gain": "what a label is worth: 'exp2' for 2^y - 1, 'linear' for y, a list for the grades 0, 1, ..., or a function of the labels.",
    "threshold": "a document is relevant if its label is at least this.",
    "max_label": "the highest grade; labels above it count as this.",
    "reduction": "'mean' over the lists that can be learned from, 'sum', or 'none' for one value per list, [...].",
    "empty": "the value of a list without a relevant document; NaN marks such lists, so that `nanmean` leaves them out.",
    "check": (
        "whether bad values of real documents are refused: None on CPU tensors alone, True everywhere (a GPU has to "
        "wait), False nowhere. Unchecked, such a list comes out as NaN."
    ),
    "backend": "'auto' takes a kernel where there is one for these scores, 'torch' none, 'triton' insists on it.",
}


def explaining(**own: str) -> Callable[[Function], Function]:
    """A decorator that explains every parameter of a function in its docstring, before the examples.

    `own` holds what is not SHARED, or means something else here.

    >>> @explaining(base="of the logarithm.")
    ... def entropy(labels, base=2):
    ...     '''How mixed the labels are.'''
    >>> print(entropy.__doc__)
    How mixed the labels are.
    <BLANKLINE>
    - `labels`: relevance, [..., L], 0 or above, of any real dtype.
    - `base`: of the logarithm.
    """
    known = SHARED | own

    def explained(function: Function) -> Function:
        text = inspect.getdoc(function)
        if text:  # python -OO has none
            bullets = [_bullet(name, known[name]) for name in inspect.signature(function).parameters]
            words, arrow, examples = text.partition(">>>")
            function.__doc__ = "\n".join([words.rstrip(), "", *bullets, *(["", arrow + examples] if arrow else [])])
        return function

    return explained


def _bullet(name: str, meaning: str) -> str:
    return textwrap.fill(f"- `{name}`: {meaning}", 118, subsequent_indent="  ", break_long_words=False)
