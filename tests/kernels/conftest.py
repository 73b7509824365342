"""Triton's interpreter, which runs the kernels where there is no GPU, without the work it repeats: about half of its time."""

import functools
import os

import pytest

pytest.register_assert_rewrite("kernel_cases")


def hasten(interpreter, language):
    """Look up numpy's dtypes once, and replace the language's functions once a launch instead of at every call of a function."""
    look_up, replace_functions, found = interpreter._get_np_dtype, interpreter._patch_lang, {}

    def dtype_of(kind):
        name = kind.scalar.name  # of a block its entries': what the answer depends on
        if name not in found:
            found[name] = look_up(kind)
        return found[name]

    @functools.cache
    def seen_by(function):
        modules = (language, language.core)
        return [module for module in modules if any(value is module for value in function.__globals__.values())]

    def replace_functions_once(function):
        if any(language.core.is_builtin(module.load) for module in seen_by(function)):
            return replace_functions(function)
        return interpreter._LangPatchScope()  # nothing to restore: all of it is the launch's

    interpreter._get_np_dtype, interpreter._patch_lang = dtype_of, replace_functions_once


if os.environ.get("TRITON_INTERPRET") == "1":  # set by the conftest.py at the top
    import triton.language
    from triton.runtime import interpreter

    if all(
        hasattr(interpreter, name) for name in ("_get_np_dtype", "_patch_lang", "_LangPatchScope")
    ):  # not all versions
        hasten(interpreter, triton.language)
