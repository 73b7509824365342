"""Untrusted artefacts: runs, models, prepared datasets, configurations, estimators and archives that somebody made to do harm.

Each is opened in a process of its own, in a folder beside which nothing may change, with a limit on memory. It holds if the reader
refuses in a ValueError or gives a result, executes nothing, takes no memory that the bytes of the file do not account for, and
neither reads through a link out of the folder nor writes outside.
"""

import bz2
import gzip
import hashlib
import json
import os
import pickle
import resource
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rankgrad
from rankgrad import NeuralRanker
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import read_lists
from rankgrad.data.prepare import prepare
from rankgrad.export.write import read_export
from rankgrad.files import load_tensors, save_tensors, sealed
from rankgrad.report.gather import read_entries
from rankgrad.runs.compare import evaluate_scores
from rankgrad.runs.ensemble import open_run
from rankgrad.runs.run import train_run
from rankgrad.training.config import configure
from reliability.damaged import estimator, prepared, run, stopped, trees
from reliability.promise import Promise, Tally

MEMORY = 1 << 30  # bytes that opening an artefact of a few may add to the process: packages are imported for some
SECONDS = 60


class Evil:
    """What executes code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("executed",))


def big_header(folder: Path) -> Any:
    """A model whose header promises 100 GiB."""
    file = folder / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": [25 << 30], "data_offsets": [0, 100 << 30]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return lambda: rankgrad.load(file)


def long_header(folder: Path) -> Any:
    """A model whose header would be 2^60 bytes long."""
    file = folder / "model.safetensors"
    file.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    return lambda: rankgrad.load(file)


def sparse_model(folder: Path) -> Any:
    """A model with a hole of 100 GiB behind it, which its header accounts for."""
    file = folder / "model.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [100 << 30], "data_offsets": [0, 100 << 30]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + (100 << 30))
    return lambda: NeuralRanker.load(file)


def brackets(folder: Path) -> Any:
    """A model whose header is 60 MB of brackets."""
    file = folder / "model.safetensors"
    header = b'{"a":[' + b"[]," * 20_000_000 + b"[]]}"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return lambda: rankgrad.load(file)


def wide_network(folder: Path) -> Any:
    """A saved estimator, checksum and all, whose configuration asks for layers of 10^6 x 10^6 weights."""
    file = folder / "ranker.safetensors"
    tensors, facts = load_tensors(estimator() / "ranker.safetensors")
    facts["config"] = facts["config"].replace("hidden = [3]", "hidden = [1000000, 1000000]")
    save_tensors(file, tensors, facts)
    return lambda: NeuralRanker.load(file)


def many_layers(folder: Path) -> Any:
    """The same with 10^9 layers of a Transformer."""
    file = folder / "ranker.safetensors"
    tensors, facts = load_tensors(estimator() / "ranker.safetensors")
    facts["config"] = (
        facts["config"].replace('kind = "mlp"', 'kind = "transformer"').replace("layers = 2", "layers = 1000000000")
    )
    assert "1000000000" in facts["config"]
    save_tensors(file, tensors, facts)
    return lambda: rankgrad.load(file)


def wrong_facts(folder: Path) -> Any:
    """A saved estimator without half of its facts, and with those of other types."""
    file = folder / "ranker.safetensors"
    tensors, facts = load_tensors(estimator() / "ranker.safetensors")
    save_tensors(file, tensors, {**facts, "units": "many", "feature_names": 7, "parameters": [1]})
    return lambda: NeuralRanker.load(file)


def pickled_model(folder: Path) -> Any:
    """A pickle in place of a model."""
    file = folder / "model.safetensors"
    file.write_bytes(pickle.dumps(Evil()))
    return lambda: rankgrad.load(file)


def pickled_checkpoint(folder: Path) -> Any:
    """A pickle of torch in place of both checkpoints."""
    copy = Path(shutil.copytree(stopped(), folder / "run"))
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        torch.save({"weights": Evil()}, copy / name)
    return lambda: list(train_run(copy))


def network_by_name(folder: Path) -> Any:
    """A run whose configuration names a network in a module beside it, which does harm when it is imported."""
    Path("evil.py").write_text("import os\nos.mkdir('executed')\nclass Tower: pass\n")
    copy = Path(shutil.copytree(run(), folder / "run"))
    lines = (copy / "config.toml").read_text().replace('kind = "mlp"', 'kind = "evil:Tower"').splitlines(keepends=True)
    (copy / "config.toml").write_text("".join(lines[1:-1]))
    return lambda: [read() for read in (lambda: open_run(copy), lambda: NeuralRanker.load(copy))]


def linked_model(folder: Path) -> Any:
    """A run whose model is a link to another's."""
    copy = Path(shutil.copytree(run(), folder / "run"))
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to(run() / "model.safetensors")
    return lambda: rankgrad.load(copy).features


