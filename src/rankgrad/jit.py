"""Loops that numba compiles when they are first called: the one door to it.

Compiled code is cached beside the source, in NUMBA_CACHE_DIR, or in the user's cache folder; where none of them can be written,
every process compiles for itself. The cache knows a file by its time and size: what compiled functions call, and the constants they use,
belong into the same file, or a change of them goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

try:
    import numba
except ImportError:  # a version of Python or numpy that numba does not support yet
    numba = None  # type: ignore[assignment]

# If False, `compiled` gives functions back as they are, which is far too slow for most of them.
COMPILED = numba is not None and not getattr(numba.config, "DISABLE_JIT", False)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function compiled by numba with these options; it lets go of the interpreter's lock."""

    def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
        if numba is None:
            return function
        try:
            made = numba.njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # no folder to cache the compiled code in
            return numba.njit(nogil=True, **options)(function)
        save = made._cache.save_overload

        def save_if_it_can(*arguments: Any) -> None:
            with suppress(
                OSError
            ):  # the disk is full, or the folder cannot be written any more: it is compiled all the same
                save(*arguments)

        made._cache.save_overload = save_if_it_can
        return made

    return compile_function
