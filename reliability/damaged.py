"""Damaged files: single bits turned over and ends cut off, in every file that the library reads back; files of two runs exchanged.

Each attempt damages one file of a small artefact and calls everything that reads it. It holds if every reader says so in a
ValueError that names the file, or, of a checkpoint, goes on from the one before it with a warning, or gives to the bit what it gave
before: no reader may give another result.
"""

import atexit
import contextlib
import functools
import io
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rankgrad
from rankgrad import NeuralRanker
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import read_splits
from rankgrad.data.prepare import prepare
from rankgrad.data.synthetic import synthetic
from rankgrad.data.write import write_letor
from rankgrad.explain.explanation import explain_runs
from rankgrad.report.gather import read_entries
from rankgrad.runs.compare import compare_runs
from rankgrad.runs.elsewhere import keep_scores
from rankgrad.runs.ensemble import open_run
from rankgrad.runs.folder import read_config_of, read_start
from rankgrad.runs.run import train_run
from rankgrad.runs.trees import grow_run
from rankgrad.training.config import Config, configure
from rankgrad.training.loop import Epoch
from reliability.promise import Promise, Tally, tally

FLIPS, CUTS = 500, 300
Reader = Callable[[Path], object]  # of an artefact; what it gives can be compared by its repr


# --- small artefacts, made once per process -----------------------------------------------------------------------------