def linked_report(folder: Path) -> Any:
    """A run whose report is a link to a file outside, which a page would show."""
    copy = Path(shutil.copytree(run(), folder / "run"))
    (copy / "report.json").unlink()
    (copy / "report.json").symlink_to(run() / "report.json")
    return lambda: read_entries([copy])[0].name


def linked_folder(folder: Path) -> Any:
    """A run to resume in which the folder of TensorBoard's curves leads out."""
    copy = Path(shutil.copytree(stopped(), folder / "run"))
    (copy / ".extending").symlink_to(Path("elsewhere").resolve())
    return lambda: list(train_run(copy))


def linked_array(folder: Path) -> Any:
    """A prepared dataset whose features are a link to another file."""
    copy = Path(shutil.copytree(prepared(), folder / "prepared"))
    (copy / "train" / "features.npy").unlink()
    (copy / "train" / "features.npy").symlink_to(prepared() / "train" / "features.npy")
    return lambda: RankingDataset.open(copy / "train").features.shape


def _forged(folder: Path, name: str, change: Callable[[dict[str, Any], Path], None]) -> Path:
    """A prepared dataset with a manifest that agrees with what was changed."""
    copy = Path(shutil.copytree(prepared() / "train", folder / name))
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest, copy)
    (copy / "manifest.json").write_bytes(sealed(manifest))
    return copy


def array_outside(folder: Path) -> Any:
    """A prepared dataset that names an array in another folder."""

    def change(manifest: dict[str, Any], copy: Path) -> None:
        manifest["arrays"]["../outside"] = manifest["arrays"]["labels"]
        shutil.copy(copy / "labels.npy", folder / "outside.npy")

    copy = _forged(folder, "prepared", change)
    return lambda: RankingDataset.open(copy).labels


def _with_array(folder: Path, content: bytes) -> Any:
    def change(manifest: dict[str, Any], copy: Path) -> None:
        import zlib

        (copy / "labels.npy").write_bytes(content)
        manifest["arrays"]["labels"] |= {
            "bytes": len(content),
            "crc32": zlib.crc32(content),
            "sampled_crc32": zlib.crc32(content),
        }

    copy = _forged(folder, "prepared", change)
    return lambda: RankingDataset.open(copy).labels.sum()


def pickled_array(folder: Path) -> Any:
    """A prepared dataset whose labels are a pickle."""
    with open(folder / "labels", "wb") as file:
        np.save(file, np.array([Evil()], dtype=object), allow_pickle=True)
    return _with_array(folder, (folder / "labels").read_bytes())


def array_of_a_billion(folder: Path) -> Any:
    """A prepared dataset whose labels would be 10^12 numbers, of which there is none."""
    with open(folder / "labels", "wb") as file:
        facts = {"descr": "<f4", "fortran_order": False, "shape": (10**12,)}
        np.lib.format.write_array_header_1_0(file, facts)
    return _with_array(folder, (folder / "labels").read_bytes())


