"""Load: large data, long lists and many queries in 4 GiB, losses on long lists, many fits and many threads in one process.

Whatever is held to a limit of memory runs in a process of its own whose allocations the system refuses beyond it (RLIMIT_DATA: what
is allocated, not the files that are mapped). The peak that is noted is that of its anonymous memory (RssAnon, sampled every 5 ms).
`times` is the share of the full size in percent here, so that --share makes the data smaller.
"""

import contextlib
import ctypes
import gc
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from reliability.promise import Promise, Tally

LIMIT = 4 << 30  # bytes
SECONDS = 120.0  # for a loss on a list of LONG documents
LONG = 5_000
LEAK = 20 << 20  # bytes that fits may leave behind after the fifth
BUILD = Path("build/reliability")


def status(name: str) -> int:
    """A number of bytes, or of threads, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * (1024 if line.endswith("kB") else 1)
    raise LookupError(name)


class Peak:
    """The most anonymous memory while the context is open."""

    def __enter__(self) -> "Peak":
        self.bytes, self._done = status("RssAnon"), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, status("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()
        self.bytes = max(self.bytes, status("RssAnon"))

    def __str__(self) -> str:
        return f"{self.bytes / 2**30:.2f} GiB"


@contextlib.contextmanager
def workplace(name: str) -> Iterator[Path]:
    """A new folder on this disk, removed at the end."""
    folder = BUILD.resolve() / f"{name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def limited(function: str, *arguments: Any) -> Tally:
    """A function of this file in a process that may allocate LIMIT bytes; its tries and its note."""
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT}, {LIMIT}))\n"
        f"import json; from reliability import load; found = load.{function}(*json.loads(sys.argv[1]))\n"
        "print(json.dumps([found.tried, found.failures, found.note]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )
    try:
        return Tally(*json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        return Tally(1, [f"{function}{arguments} ended with status {done.returncode}: {done.stderr[-500:]}"])


def called(*arguments: Any) -> str:
    """The command in this process; "" if it succeeded, else what it said."""
    from rankgrad.cli import main

    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["rankgrad", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        return f"{arguments[0]}: {err.getvalue()[-300:]}" if end.code else ""
    finally:
        sys.argv = before
    return "the command did not exit"


def tried(steps: Sequence[Sequence[Any]]) -> Tally:
    """Commands one after the other, what each took, and the peak of all."""
    counted, spent = Tally(), []
    with Peak() as peak:
        for step in steps:
            begun = time.perf_counter()
            counted.add(called(*step))
            spent.append(f"{step[0]} {time.perf_counter() - begun:.0f} s")
    if peak.bytes > LIMIT:
        counted.add(f"the peak is {peak}")
    counted.note = f"peak {peak}; {', '.join(spent)}"
    return counted


def save_lists(folder: Path, lengths: np.ndarray, columns: int, seed: int) -> None:
    """Lists of these lengths as prepared data; features are a block of random numbers again and again, labels follow them."""
    from rankgrad.data.dataset import RankingDataset
    from rankgrad.data.feature_rows import FeatureRows

    rng, rows = np.random.default_rng(seed), int(lengths.sum())
    block = rng.normal(size=(min(rows, 65_536), columns)).astype(np.float32)
    value = block[:, 0] + block[:, 1 % columns] + rng.normal(size=len(block))
    grades = np.digitize(value, [1.0, 2.0, 3.0]).astype(np.float32)
    whole, rest = divmod(rows, len(block))
    features = FeatureRows([block] * whole + ([block[:rest]] if rest else []))
    labels = np.concatenate([np.tile(grades, whole), grades[:rest]])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    RankingDataset(features, labels, offsets, np.arange(len(lengths))).save(folder)


# --- large data -------------------------------------------------------------------------------------------------------


def try_rows(times: int, seed: int) -> Tally:
    with workplace("rows") as folder:
        rows = 20_000 * times
        for split, share in (("train", 1.0), ("vali", 0.02), ("test", 0.02)):
            save_lists(folder / "data" / split, np.full(max(2, int(rows * share) // 100), 100), 136, seed)
        found = limited("train_rows", str(folder))
        found.note += f"; {rows:,} rows of 136 features mapped, an epoch of a network 64-32 by neural_ndcg@10"
        return found


def train_rows(folder: str) -> Tally:
    data, run = f"{folder}/data", f"{folder}/run"
    model = ("--model", "mlp", "--set", "model.hidden=[64,32]", "--loss", "neural_ndcg@10", "--batch-size", 64)
    return tried(
        [
            ("train", data, *model, "--epochs", 1, "--device", "cpu", "--quiet", "--out", run),
            ("evaluate", run, data),
            ("rank", run, data, "--format", "trec", "--out", f"{folder}/ranking"),
        ]
    )


def try_lengths(times: int, seed: int) -> Tally:
    with workplace("lengths") as folder:
        longest = 500 * times
        for split in ("train", "vali", "test"):
            lengths = np.array([longest, *[1] * 50, *[20] * 50])
            save_lists(folder / "data" / split, np.random.default_rng(seed).permutation(lengths), 16, seed)
        found = limited("train_lengths", str(folder), longest)
        found.note += f"; lists of 1 and of {longest:,} documents"
        return found


def train_lengths(folder: str, longest: int) -> Tally:
    data, steps = f"{folder}/data", []
    for name, options in {
        "sampled": ("--model", "mlp", "--loss", "neural_ndcg@10"),
        "whole": ("--model", "linear", "--loss", "softmax", "--list-size", longest, "--batch-size", 4),
        "members": ("--recipe", "strong"),
        "attention": ("--recipe", "small"),
    }.items():
        run = f"{folder}/{name}"
        steps += [
            ("train", data, *options, "--epochs", 1, "--device", "cpu", "--quiet", "--out", run),
            ("evaluate", run, data),
            ("rank", run, data, "--format", "csv", "--out", f"{folder}/{name}.csv"),
        ]
    counted = tried(steps)
    for name in ("sampled", "whole", "members", "attention"):
        path = Path(folder, f"{name}.csv")
        lines = len(path.read_text().splitlines()) if path.is_file() else 0
        counted.add("" if lines == longest + 50 + 1000 + 1 else f"rank wrote {lines:,} lines")
    return counted


def try_queries(times: int, seed: int) -> Tally:
    with workplace("queries") as folder:
        queries, rng = 2_000 * times, np.random.default_rng(seed)
        (folder / "text").mkdir()
        for split, share in (("train", 1.0), ("vali", 0.1), ("test", 1.0)):
            with (folder / "text" / f"{split}.txt").open("w") as file:
                values = rng.normal(size=(1000, 3)).round(3).tolist()
                for query in range(int(queries * share)):
                    rows = (values[(3 * query + row) % 1000] for row in range(3))
                    file.writelines(f"{int(a > 0)} qid:{query} 1:{a} 2:{b} 3:{c}\n" for a, b, c in rows)
        found = limited("train_queries", str(folder))
        found.note += f"; {queries:,} queries of 3 documents as text"
        return found


def train_queries(folder: str) -> Tally:
    data, run = f"{folder}/text", f"{folder}/run"
    options = ("--model", "mlp", "--loss", "listnet", "--batch-size", 512, "--epochs", 1, "--device", "cpu", "--quiet")
    return tried(
        [
            ("train", data, *options, "--out", run),
            ("evaluate", run, data),
            ("compare", run, run),
            ("report", run, "--out", f"{folder}/page.html"),
            ("prepare", data, "--out", f"{folder}/prepared", "--quiet"),
        ]
    )


# --- losses on long lists ---------------------------------------------------------------------------------------------


def try_losses(times: int, seed: int) -> Tally:
    return limited("run_losses", LONG * times // 100, seed)


def run_losses(documents: int, seed: int) -> Tally:
    """Every loss forward and backward on one list; where there are compiled loops, by PyTorch too."""
    import torch

    from rankgrad.losses import LOSS_TABLE

    counted, most, slowest = Tally(), (0, ""), (0.0, "")
    for spec in LOSS_TABLE:
        for options in ({}, {"backend": "torch"}) if "sort" in spec.parameters else ({},):
            generator = torch.Generator().manual_seed(seed)
            labels = torch.randint(0, 5, (1, documents), generator=generator).float()
            if spec.name == "bce":
                labels = labels.clamp(max=1)
            shape = (1, documents, spec.units(4)) if spec.units(4) > 1 else (1, documents)
            scores = torch.randn(shape, generator=generator, requires_grad=True)
            begun = time.perf_counter()
            wrong = ""
            with Peak() as peak:
                try:
                    spec.function(scores, labels, **options).backward()
                    if scores.grad is None or not torch.isfinite(scores.grad).all() or not scores.grad.any():
                        wrong = "its gradient is not finite, or nothing"
                except (RuntimeError, MemoryError) as error:
                    wrong = str(error)[:200]
            seconds = time.perf_counter() - begun
            wrong = wrong or (f"it took {seconds:.0f} s" if seconds > SECONDS else "")
            wrong = wrong or (f"its peak is {peak}" if peak.bytes > LIMIT else "")
            name = f"{spec.name}{' by PyTorch' if options else ''}"
            counted.add(f"{name} of {documents:,} documents: {wrong}" if wrong else "")
            most, slowest = max(most, (peak.bytes, name)), max(slowest, (seconds, name))
            del scores, labels
            gc.collect()
    counted.note = f"{documents:,} documents; peak {most[0] / 2**30:.2f} GiB ({most[1]}), longest {slowest[0]:.0f} s ({slowest[1]})"
    return counted


# --- many fits, many threads ------------------------------------------------------------------------------------------


def held() -> tuple[int, int, int]:
    """Anonymous memory after everything that can be given back was, open files, threads."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what glibc keeps for later goes back to the system
    return status("RssAnon"), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def some_lists(seed: int, queries: int = 40, columns: int = 20) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 30, queries)
    x = rng.normal(size=(int(sizes.sum()), columns)).astype(np.float32)
    return x, np.digitize(x[:, 0] + rng.normal(size=len(x)), [0.5, 1.5]), np.repeat(np.arange(queries), sizes)


