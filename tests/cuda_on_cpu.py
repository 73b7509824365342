"""CUDA kernels for tests without a GPU: compiled by g++ with `cuda_on_cpu.cpp` before them."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from rankgrad.kernels import cuda

COMPILER = shutil.which("g++")
DYNAMIC = "extern __shared__ __align__(16) char memory[];"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-shared", "-fPIC"]


@functools.cache
def folder():
    """Where kernels are compiled; removed when the tests end."""
    return tempfile.TemporaryDirectory()


class Kernel:
    """`rankgrad.kernels.cuda.Kernel`, with a cluster of `cluster` blocks; every launch draws another order of threads."""

    def __init__(self, name, sources, definitions, cluster=1):
        lines = [f"#define {definition.replace('=', ' ')}" for definition in (*definitions, f"CLUSTER={cluster}")]
        lines.append(Path(__file__).with_suffix(".cpp").read_text())
        memory = "char *memory = reinterpret_cast<char *>(current->home->memory.data());"
        lines += [source.read_text().replace(DYNAMIC, memory) for source in sources if source.name != "ptx.cu"]
        lines.append(f"static void call_kernel() {{ call({name}, given); }}")
        path = Path(folder().name, "_".join([name, *definitions]).replace("=", ""))
        path.with_suffix(".cpp").write_text("\n".join(lines))
        made, written = path.with_suffix(".so"), path.with_suffix(".cpp")
        subprocess.run([COMPILER, *FLAGS, "-o", str(made), str(written)], check=True)
        self.launch, self.seed = ctypes.CDLL(str(made)).launch, 0

    def __call__(self, stream, blocks, threads, shared, *arguments):
        values = [cuda._value(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self.seed += 1
        assert self.launch(blocks, threads, shared, places, self.seed) == 0, "threads wait for each other without end"
