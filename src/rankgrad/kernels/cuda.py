"""CUDA C++ compiled at run time by NVRTC, which comes with torch: no CUDA toolkit is needed.

Only C functions that NVIDIA documents are called. Compiled code is kept in triton's cache.
"""

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """A function on the current device that can be launched."""

    def __init__(self, name: str, sources: Sequence[Path], definitions: Sequence[str], shared: int = 0) -> None:
        """The function `name` of the sources put together, compiled with -D`definitions`.

        It may be launched with up to `shared` bytes of shared memory beyond those that it declares.
        """
        major, minor = torch.cuda.get_device_capability()
        options = ["-std=c++17", f"--gpu-architecture=sm_{major}{minor}", *(f"-D{d}" for d in definitions)]
        source = "\n".join(path.read_text(encoding="utf-8") for path in sources)
        self._binary = _compiled(source, name, options)  # the module reads from it
        self._function, module = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.mem_get_info()  # makes the device's context this thread's
        _checked(_driver().cuModuleLoadData(ctypes.byref(module), self._binary))
        _checked(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        self._launch = _driver().cuLaunchKernel
        if shared:
            _checked(_driver().cuFuncSetAttribute(self._function, _DYNAMIC_SHARED_MEMORY, shared))

    def __call__(
        self, stream: int, blocks: int, threads: int, shared: int, *arguments: Tensor | int | float | None
    ) -> None:
        """Launch with `shared` bytes a block; whole numbers are passed as int, others as float, None as a null pointer."""
        values = [_value(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        on = ctypes.c_void_p(stream)
        how = self._function, blocks, 1, 1, threads, 1, 1, shared, on, places, None
        code = self._launch(*how)
        if code == _NO_CONTEXT:  # a thread in which nothing of torch has used the device yet
            torch.cuda.mem_get_info()
            code = self._launch(*how)
        _checked(code)


def shared_memory(device: torch.device) -> int:
    """Bytes that a block can ask for."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _value(argument: Tensor | int | float | None) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p()
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)


def _compiled(source: str, name: str, options: list[str]) -> bytes:
    """Machine code."""
    library = _nvrtc()
    version = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(*map(ctypes.byref, version))
    key = hashlib.sha256(repr((source, options, [number.value for number in version])).encode()).hexdigest()
    cache = get_cache_manager(key)
    found = cache.get_file("kernel.cubin")
    if found:
        return Path(found).read_bytes()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _succeeded(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if library.nvrtcCompileProgram(program, len(options), given):
        _succeeded(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _succeeded(library.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC cannot compile {name}: {log.value.decode()}")
    _succeeded(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    binary = ctypes.create_string_buffer(size.value)
    _succeeded(library.nvrtcGetCUBIN(program, binary))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    cache.put(binary.raw, "kernel.cubin", binary=True)
    return binary.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The library of the CUDA version that torch was built with: the one that pip put beside torch, else the loader's."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    package = importlib.util.find_spec("nvidia")
    for place in (package.submodule_search_locations or []) if package else []:
        for path in Path(place).glob(f"*/lib/{name}"):
            for part in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(
                    str(part)
                )  # some releases look for it in the loader's path alone: it is loaded already then
            return ctypes.CDLL(str(path))
    return ctypes.CDLL(name)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _succeeded(code: int) -> None:
    if code:
        raise RuntimeError(f"NVRTC reports error {code}")


def _checked(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA reports error {code}: {(text.value or b'unknown').decode()}")