def try_fits(times: int, seed: int) -> Tally:
    """So many fits of an estimator in one process: what each kind holds after the fifth of all it holds after the last."""
    from rankgrad import NeuralRanker

    counted, after_fifth, peak = Tally(), (0, 0, 0), 0
    kinds = [{"model": "mlp"}, {"model": "linear", "loss": "listnet"}, {"model": "transformer"}]
    for number in range(times):
        x, y, qid = some_lists(seed + number)
        ranker = NeuralRanker(**kinds[number % 3], epochs=2, random_state=number, verbose=0)
        ranker.fit(x, y, qid=qid)
        ranker.predict(x, qid=qid)
        del ranker
        now = held()
        if number <= 4:
            after_fifth = now
        peak = max(peak, now[0] - after_fifth[0])
        wrong = (
            (now[0] - after_fifth[0] > LEAK and f"{(now[0] - after_fifth[0]) / 2**20:.1f} MiB more are held")
            or (now[1] > after_fifth[1] and f"{now[1] - after_fifth[1]} files more are open")
            or (now[2] > after_fifth[2] and f"{now[2] - after_fifth[2]} threads more are there")
        )
        counted.add(f"after fit {number + 1}: {wrong}" if wrong else "")
    counted.note = f"at most {max(peak, 0) / 2**20:.1f} MiB more than after the fifth (RssAnon, collected and trimmed)"
    return counted