@functools.cache
def place() -> Path:
    """A folder for this process, which is removed at its end."""
    folder = tempfile.mkdtemp(prefix="rankgrad-damaged-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def prepared(seed: int = 0) -> Path:
    """A prepared dataset of three small splits; of another seed other lists."""
    source, first = place() / f"text{seed}", 4 * seed
    source.mkdir()
    for split in ("train", "vali", "test"):
        write_letor(source / f"{split}.txt", synthetic("tiny", split).select(slice(first, first + 4)))
    prepare(source, out=place() / f"prepared{seed}")
    return place() / f"prepared{seed}"


def settings(**changed: Any) -> Config:
    """A run of a moment: a small network of two epochs."""
    given = {"train.epochs": 2, "model.kind": "mlp", "train.device": "cpu", "train.threads": 1, **changed}
    return configure(str(prepared()), given, ["model.hidden=[3]", "members.count=1"])


@functools.cache
def run(seed: int = 0) -> Path:
    """A finished run, explained."""
    folder = place() / f"run{seed}"
    *_, _ = train_run(folder, settings(**{"train.seed": seed}))
    *_, _ = explain_runs([folder], str(prepared()), queries=3, repeats=2)
    return folder


@functools.cache
def run_on_other_lists() -> Path:
    """A finished run with the configuration of `run(0)`, on lists that then took the place of its own."""
    folder, lists, hidden = place() / "run-on-other-lists", prepared(), place() / "hidden"
    run(), lists.rename(hidden), shutil.copytree(prepared(1), lists)
    *_, _ = train_run(folder, settings())
    *_, _ = explain_runs([folder], str(lists), queries=3, repeats=2)
    shutil.rmtree(lists), hidden.rename(lists)
    return folder


@functools.cache
def stopped(seed: int = 0) -> Path:
    """A run that was stopped after the third of four epochs, with two generations of checkpoints."""
    folder = place() / f"stopped{seed}"
    events = train_run(folder, settings(**{"train.epochs": 4, "train.seed": seed}))
    next(event for event in events if isinstance(event, Epoch) and event.epoch == 3)
    events.close()
    return folder


@functools.cache
def trees(seed: int = 0) -> Path:
    """A finished run of trees."""
    folder = place() / f"trees{seed}"
    given = {"train.epochs": 3, "model.kind": "lightgbm", "loss.name": "native", "train.seed": seed, "train.threads": 1}
    *_, _ = grow_run(folder, configure(str(prepared()), given, []))
    return folder


@functools.cache
def elsewhere(seed: int = 0) -> Path:
    """Scores of another program."""
    folder, lists = place() / f"elsewhere{seed}", test_lists()
    keep_scores(folder, "other", np.random.default_rng(seed).normal(size=len(lists.labels)), lists, split="test")
    return folder


@functools.cache
def estimator() -> Path:
    """A folder with the file of a saved estimator."""
    folder = place() / "estimator"
    folder.mkdir()
    NeuralRanker.load(run()).save(folder / "ranker.safetensors")
    return folder


@functools.cache
def test_lists() -> RankingDataset:
    return read_splits(str(prepared()))["test"]


# --- everything that reads them -----------------------------------------------------------------------------------------


def shown(*values: Any) -> str:
    """Values as a text that is the same where they are, to the bit."""
    with np.printoptions(threshold=10**9, floatmode="unique"):
        return repr(values)


def scored(folder: Path) -> str:
    """`evaluate`, `rank` and ensembles."""
    return shown(open_run(folder, "cpu").score(test_lists()))


def loaded(folder: Path) -> str:
    file = folder / "ranker.safetensors"
    ranker = rankgrad.load(file if file.exists() else folder, "cpu")
    return shown(ranker.score_lists(test_lists()), ranker.names, ranker.config)


def fitted(folder: Path) -> str:
    file = folder / "ranker.safetensors"
    ranker = NeuralRanker.load(file if file.exists() else folder)
    return shown(ranker.ranker_.score_lists(test_lists()), ranker.history_, ranker.best_score_, ranker.get_params())


def reported(folder: Path) -> str:
    return shown(read_entries([folder]))


def compared(folder: Path) -> str:
    return shown(compare_runs(folder, run(1), "ndcg@10"))


def resumed(folder: Path) -> str:
    """The weights of a run that goes on to its end."""
    *_, _ = train_run(folder)
    tensors = rankgrad.load(folder, "cpu").tensors()
    return shown({name: tensor.numpy() for name, tensor in sorted(tensors.items())})


def begun_from(folder: Path) -> str:
    """`--init`."""
    start = read_start(folder)
    weights = {name: tensor.numpy() for name, tensor in sorted(start.weights.items())}
    return shown(weights, sorted(start.scaling.to_state().items()), start.names, read_config_of(folder))


def opened(folder: Path) -> str:
    """A prepared dataset."""
    return shown({name: [getattr(data, field) for field in FIELDS] for name, data in read_splits(str(folder)).items()})


FIELDS = ("features", "labels", "offsets", "query_ids", "rows", "feature_names", "provenance")


# --- bits and ends ------------------------------------------------------------------------------------------------------


def changed(content: bytes, number: int, of: int, rng: np.random.Generator) -> tuple[bytes, str]:
    """A bit of a file turned over, or in CUTS of FLIPS + CUTS attempts its end cut off, the last byte alone and all of it too."""
    if number * (FLIPS + CUTS) < of * FLIPS:
        place = int(rng.integers(8 * len(content)))
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        return bytes(flipped), f"bit {place}"
    length = {of - 1: 0, of - 2: len(content) - 1}.get(number, int(rng.integers(len(content))))
    return content[:length], f"cut to {length} bytes"


def outcome(read: Callable[[Path], object], folder: Path) -> tuple[str, str]:
    """What a reader gave, "" where it refused; and what it said."""
    said = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(said):
        warnings.simplefilter("always")
        try:
            found = str(read(folder))
        except ValueError as error:
            return "", str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}", ""
    return found, said.getvalue() + "".join(str(warning.message) for warning in caught)


def try_file(made: Callable[[], Path], name: str, readers: tuple[Reader, ...], times: int, seed: int) -> Iterator[str]:
    """Damage a file of an artefact, and read that; "" for each time that every reader noticed."""
    with copies(made()) as copy:
        content = (made() / name).read_bytes()
        whole = {read: outcome(read, copy()) for read in readers}
        assert not any(said for _, said in whole.values()), whole
        rng = np.random.default_rng([seed, *name.encode()])
        for number in range(times):
            bad, what = changed(content, number, times, rng)
            failures = []
            for read in readers if times < FLIPS else readers[number % len(readers) :][:1]:  # in turn: time is short
                folder = copy()
                (folder / name).write_bytes(bad)
                found, said = outcome(read, folder)
                if Path(name).name not in said or found not in ("", whole[read][0]):
                    failures.append(f"{read.__name__} gave {found[:80]!r} and said {said[:200]!r}")
            yield f"{name}, {what}: {'; '.join(failures)}" if failures else ""


