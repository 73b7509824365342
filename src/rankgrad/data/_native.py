"""Machine code of the compiled reader, made once by numba and kept: later processes load it without numba.

numba takes half a second to wake up in every process, more than a file of 100 MB takes to be read; llvmlite, which it
stands on, loads the finished code in milliseconds. The code lies in the first of these folders that can be written:
NUMBA_CACHE_DIR where that is set, the `__pycache__` of this package, `rankgrad` in the user's cache; under a name
made of the source and the processor. Only this module touches them. A code that cannot be kept or loaded is made again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_SOURCES = "_compiled.py", "_state.py", "values.py"  # all that the code depends on, with the processor
_SIZE, _AT = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: Mapping[str, Any] = {
    "read_lines": ctypes.CFUNCTYPE(_SIZE, _AT, *[_SIZE] * 4, *[_AT] * 7),
    "scatter": ctypes.CFUNCTYPE(None, _AT, _AT, _AT, _SIZE, _AT, _SIZE, ctypes.c_float),
    "permute_rows": ctypes.CFUNCTYPE(None, _AT, _SIZE, _SIZE, _AT, _AT, _AT),
}
_alive: list[Any] = []  # what owns the memory that loaded code lies in


@functools.cache
def native() -> Mapping[str, Any] | None:
    """The functions of `_compiled.ENTRY_POINTS` by name, callable with addresses; None where there is no compiler.

    While they run, the interpreter's lock is released.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return None
    try:
        import llvmlite.binding as llvm
    except ImportError:  # a Python that numba does not know yet
        return None
    name = _name(llvm)
    for folder in _folders():
        with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):
            return _load(llvm, (folder / name).read_bytes())
    return _make(llvm, name)


def address(array: np.ndarray) -> int:
    """Where the elements of a contiguous array lie."""
    return array.__array_interface__["data"][0]


def _name(llvm: Any) -> str:
    text = [Path(__file__).with_name(source).read_bytes() for source in _SOURCES]
    machine = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    key = hashlib.sha256(b"\0".join([*text, *(part.encode() for part in machine)])).hexdigest()
    return f"rankgrad-{key[:24]}.code"


def _folders() -> list[Path]:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return [Path(chosen)]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return [Path(__file__).parent / "__pycache__", home / "rankgrad"]


def _make(llvm: Any, name: str) -> Mapping[str, Any] | None:
    """Compile the functions, which takes seconds, and keep their code where a folder can be written."""
    try:
        from rankgrad.data._compiled import ENTRY_POINTS as entries  # noqa: N811
    except ImportError:
        return None
    with contextlib.suppress(OSError, RuntimeError):
        code = _emit(llvm, entries)
        for folder in _folders():
            with contextlib.suppress(OSError):
                _write(folder, name, code)
                break
    return {name: signature(entries[name].address) for name, signature in _SIGNATURES.items()}


def _emit(llvm: Any, entries: Mapping[str, Any]) -> bytes:
    """A line of JSON (the functions' symbols, symbols that only numba has, a checksum) and an object file."""
    _initialize(llvm)
    module = llvm.parse_assembly("")
    for entry in entries.values():
        module.link_in(llvm.parse_assembly(entry.inspect_llvm()))
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
    outside = [f.name for f in module.functions if f.is_declaration and f.name.startswith(("numba_", "NRT_"))]
    code = target.emit_object(module)
    head = {
        "symbols": {name: entry.native_name for name, entry in entries.items()},
        "outside": outside,
        "sha256": hashlib.sha256(code).hexdigest(),
    }
    return json.dumps(head).encode() + b"\n" + code


def _write(folder: Path, name: str, code: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    handle, building = tempfile.mkstemp(dir=folder)
    try:
        with open(handle, "wb") as file:
            file.write(code)
        os.replace(building, folder / name)
    except OSError:
        os.unlink(building)
        raise


def _load(llvm: Any, kept: bytes) -> Mapping[str, Any]:
    line, _, code = kept.partition(b"\n")
    head = json.loads(line)
    if hashlib.sha256(code).hexdigest() != head["sha256"]:
        raise ValueError("the code is damaged")
    _initialize(llvm)
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    # What numba calls where a function raises; ours cannot, so that anything may stand there.
    nothing = ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value
    for symbol in head["outside"]:
        builder.import_symbol(symbol, nothing)
    for symbol in head["symbols"].values():
        builder.export_symbol(symbol)
    compiler = llvm.create_lljit_compiler()
    library = builder.link(compiler, "rankgrad")
    _alive.extend((compiler, library))
    return {name: signature(library[head["symbols"][name]]) for name, signature in _SIGNATURES.items()}


def _initialize(llvm: Any) -> None:
    with contextlib.suppress(RuntimeError):  # newer releases need it no more and say so
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
