"""Data larger than the memory a process may use: prepare, one epoch, evaluate, rank; the peak of each.

    python benchmarks/larger_than_memory.py --memory 1024 --folder /somewhere/with/space

Every command runs in a process that may take --memory MiB (RLIMIT_DATA, which counts what it allocates but not the files it
maps), on tables whose features take --times as much. Printed are the peak of its anonymous memory (RssAnon, sampled every 10
ms), CPU seconds, and the same for text where --text asks for it. Needs Linux, pyarrow, and disk space of about four times the
features.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

MIB = 2**20
LENGTH = 100  # documents of a list
SHARES = {"train": 0.75, "vali": 0.125, "test": 0.125}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, default=1024, help="MiB that a process may use")
    parser.add_argument("--times", type=float, default=4.0, help="how many times as much the features take")
    parser.add_argument("--columns", type=int, default=136)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/larger-than-memory"), help="a new folder, removed at the end"
    )
    parser.add_argument("--text", action="store_true", help="LETOR text instead of Parquet: slow to make")
    parser.add_argument("--csv", action="store_true", help="CSV instead of Parquet")
    parser.add_argument("--scattered", action="store_true", help="the rows of a query are not together")
    parser.add_argument("--train", default="--model linear", help="options of train, beside one epoch")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    try:
        size = options.memory * MIB * options.times
        kind = "txt" if options.text else "csv" if options.csv else "parquet"
        for split, share in SHARES.items():
            documents = int(size * share / 4 / options.columns)
            write(options.folder / f"{split}.{kind}", documents, options.columns, scattered=options.scattered)
        print(f"{size / MIB:,.0f} MiB of features in {kind}, {options.memory:,} MiB for each process")
        print(f"{'command':<10}{'peak MiB':>10}{'share':>8}{'CPU s':>8}{'s':>8}")
        folder = options.folder
        commands = {
            "prepare": ["prepare", folder, "--quiet"],
            "train": ["train", folder / "prepared", "--epochs", "1", "--out", folder / "run", *options.train.split()],
            "evaluate": ["evaluate", folder / "run", folder / "prepared"],
            "rank": ["rank", folder / "run", folder / "prepared", "--format", "trec", "--out", folder / "ranking"],
        }
        for name, command in commands.items():
            peak, cpu, seconds = limited([*map(str, command)], options.memory)
            print(f"{name:<10}{peak:>10,.0f}{peak / (size / MIB):>8.0%}{cpu:>8.1f}{seconds:>8.1f}", flush=True)
    finally:
        shutil.rmtree(options.folder)


def write(path: Path, documents: int, columns: int, *, scattered: bool) -> None:
    """Made-up lists, some thousand rows at a time."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    rng, at_once = (
        np.random.default_rng(0),
        1000 * LENGTH,
    )  # a row group: many small ones make a large table of contents
    weights = rng.normal(size=columns)
    writer = None
    with path.open("wb") as file:
        for first in range(0, documents, at_once):
            rows = np.arange(first, min(first + at_once, documents))
            features = rng.lognormal(size=(len(rows), columns)).astype(np.float32)
            label = np.digitize(np.log(features) @ weights, np.sqrt(columns) * np.array([0.5, 1, 1.5, 2]))
            query = rng.integers(0, 1 + documents // LENGTH, len(rows)) if scattered else rows // LENGTH
            if path.suffix == ".txt":
                for y, q, x in zip(label, query, features.tolist()):
                    file.write(f"{y} qid:{q} {' '.join(f'{n}:{v:.6g}' for n, v in enumerate(x, 1))}\n".encode())
                continue
            named = {f"f{n}": np.ascontiguousarray(features[:, n]) for n in range(columns)}
            table = pyarrow.table({"label": label, "qid": query, **named})
            if writer is None:
                kind = pyarrow.csv.CSVWriter if path.suffix == ".csv" else pyarrow.parquet.ParquetWriter
                writer = kind(file, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()


def limited(command: list[str], memory: int) -> tuple[float, float, float]:
    """Run rankgrad in a process that may take `memory` MiB: its peak in MiB, CPU seconds, seconds."""
    limit = memory * MIB
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "rankgrad", *command],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.01)
    error = process.stderr.read() if process.stderr else ""
    if process.returncode:
        raise SystemExit(f"rankgrad {' '.join(command)} ended with {process.returncode}: {error}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return peak / MIB, cpu, time.perf_counter() - started


def anonymous(process: int) -> int:
    """Bytes of memory that are no file's."""
    try:
        with open(f"/proc/{process}/status") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon")), 0)
    except OSError:
        return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