@contextlib.contextmanager
def copies(original: Path) -> Iterator[Callable[[], Path]]:
    """A function that gives the artefact whole again, in the same place."""
    folder = place() / "copy" / original.name
    contents = {path.relative_to(original): path.read_bytes() for path in original.rglob("*") if path.is_file()}

    def copy() -> Path:
        for path in [*folder.rglob("*")]:
            if path.is_file() and path.relative_to(folder) not in contents:
                path.unlink()
        for name, content in contents.items():
            target = folder / name
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        return folder

    yield copy
    shutil.rmtree(folder, ignore_errors=True)


FILES: dict[str, tuple[Callable[[], Path], dict[str, tuple[Reader, ...]]]] = {
    "run": (
        run,
        {
            "config.toml": (loaded, scored, fitted, reported, compared, begun_from),
            "model.safetensors": (loaded, scored, fitted, begun_from),
            "queries.safetensors": (reported, compared),
            "scores.safetensors": (reported,),
            "report.json": (loaded, scored, fitted, reported),
            "history.jsonl": (fitted, reported),
            "explanation.json": (reported,),
        },
    ),
    "resumed": (stopped, dict.fromkeys(("checkpoint.safetensors", "history.jsonl", "config.toml"), (resumed,))),
    "trees": (trees, dict.fromkeys(("trees.json", "model.txt", "config.toml"), (scored,))),
    "elsewhere": (
        elsewhere,
        {
            "report.json": (reported, compared),
            "queries.safetensors": (reported, compared),
            "scores.safetensors": (reported,),
        },
    ),
    "estimator": (estimator, {"ranker.safetensors": (fitted, loaded)}),
    "prepared": (
        prepared,
        {
            f"train/{name}": (opened,)
            for name in ("manifest.json", "features.npy", "labels.npy", "offsets.npy", "query_ids.npy")
        },
    ),
}


def attempt(kind: str) -> Callable[[int, int], Tally]:
    """Every file of a kind of artefact, `times` times each."""

    def tried(times: int, seed: int) -> Tally:
        torch.set_num_threads(1)
        made, names = FILES[kind]
        return tally(line for name, readers in names.items() for line in try_file(made, name, readers, times, seed))

    return tried


# --- exchanged files ----------------------------------------------------------------------------------------------------

EXCHANGED: list[tuple[Callable[[], Path], Callable[[], Path], dict[str, tuple[Reader, ...]]]] = [
    (run, functools.partial(run, 1), FILES["run"][1]),
    (run, run_on_other_lists, {name: readers for name, readers in FILES["run"][1].items() if name != "config.toml"}),
    (stopped, functools.partial(stopped, 1), FILES["resumed"][1]),
    (trees, functools.partial(trees, 1), FILES["trees"][1]),
    (elsewhere, functools.partial(elsewhere, 1), FILES["elsewhere"][1]),
]


def exchange(times: int, _: int) -> Tally:
    """A file of one run in the folder of another, each way: whoever reads it says that one of them does not belong there."""
    torch.set_num_threads(1)
    counted = Tally()
    for one, two, names in EXCHANGED:
        for own, other in ((one(), two()), (two(), one()))[: 2 if times > 1 else 1]:
            with copies(own) as copy:
                for name, readers in names.items():
                    assert (own / name).read_bytes() != (other / name).read_bytes(), (own, name)
                    for read in readers:
                        whole, _ = outcome(read, copy())
                        shutil.copy(other / name, copy() / name)
                        found, said = outcome(read, folder := own.parent / "copy" / own.name)
                        held = found in ("", whole) and any(str(folder / file) in said for file in names)
                        counted.add(
                            "" if held else f"{name} of {other.name} in {own.name}: {read.__name__} said {said[:200]!r}"
                        )
    return counted


WORDS = {
    "run": "a file of a finished run with a bit turned over or its end cut off is refused by name (the ranker loads without a report, and says so)",
    "resumed": "a damaged checkpoint is named and the one before it used, to the same weights; damaged configuration or history is refused",
    "trees": "damaged trees, in the library's own format, and what is said of them are refused by name",
    "elsewhere": "damaged scores of another program are refused by name",
    "estimator": "a damaged file of a saved estimator is refused by name",
    "prepared": "a damaged file of a prepared dataset is refused by name",
}
PROMISES = [
    *(Promise(f"damaged-{kind}", words, FLIPS + CUTS, attempt(kind)) for kind, words in WORDS.items()),
    Promise("exchanged", "a file of another run, in any place of a run's folder, is refused by name", 2, exchange),
]