def array_of_nothing(folder: Path) -> Any:
    """A prepared dataset of 10^12 labels without any bytes each."""
    with open(folder / "labels", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|V0", "fortran_order": False, "shape": (10**12,)})
    return _with_array(folder, (folder / "labels").read_bytes())


def nested_report(folder: Path) -> Any:
    """A run whose report is nested a million deep."""
    copy = Path(shutil.copytree(run(), folder / "run"))
    (copy / "report.json").write_text('{"a":' * 1_000_000)
    return lambda: read_entries([copy])[0].name


def nested_toml(folder: Path) -> Any:
    """A configuration nested ten thousand deep."""
    (folder / "c.toml").write_text("[model]\nhidden = " + "[" * 10_000 + "]" * 10_000)
    return lambda: configure(str(folder / "c.toml"), {}, [])


def dotted_toml(folder: Path) -> Any:
    """A configuration with a key of a hundred thousand parts."""
    (folder / "c.toml").write_text(".".join(["model"] * 100_000) + " = 1")
    return lambda: configure(str(folder / "c.toml"), {}, [])


def long_integer(folder: Path) -> Any:
    """A configuration with a number of a million digits."""
    (folder / "c.toml").write_text("[train]\nepochs = " + "9" * 1_000_000)
    return lambda: configure(str(folder / "c.toml"), {}, [])


def sparse_configuration(folder: Path) -> Any:
    """A configuration of 100 GiB that is a hole."""
    copy = Path(shutil.copytree(run(), folder / "run"))
    os.truncate(copy / "config.toml", 100 << 30)
    return lambda: rankgrad.load(copy).features


def trees_elsewhere(folder: Path) -> Any:
    """A run of trees that names a model in another folder."""
    copy = Path(shutil.copytree(trees(), folder / "run"))
    (copy / "model.txt").rename(folder / "model.txt")
    facts = json.loads((copy / "trees.json").read_text())
    del facts["checksum"]
    facts["models"][0]["file"] = "../model.txt"
    (copy / "trees.json").write_bytes(sealed(facts))
    return lambda: open_run(copy).features


def large_trees(folder: Path) -> Any:
    """Trees of LightGBM that speak of 10^9 leaves and features."""
    copy = Path(shutil.copytree(trees(), folder / "run"))
    text = (
        (copy / "model.txt")
        .read_text()
        .replace("num_leaves=", "num_leaves=100000000", 1)
        .replace("max_feature_idx=", "max_feature_idx=1000000")
    )
    (copy / "model.txt").write_text(text)
    facts = json.loads((copy / "trees.json").read_text())
    del facts["checksum"]
    facts["models"][0]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (copy / "trees.json").write_bytes(sealed(facts))
    return lambda: open_run(copy).features


def exported_archive(folder: Path) -> Any:
    """An exported program that unpacks to 1 GiB."""
    with (
        zipfile.ZipFile(folder / "ranker.pt2", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("ranker/extra/rankgrad.json", "w") as entry,
    ):
        for _ in range(1 << 10):
            entry.write(b" " * (1 << 20))
    return lambda: read_export(folder / "ranker.pt2")


ROW = b"0 qid:1 1:0\n"


def gzip_text(folder: Path) -> Any:
    """Text that unpacks to a thousand times its size, 2 GiB."""
    block = gzip.compress(ROW * (1 << 20), 9)
    (folder / "bomb.txt.gz").write_bytes(block * 170)
    return lambda: len(read_lists(str(folder / "bomb.txt.gz")))


def bzip_text(folder: Path) -> Any:
    """The same in bzip2."""
    (folder / "bomb.txt.bz2").write_bytes(bz2.compress(ROW * (1 << 17)) * 200)
    return lambda: len(read_lists(str(folder / "bomb.txt.bz2")))


def gzip_table(folder: Path) -> Any:
    """A CSV file that unpacks to 2 GiB."""
    (folder / "bomb.csv.gz").write_bytes(
        gzip.compress(b"label,qid,a\n") + gzip.compress(b"0,1,0\n" * (1 << 22), 9) * 85
    )
    return lambda: len(read_lists(str(folder / "bomb.csv.gz")))


def parquet_rows(folder: Path) -> Any:
    """A Parquet file of some kilobytes with 2 x 10^8 rows."""
    import pyarrow
    import pyarrow.parquet

    part = pyarrow.table({name: np.zeros(1 << 20, np.float32) for name in ("label", "qid", "a", "b")})
    with pyarrow.parquet.ParquetWriter(folder / "bomb.parquet", part.schema, compression="zstd") as writer:
        for _ in range(60):
            writer.write_table(part)
    return lambda: len(read_lists(str(folder / "bomb.parquet")))


def arrow_rows(folder: Path) -> Any:
    """An Arrow file that unpacks to 4 GiB."""
    import pyarrow

    part = pyarrow.record_batch({name: np.zeros(1 << 20) for name in ("label", "qid", "a", "b")})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with (
        pyarrow.OSFile(str(folder / "bomb.arrow"), "w") as file,
        pyarrow.ipc.new_file(file, part.schema, options=options) as writer,
    ):
        for _ in range(128):
            writer.write_batch(part)
    return lambda: len(read_lists(str(folder / "bomb.arrow")))


def many_scores(folder: Path) -> Any:
    """20 million scores for four lists."""
    (folder / "scores.txt").write_bytes(b"1\n" * 20_000_000)
    return lambda: evaluate_scores(folder / "scores.txt", str(prepared()), "test", [], out=folder / "out")


def prepared_outside(folder: Path) -> Any:
    """Lists to prepare into a folder that is a link out: the link's own folder is written, as was asked for, and nothing else."""
    source = folder / "data"
    source.mkdir()
    for split in ("train", "vali", "test"):
        (source / f"{split}.txt").write_text("1 qid:1 1:0.5\n0 qid:1 1:0.25\n")
    (source / "prepared").symlink_to(Path("elsewhere").resolve() / "notes")
    return lambda: prepare(source).dataset


ARTEFACTS: list[Callable[[Path], Any]] = [
    big_header, long_header, sparse_model, brackets, wide_network, many_layers, wrong_facts, pickled_model, pickled_checkpoint,
    network_by_name, linked_model, linked_report, linked_folder, linked_array, array_outside, pickled_array, array_of_a_billion,
    array_of_nothing, nested_report, nested_toml, dotted_toml, long_integer, sparse_configuration, trees_elsewhere, large_trees,
    exported_archive, gzip_text, bzip_text, gzip_table, parquet_rows, arrow_rows, many_scores, prepared_outside,
]  # fmt: skip


def try_artefact(make: Callable[[Path], Any]) -> str:
    """What opening it did that it should not have done; an empty text says nothing."""
    made = [run(), stopped(), trees(), estimator(), prepared()]  # once, and not by the child
    assert all(made)
    with tempfile.TemporaryDirectory(prefix="rankgrad-hostile-") as name:
        top = Path(name)
        (top / "elsewhere").mkdir()
        (top / "elsewhere" / "notes").write_text("mine")
        (top / "artefact").mkdir()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _open(make, top, writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        wrong = [] if said.startswith("held") else [said or f"the process ended with status {status}"]
        wrong += ["code was executed"] if list(top.rglob("executed")) else []
        if [path.name for path in (top / "elsewhere").iterdir()] != ["notes"] or (
            top / "elsewhere" / "notes"
        ).read_text() != "mine":
            wrong.append("something outside was changed")
        return f"{make.__name__}: {'; '.join(wrong)}" if wrong else ""


def _open(make: Callable[[Path], Any], top: Path, writing: int) -> None:
    """In the child: make the artefact, open it with a limit on memory, and say what came of it."""
    said = "the attempt itself failed"
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.chdir(top)
        read = make(top / "artefact")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        begun = time.perf_counter()
        try:
            said = f"held: it gave {read()!r:.80}" if make.__name__ not in REFUSED else f"it was opened: {read()!r:.80}"
        except ValueError as error:
            said = f"held: {error}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        said += f" ({time.perf_counter() - begun:.1f} s)"
    except BaseException as error:
        said = f"the attempt itself failed: {type(error).__name__}: {error}"
    finally:
        os.write(writing, said.encode("utf-8", "replace")[:4000])
        os._exit(0)


REFUSED = {make.__name__ for make in ARTEFACTS} - {"prepared_outside"}


def attempt(times: int, _: int) -> Tally:
    """The first `times` of the artefacts."""
    torch.set_num_threads(1)
    counted = Tally()
    for make in ARTEFACTS[:times]:
        counted.add(try_artefact(make))
    return counted


PROMISES = [
    Promise(
        "hostile",
        "an artefact made to do harm executes nothing, takes no memory its bytes do not account for, leads to no other folder",
        len(ARTEFACTS),
        attempt,
    )
]
