"""Data four times larger than the memory a process may take beside its libraries: prepare, one epoch, evaluate, rank."""

import json
import sys

import numpy as np
import pytest

import children

MEMORY = 96 << 20  # bytes that the process may take
COLUMNS, LENGTH = 128, 64
SHARES = {"train": 0.7, "vali": 0.15, "test": 0.15}


def write(folder, size):
    """Parquet files of features that take `size` bytes together; the rows of a query are scattered in test."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    rng = np.random.default_rng(0)
    block = rng.normal(size=(4096, COLUMNS)).astype(np.float32)
    for split, share in SHARES.items():
        documents = int(size * share) // (4 * COLUMNS)
        query = np.arange(documents) // LENGTH
        query = rng.permutation(query) if split == "test" else query
        writer = None
        for first in range(0, documents, len(block)):
            rows = slice(first, min(first + len(block), documents))
            features = np.roll(block, first // len(block), axis=1)[: rows.stop - first]
            columns = {"qid": query[rows], "label": (features[:, 0] > 0.5).astype(np.int8)}
            columns |= {f"f{n}": np.ascontiguousarray(features[:, n]) for n in range(COLUMNS)}
            table = pyarrow.table(columns)
            writer = writer or pyarrow.parquet.ParquetWriter(
                folder / f"{split}.parquet", table.schema, compression="none", use_dictionary=False
            )
            writer.write_table(table)
        writer.close()


def status(name):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(name))


def command(name, folder):
    train = "--epochs", "1", "--model", "linear", "--batch-size", "16", "--set", "data.scaling=standard", "--quiet"
    run, prepared = folder / "run", folder / "prepared"
    words = {
        "prepare": (folder, "--quiet"),
        "train": (prepared, *train, "--out", run),
        "evaluate": (run, prepared, "--json"),
        "rank": (run, prepared, "--format", "trec", "--out", folder / "ranking"),
    }
    return [name, *map(str, words[name])]


def limited(name, small, large, facts):
    """A command on small lists, so that everything is loaded and started, then on large ones in little memory."""
    import ctypes
    import gc
    import resource
    import threading
    import time

    import pyarrow

    from rankgrad.cli import app

    app(args=command(name, small), standalone_mode=False)
    gc.collect()
    pyarrow.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)  # what the small lists took is not there for the large ones
    peak, done = [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], status("RssAnon"))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before, limit = status("RssAnon"), status("VmData") + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    app(args=command(name, large), standalone_mode=False)
    done.set()
    watcher.join()
    facts.write_text(json.dumps({"peak": peak[0] - before}))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_all_commands_in_a_quarter_of_the_memory(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    write(small, 4 << 20)
    write(large, 4 * MEMORY)
    features = [large / "prepared" / split / "features.npy" for split in SHARES]
    for name in ("prepare", "train", "evaluate", "rank"):  # a process each, as from a shell
        process = children.start(limited, name, small, large, tmp_path / "facts")
        assert children.code(process, seconds=240) == 0
        peak = json.loads((tmp_path / "facts").read_text())["peak"]
        print(f"{name}: peak {peak / 2**20:.0f} MiB of {MEMORY / 2**20:.0f}")
        assert peak < MEMORY
    assert sum(path.stat().st_size for path in features) > 3.99 * MEMORY
    lines = (large / "ranking").read_text().splitlines()
    assert len(lines) == int(4 * MEMORY * SHARES["test"]) // (4 * COLUMNS)
    report = json.loads((large / "run" / "report.json").read_text())
    assert not report["execution"]["resident"]
