"""How fast a LETOR file is read: rankgrad against XGBoost's and scikit-learn's readers.

    python benchmarks/loading.py            the file of the README: 162,626 rows x 136 features, 200 MB
    python benchmarks/loading.py --rows 40000 --repeat 3

Every reader runs in a fresh process on the same file, which is in the page cache. Loading is not timed (rankgrad's
compiled code, half a second, with a first small file; XGBoost's library on import), and the compiled code has been cached
by a run before. scikit-learn runs once: it takes too long for more. Repeats take turns; the fastest counts, and only the
ratios are worth quoting: the times belong to the machine and its other users. Memory is the growth of the
process's peak over what it was before reading.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

FEATURES = 136
READERS = {
    "rankgrad": """
import tempfile
from rankgrad.data import read_svmlight
with tempfile.NamedTemporaryFile() as small:  # loads the compiled code
    small.write(b"0 qid:1 1:1\\n")
    small.flush()
    read_svmlight(small.name)
def read(path):
    return read_svmlight(path).features.shape
""",
    "xgboost": """
import warnings
import xgboost
warnings.simplefilter("ignore")  # it announces that text input will go
def read(path):
    matrix = xgboost.DMatrix(f"{path}?format=libsvm")
    return matrix.num_row(), matrix.num_col() - 1  # it counts from a feature 0
""",
    "scikit-learn": """
from sklearn.datasets import load_svmlight_file
def read(path):
    return load_svmlight_file(path, query_id=True)[0].shape
""",
}
TIMED = """
import json, resource, sys, time
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
start = time.perf_counter()
shape = read(sys.argv[1])
print(json.dumps({"seconds": time.perf_counter() - start, "mib": peak() - before, "shape": shape}))
"""


def write_file(path: Path, rows: int) -> None:
    """Web30K in the look of its columns: counts, lengths, ratios and scores with 6 significant digits."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        query = 1
        written = 0
        while written < rows:
            length = min(rows - written, int(rng.lognormal(4.6, 0.6)) + 1)
            kinds = np.arange(FEATURES) % 5
            values = rng.lognormal(0, 2, (length, FEATURES))
            values[:, kinds == 0] = np.floor(values[:, kinds == 0])
            values[:, kinds == 1] = np.minimum(values[:, kinds == 1], 1)
            values[:, kinds == 2] *= -1
            values[:, kinds == 3] *= 50
            for row in values:
                entries = " ".join(f"{index}:{value:.6g}" for index, value in enumerate(row.tolist(), 1))
                file.write(f"{rng.integers(5)} qid:{query} {entries} \n")
            written += length
            query += 15


def run(reader: str, path: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")}
    command = [sys.executable, "-c", READERS[reader] + TIMED, str(path)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Time readers of LETOR text side by side.")
    parser.add_argument("--rows", type=int, default=162_626)
    parser.add_argument("--repeat", type=int, default=5, help="of rankgrad and XGBoost; scikit-learn runs once")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "web30k-like.txt"
        write_file(path, arguments.rows)
        megabytes = path.stat().st_size / 1e6
        print(f"{arguments.rows:,} rows x {FEATURES} features, {megabytes:.0f} MB, {os.cpu_count()} cores")
        run("rankgrad", path)  # compiles where no compiled code is cached yet
        results = {"scikit-learn": [run("scikit-learn", path)], "xgboost": [], "rankgrad": []}
        for _ in range(arguments.repeat):
            for reader in ("xgboost", "rankgrad"):
                results[reader].append(run(reader, path))
    best = {reader: min(runs, key=lambda run: run["seconds"]) for reader, runs in results.items()}
    shapes = {reader: tuple(found["shape"]) for reader, found in best.items()}
    assert set(shapes.values()) == {(arguments.rows, FEATURES)}, shapes
    dense = arguments.rows * FEATURES * 4 / 2**20
    print(
        f"{'reader':14}{'seconds':>9}{'MB/s':>8}{'rankgrad is':>16}{'memory MiB':>12}   (dense result {dense:.0f} MiB)"
    )
    for reader, found in best.items():
        ratio = found["seconds"] / best["rankgrad"]["seconds"]
        speed = megabytes / found["seconds"]
        print(f"{reader:14}{found['seconds']:9.2f}{speed:8.0f}{f'{ratio:.1f} x faster':>16}{found['mib']:12.0f}")


if __name__ == "__main__":
    main()
