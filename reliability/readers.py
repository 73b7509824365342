"""Readers fed with damaged and hostile bytes by a coverage-guided fuzzer (atheris, which is libFuzzer).

    text        LETOR/SVMLight, plain and compressed; the compiled reader, the strict one and the plain loops of the tests agree
    tables      CSV, Parquet and Arrow; the reader of whole files and the one that spools them agree
    config      TOML files, those of runs, and --set; what is read is written and read back the same
    prepared    folders of saved datasets, one file of which is exchanged; checksums made right again, so that what is behind is reached

Each reads what it is given, or says in one sentence what is wrong and where. Anything else is a failure: another exception, a
crash, ten seconds without an answer, memory beyond three gigabytes, two readers that differ. An input is kept if it reaches code that
none before has reached, and changed further. `python -m reliability.readers TARGET SECONDS SEED FOLDER` is the process that does it.
"""

import bz2
import contextlib
import gzip
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reliability.promise import Promise, Tally

SECONDS = 150  # of each target in `make nightly`: ten minutes in all
LOGS = Path("build/reliability")
LONGEST = 4096  # bytes of an input
ANSWER = 10  # seconds for one input
MEMORY = 3000  # MiB
TURN = 20  # seconds of one process


class DisagreementError(Exception):
    """Two readers took the same bytes for different things."""


# --- text -------------------------------------------------------------------------------------------------------------

TEXT = b"2 qid:7 1:0.5 3:1 # docid = GX001\n0 qid:7 2:4e-3\r\n\n# note\n1 qid:-9 1:3 2:+1.25 #docid = b\n0 qid:7 3:.5\n"
TEXT_SEEDS = (
    TEXT,
    gzip.compress(TEXT, mtime=0),
    bz2.compress(TEXT),
    b"\xef\xbb\xbf4 qid:1 1:340282350000000000000000000000000000000 2:1e39\n",
    b"1 qid:9223372036854775807 1:16777217 2:0.1000000014901161 3:1e-45 4:7.0064923216240854e-46\n",
)
TEXT_TOKENS = ("qid:", " 1:", ":", "#docid = ", "e-", "e+", "1e39", "nan", "inf", "-0", "+", ".", "\\x00", "\\x0d\\x0a", "\\xef\\xbb\\xbf",
               "9223372036854775808", "2147483648", "0x1", "\\x1f\\x8b\\x08", "BZh9", "(\\xb5/\\xfd", "{", "PAR1", " 1:1 1:1")  # fmt: skip