def count_threads(
    counted: Tally, name: str, score: Callable[..., np.ndarray], parts: Sequence[Any], times: int, before: int
) -> None:
    """Score each of 8 parts so many times from 8 threads, and compare with one thread's; torch has as many threads as `before`."""
    import torch

    alone = [score(x, qid) for x, _, qid in parts]
    with ThreadPoolExecutor(8) as together:
        found = list(together.map(lambda at: score(parts[at % 8][0], parts[at % 8][2]), range(8 * times)))
    for at, scores in enumerate(found):
        counted.add("" if np.array_equal(scores, alone[at % 8]) else f"{name}: other scores from a thread")
    after = torch.get_num_threads()
    counted.add("" if after == before else f"{name}: torch has {after} threads after it, {before} before")


def try_threads(times: int, seed: int) -> Tally:
    """Scores from 8 threads at once are those of one, to the bit: the estimator, its ranker, an ONNX session."""
    import torch

    from rankgrad import NeuralRanker
    from rankgrad.export import export_ranker
    from rankgrad.export.onnx import session

    counted, before = Tally(), torch.get_num_threads()
    x, y, qid = some_lists(seed)
    parts = [some_lists(seed + 1 + number) for number in range(8)]
    with workplace("threads") as folder:
        for options in ({"model": "mlp"}, {"model": "transformer"}):
            estimator = NeuralRanker(**options, epochs=1, random_state=0, verbose=0).fit(x, y, qid=qid)
            ranker = estimator.ranker_
            file = folder / f"{options['model']}.onnx"
            export_ranker(ranker, file)
            opened = session(file)
            ways = {
                "predict": lambda x, qid, of=estimator: of.predict(x, qid=qid),
                "Ranker.score": lambda x, qid, of=ranker: of.score(x, np.bincount(qid)),
                "Ranker.score of one list": lambda x, qid, of=ranker: of.score(x),  # noqa: ARG005
                "ONNX": lambda x, qid, of=opened: of.run(None, {"features": x, "sizes": np.bincount(qid)})[0],
            }
            for name, score in ways.items():
                count_threads(counted, f"{name} of {options['model']}", score, parts, times, before)
    return counted


PROMISES = [
    Promise("load-rows", "2 million rows of 136 features train in 4 GiB on the CPU", 100, try_rows, alone=True),
    Promise(
        "load-lengths", "Lists of 1 and of 50,000 documents in one dataset, in 4 GiB", 100, try_lengths, alone=True
    ),
    Promise(
        "load-queries", "200,000 queries are read, trained on and measured, in 4 GiB", 100, try_queries, alone=True
    ),
    Promise(
        "load-losses", "Every loss of 5,000 documents, forward and backward: 4 GiB, 120 s", 100, try_losses, alone=True
    ),
    Promise("load-fits", "30 fits in one process leave no memory, file or thread behind", 30, try_fits, alone=True),
    Promise("load-threads", "Scores from 8 threads are those of one", 20, try_threads, alone=True),
]