def read_text(content: bytes, folder: Path) -> Any:
    """Three readers: they accept the same files, and give the same numbers."""
    from tests.references import svmlight as loops

    from rankgrad.data.svmlight import compiled
    from rankgrad.data.svmlight.reader import read_svmlight

    path = folder / "train.txt"
    path.write_bytes(content)
    fast = outcome(partial(read_svmlight, path))
    was, compiled.COMPILED = compiled.COMPILED, False
    try:
        strict = outcome(partial(read_svmlight, path))
    finally:
        compiled.COMPILED = was
    expect_equal("the compiled and the strict reader", facts(fast), facts(strict))
    if not content.startswith((b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd")):
        try:
            labels, queries, rows, clamped = loops.read(content)
        except loops.MistakeError:
            expected = None
        else:
            expected = labels, queries, clamped, [sorted(row.items()) for row in rows]
        if isinstance(fast, Exception):
            allowed = ("names no feature", "makes the dense result")
            if expected is not None and not any(words in str(fast) for words in allowed):
                raise DisagreementError(f"refused, which the loops read: {fast}")
        else:
            found = fast.in_source_order(np.repeat(fast.query_ids, np.diff(fast.offsets))).tolist()
            dense = fast.in_source_order(np.asarray(fast.features[:]))
            given = fast.in_source_order(fast.labels).tolist(), found, fast.provenance["clamped"]
            expect_equal("the reader and the loops", given, expected and expected[:3])
            for row, cells in zip(dense, expected[3] if expected else []):
                wanted = np.zeros(dense.shape[1], np.float32)
                for index, value in cells:
                    wanted[index - 1] = value
                expect_equal("the reader and the loops", row.tolist(), wanted.tolist())
    return fast


# --- tables -----------------------------------------------------------------------------------------------------------

CSV = b'qid,label,bm25,brand\n7,2,0.5,acme\n7,0,,"b ""c"""\n9,1,-3e2,\n9,0,1.25,acme\n7,1,inf,x\n'.replace(b"inf", b"4")
ENDINGS = (".csv", ".tsv", ".parquet", ".arrow", ".csv.gz", ".feather")
TABLE_TOKENS = ("qid", "label", "qid,label", ",", "\\x0a", "\\x0d\\x0a", '\\"', "nan", "inf", "null", "NULL", "true", "1e400", "0x10", "-1", "007",
                "2020-01-01", "9223372036854775808", "PAR1", "ARROW1", "\\xff\\xff\\xff\\xff", "\\x1f\\x8b\\x08", "\\x00", "\\xc3\\x28")  # fmt: skip


def table_seeds() -> Iterator[bytes]:
    """The same few rows in each format, after a byte that says which."""
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    table = pyarrow.table(
        {"qid": ["b", "b", "a"], "label": [1, 0, 2], "bm25": [0.5, None, 2.0], "new": [True, False, None]}
    )
    yield b"\0" + CSV
    yield b"\1" + CSV.replace(b",", b"\t")
    yield b"\4" + gzip.compress(CSV, mtime=0)
    for number, write in ((2, pyarrow.parquet.write_table), (3, _write_stream), (5, pyarrow.feather.write_feather)):
        sink = pyarrow.BufferOutputStream()
        write(table, sink)
        yield bytes([number]) + sink.getvalue().to_pybytes()


def _write_stream(table: Any, sink: Any) -> None:
    import pyarrow

    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def read_tables(content: bytes, folder: Path) -> Any:
    """The whole file at once, and chunk by chunk as `prepare` reads it."""
    from rankgrad.data.load import Columns
    from rankgrad.data.tables.reader import read_table
    from rankgrad.data.tables.stream import spool_tables

    options = Columns().of_table()
    path = folder / f"train{ENDINGS[content[0] % len(ENDINGS)] if content else '.csv'}"
    path.write_bytes(content[1:])
    whole = outcome(partial(read_table, path, **options))
    chunks = outcome(partial(spool_tables, [path], folder / "spool", options))
    (folder / "spool").unlink(missing_ok=True)
    if isinstance(whole, Exception) != isinstance(chunks, Exception):
        raise DisagreementError(f"whole: {whole!r}; in chunks: {chunks!r}")
    if not isinstance(whole, Exception):
        expect_equal("whole and in chunks", facts(whole), facts(chunks))
    path.unlink()
    return whole


# --- configurations ---------------------------------------------------------------------------------------------------

CONFIG_TOKENS = ("[train]", "[data]", "[model]", "[loss]", "[loss.options]", "[members.ranges]", "[optimiser]", "epochs = ", "path = ", "name = ",
                 "metric = ", "metrics = [", "gain = [", "tau = ", "lr = ", "count = ", "true", "inf", "nan", "1e400", "0x", "1_0", "''", "\\\"\\\"\\\"",
                 "[[", "]]", "{", "}", ".", "=", "#", "train.epochs=8", "loss.options.tau=0.5", "model.options.x=1", "1979-05-27", "neural_ndcg@10")  # fmt: skip


def config_seeds() -> Iterator[bytes]:
    """Whole files, files of runs, and settings, after a byte that says which."""
    from rankgrad.training.config import RECIPES, dumps

    for kind in range(3):
        for recipe in RECIPES.values():
            yield bytes([kind]) + dumps(recipe()).encode()
    for setting in ("train.epochs=8", "loss.options.tau=0.5", "members.ranges.lr=[1e-4, 1e-2]", "loss.name=listnet",
                    "data.gain=[0,1,3]", "model.hidden=[64, 32]", "train.metrics=['ndcg@5', 'map']", "data.path=a=b"):  # fmt: skip
        yield b"\3" + setting.encode()


def read_config(content: bytes, folder: Path) -> Any:
    """Read, checked as `train` does before it reads data, written, and read back: the same."""
    from rankgrad.training.build import validate
    from rankgrad.training.config import dumps, load, loads, paper, with_settings

    kind = content[0] % 4 if content else 0
    if kind == 3:
        text = content[1:].decode("utf-8", "replace")
        config = with_settings(paper(), {}, [text])
    else:
        path = folder / "config.toml"
        path.write_bytes(content[1:])
        config = load(path, of_run=kind == 2)
    expect_equal("written and read back", repr(loads(dumps(config))), repr(config))
    if kind != 2:  # a configuration of long ago is only read
        with contextlib.suppress(ValueError):  # what it names is the key, not the file
            validate(config)
    return config


# --- prepared data ----------------------------------------------------------------------------------------------------


def prepared_folder(folder: Path) -> Path:
    """A small saved dataset with everything it can hold."""
    from rankgrad.data.dataset import RankingDataset

    data = RankingDataset(
        np.arange(10, dtype=np.float32).reshape(5, 2) % 3, np.array([2.0, 0, 1, 0, 1]), np.array([0, 2, 5]), np.array(["q", "r"]),
        feature_names=("a", "b"), weights=np.array([1.0, 2.0]), document_ids=np.array(list("vwxyz")), categories={1: ("x", "y", "z")},
    )  # fmt: skip
    data.save(folder)
    return folder


def prepared_seeds() -> Iterator[bytes]:
    """Each file of the folder after two bytes: which file it is, and whether checksums are made right again."""
    with tempfile.TemporaryDirectory() as base:
        for number, path in enumerate(sorted(prepared_folder(Path(base) / "saved").iterdir())):
            for honest in (0, 1):
                yield bytes([number, honest]) + path.read_bytes()


PREPARED_TOKENS = ("\\x93NUMPY\\x01\\x00", "'descr': '<f4'", "'descr': '|O'", "'<i8'", "'<U1'", "'shape': (", "fortran_order", "True", "(5, 2)", "()",
                   '\\"arrays\\"', '\\"features\\"', '\\"bytes\\"', '\\"crc32\\"', '\\"version\\"', '\\"format\\"', '\\"categories\\"', "null", "{", "[", "../", "1e400", "NaN")  # fmt: skip


def read_prepared(content: bytes, folder: Path) -> Any:
    """A saved dataset one of whose files was exchanged."""
    from rankgrad.data.dataset import RankingDataset

    saved = folder / "saved"
    if not saved.exists():
        prepared_folder(saved)
    files = sorted(saved.iterdir())
    path = files[content[0] % len(files)] if content else files[0]
    manifest, before = saved / "manifest.json", {name: name.read_bytes() for name in {path, saved / "manifest.json"}}
    try:
        path.write_bytes(content[2:])
        if content[1:2] == b"\1":
            _make_right(manifest, path)
        data = RankingDataset.open(saved)
        data.describe()
        return data
    finally:
        for name, was in before.items():
            name.write_bytes(was)


def _make_right(manifest: Path, changed: Path) -> None:
    """Sizes and checksums as whoever wants to deceive would write them."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        facts = json.loads(manifest.read_bytes())
        if changed != manifest:
            content, entry = changed.read_bytes(), facts["arrays"][changed.stem]
            entry.update(bytes=len(content), crc32=zlib.crc32(content), sampled_crc32=0)
        facts.pop("manifest_crc32", None)
        facts["manifest_crc32"] = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
        manifest.write_text(json.dumps(facts))


# --- one input --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A reader: what it begins with, words that its format is made of, and the function."""

    read: Callable[[bytes, Path], Any]
    seeds: Callable[[], Iterator[bytes]]
    tokens: tuple[str, ...]
    modules: tuple[str, ...]  # whose code is watched


DATA = ("rankgrad.data.dataset", "rankgrad.data.folder", "rankgrad.data.grouping", "rankgrad.data.categories")
TARGETS = {
    "text": Target(
        read_text,
        lambda: iter(TEXT_SEEDS),
        TEXT_TOKENS,
        ("rankgrad.data.svmlight.line", "rankgrad.data.svmlight.text", "rankgrad.data.svmlight.blocks", "rankgrad.data.svmlight.reader", *DATA),
    ),
    "tables": Target(
        read_tables,
        table_seeds,
        TABLE_TOKENS,
        ("rankgrad.data.tables.arrow", "rankgrad.data.tables.reader", "rankgrad.data.tables.stream", "rankgrad.data.tables.columns", *DATA),
    ),
    "config": Target(
        read_config, config_seeds, CONFIG_TOKENS, ("rankgrad.training.config", "rankgrad.training.build", "rankgrad.checks", "tomllib._parser")
    ),
    "prepared": Target(read_prepared, prepared_seeds, PREPARED_TOKENS, DATA),
}  # fmt: skip


def failure_of(target: str, content: bytes, folder: Path) -> str:
    """What a reader did instead of reading, or of refusing in one sentence that says what is wrong; "" if it did that."""
    try:
        found = TARGETS[target].read(content, folder)
        if isinstance(found, Exception):
            raise found
    except (ValueError, OSError) as error:
        words = str(error)
        ours = type(error) is ValueError and (str(folder) in words or "--set" in words or "the configuration" in words)
        if (ours or isinstance(error, OSError)) and words.strip() and "\n" not in words:
            return ""
        return f"no sentence of ours: {_where(error)}"
    except Exception as error:
        return _where(error)
    return ""


def _where(error: BaseException) -> str:
    """The error and the innermost lines of the library that it went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "rankgrad" in frame.filename]
    place = " < ".join(f"{Path(frame.filename).name}:{frame.name}:{frame.lineno}" for frame in reversed(frames[-3:]))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} at {place}"


def outcome(read: Callable[[], Any]) -> Any:
    """What it read, or how it refused."""
    try:
        return read()
    except ValueError as error:
        return error


def facts(data: Any) -> Any:
    """A dataset, or a refusal, as plain values."""
    if isinstance(data, Exception):
        return str(data)
    arrays = data.features[:], data.labels, data.offsets, data.query_ids, data.document_ids
    return [None if array is None else np.asarray(array).tolist() for array in arrays] + [data.feature_names]


def expect_equal(who: str, one: Any, other: Any) -> None:
    if repr(one) != repr(other):  # as written: NaN is NaN, and -0.0 is not 0.0
        raise DisagreementError(f"{who} differ: {one!r:.200} and {other!r:.200}")


# --- many inputs ------------------------------------------------------------------------------------------------------


def fuzz(target: str, seconds: int, seed: int, folder: Path) -> None:
    """What the process does: it ends by itself, failures in failures.txt, or with what killed it."""
    import atheris

    chosen = TARGETS[target]
    with atheris.instrument_imports(include=list(chosen.modules)):
        for module in chosen.modules:
            __import__(module)
    from rankgrad.data.svmlight import reader

    reader.MODEST_BYTES = 1 << 22  # so that a large index is refused, not filled and compared a thousand times
    logging.disable()
    warnings.simplefilter("ignore")
    corpus, work = folder / "corpus", folder / "work"
    corpus.mkdir(exist_ok=True)  # what processes before this one have found
    work.mkdir(exist_ok=True)
    known: set[str] = set()

    def one(content: bytes) -> None:
        failure = failure_of(target, content, work)
        kind = (
            failure.split(":")[0] + failure[failure.rfind(" at ") :]
        )  # the same trouble at the same place is told once
        if failure and kind not in known:
            known.add(kind)
            with (folder / "failures.txt").open("a") as file:
                file.write(f"{failure}; given {content!r}\n")

    for number, content in enumerate(chosen.seeds()):
        (corpus / str(number)).write_bytes(content)
        one(content)  # compiles what is compiled, which takes longer than an answer may
    (folder / "words").write_text("".join(f'"{token}"\n' for token in chosen.tokens))
    options = {"max_total_time": seconds, "seed": seed + 1, "timeout": ANSWER, "rss_limit_mb": MEMORY, "max_len": LONGEST,
               "dict": folder / "words", "artifact_prefix": f"{folder}/killed-", "print_final_stats": 1, "len_control": 0}  # fmt: skip
    atheris.Setup([sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), str(corpus)], one)
    atheris.Fuzz()


def _attempt(target: str, seconds: int, seed: int) -> Tally:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as base:
        folder = Path(base)
        counted, places = Tally(), "0"
        for first in range(0, seconds, TURN):
            # A process of its own for each turn: the fuzzer's memory grows with its inputs.
            arguments = [target, str(min(TURN, seconds - first)), str(seed + first), base]
            asked = [sys.executable, "-m", "reliability.readers", *arguments]
            done = subprocess.run(asked, capture_output=True, text=True, errors="replace")
            units = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
            places = (re.findall(r"cov: (\d+)", done.stderr) or [places])[-1]
            counted.tried += int(units[1]) if units else 1
            if done.returncode:
                break
        counted.note = f"{seconds} s, {places} places reached"
        if (folder / "failures.txt").exists():
            counted.failures += (folder / "failures.txt").read_text().splitlines()
        killed = sorted(folder.glob("killed-*"))
        for path in killed:
            LOGS.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, LOGS / f"readers-{target}-{path.name}")
        if done.returncode or killed:
            kept = ", ".join(f"{LOGS}/readers-{target}-{path.name}" for path in killed)
            counted.failures.append(
                f"the process ended with status {done.returncode}; its last input is {kept or 'not known'}"
            )
            print(done.stderr[-5000:])
    return counted


PROMISES = [
    Promise(f"readers-{name}", words, SECONDS, partial(_attempt, name))
    for name, words in {
        "text": "damaged SVMLight text is read, by three readers alike, or refused in one sentence",
        "tables": "damaged CSV, Parquet and Arrow files are read, whole and in chunks alike, or refused in one sentence",
        "config": "any TOML and any --set is a configuration that is written and read back the same, or refused in one sentence",
        "prepared": "a prepared dataset with an exchanged file, checksums made right, is read or refused in one sentence",
    }.items()
]

if __name__ == "__main__":
    fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
