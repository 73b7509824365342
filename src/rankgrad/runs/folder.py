"""A run folder is the whole truth of a run; this is its only writer and its only reader.

    config.toml               the configuration, complete
    history.jsonl             a line per epoch
    model.safetensors         the ranker: best weights, feature scaling, how its model is built
    trees.json, model.*       of boosted trees instead: what was grown, and the model in the library's own format
    queries.safetensors       per query of one split: metrics, NDCG@k by k, list length, relevant documents
    scores.safetensors        per document of that split: score, label, row of the source, id
    report.json               metrics of every split under every rule for empty queries; seed, versions, machine, seconds
    init.safetensors          the weights and the scaling it started from, if those of another run
    explanation.json          what its ranking rests on, where `rankgrad explain` was asked
    checkpoint*.safetensors   where to go on after an interruption, or with more epochs
    tensorboard/              the curves again, if asked for
    .extending/               while a finished run is trained for more epochs: the run that is to take its place

report.json is written last: its presence means that the run is finished.

Every file is checked when it is read. Tensors and JSON carry a checksum; config.toml has one in its last line; that of history.jsonl is
in the checkpoint and in the report. Each also holds the identity of the run, a digest of its configuration and its lists, so that
files of two runs are not mixed up. Folders of earlier versions have neither, and open as they did.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import Scaling
from rankgrad.files import (
    fsync_folder,
    load_tensors,
    parsed_json,
    read_text_file,
    refuse_links,
    save_tensors,
    sealed,
    unsealed,
    write_atomically,
)
from rankgrad.ranker import Ranker
from rankgrad.runs.provenance import machine_facts, versions
from rankgrad.runs.text import nullable
from rankgrad.training.config import MOST_OF_CONFIG, Config, dumps, loads, parse_toml
from rankgrad.training.evaluate import summarise
from rankgrad.training.network import OwnModel
from rankgrad.training.start import MEMBERS, Start
from rankgrad.training.state import under

CONFIG, HISTORY, MODEL, QUERIES, SCORES, REPORT = (
    "config.toml",
    "history.jsonl",
    "model.safetensors",
    "queries.safetensors",
    "scores.safetensors",
    "report.json",
)
TREES = "trees.json"
INIT = "init.safetensors"
EXPLANATION = "explanation.json"
CURVE = {k: f"ndcg@{k}" for k in (*range(1, 21), 30, 50, 100)}  # cut-offs that a report draws
REST_OF_CONVENTION = "discount 1 / log2(rank + 1), ties in input order"
CONVENTION = f"gain 2^y - 1, {REST_OF_CONVENTION}"
_AGAIN = "; put a copy of it back, or train the run again"
IDENTITY = "identity"  # the key of facts and reports that says which run they are of
_EMPTY = "expected the configuration that the run was begun with; put a copy of it back, or start a new run"
_HEAD = "# The run's own copy, which its last line seals. For other settings change another copy, and train that: rankgrad train FILE\n"
_LAST = re.compile(rb"(# run )([0-9a-f]{32})(, sealed by sha256 )([0-9a-f]{64})\n")


def convention_of(gain: str | Sequence[float]) -> str:
    """How metrics are to be read, by what a label is worth to them.

    >>> convention_of((0, 1, 5))
    'gains 0, 1, 5 of the grades 0 to 2, discount 1 / log2(rank + 1), ties in input order'
    """
    if isinstance(gain, str):
        worth = "gain y" if gain == "linear" else "gain 2^y - 1"
    else:
        worth = f"gains {', '.join(f'{value:g}' for value in gain)} of the grades 0 to {len(gain) - 1}"
    return f"{worth}, {REST_OF_CONVENTION}"


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run; a config.toml alone may lie beside lists too."""
    folder = Path(folder)
    return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (HISTORY, MODEL, TREES))


def is_finished(folder: Path) -> bool:
    """Whether a run has ended."""
    return (folder / REPORT).is_file()


def expect_finished(folder: Path, needed: str = REPORT) -> None:
    """Refuse a folder that is not a run, or whose run has not ended: the file `needed` is not there."""
    if folder.is_file():
        raise ValueError(
            f"{folder} is a file; expected a run's folder, which holds results; a saved ranker has none: measure it on lists "
            "with `rankgrad evaluate`"
        )
    if not (folder / needed).is_file():
        state = "has not finished" if (folder / CONFIG).is_file() else "is not a run"
        raise ValueError(f"{folder} {state}: it has no {needed}; expected a folder that `rankgrad train` finished")


# --- configuration ----------------------------------------------------------------------------------------------------


def make_folder(folder: Path, config: Config) -> None:
    """Begin a run: its configuration in a new folder, which `begin_run` has locked."""
    expect_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(folder / CONFIG, _sealed_config(config, make_identity(config)))
    except OSError:
        with contextlib.suppress(OSError):  # a folder that was there before, with something in it
            folder.rmdir()
        raise


def expect_new(folder: Path) -> None:
    """Refuse a folder for a new run that holds something."""
    if folder.exists() and (not folder.is_dir() or any(path.suffix != ".writing" for path in folder.iterdir())):
        raise ValueError(f"{folder} exists already; expected a new folder; choose another --out, or --resume {folder}")


def rewrite_config(folder: Path, config: Config, lists: str | None = None) -> None:
    """Replace the configuration of a run that has just begun by one whose numbers follow its data.

    `lists` is a fingerprint of these, where nothing has been learned yet: the identity of the run depends on them too.
    """
    before = identity_of(folder)
    if before is None:  # an earlier version began it
        write_atomically(folder / CONFIG, dumps(config).encode())
    else:
        write_atomically(
            folder / CONFIG, _sealed_config(config, before if lists is None else make_identity(config, lists))
        )


def make_identity(config: Config, lists: str = "") -> str:
    """A digest of what a run learns from and how; how many threads of which device do it is no part of that."""
    same = dataclasses.replace(config, train=dataclasses.replace(config.train, threads=0, device="auto"))
    return digest_of(dumps(same), lists)


def digest_of(*parts: str | bytes) -> str:
    """An identity from what tells one run from another."""
    found = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        found.update(len(content).to_bytes(8, "little") + content)
    return found.hexdigest()[:32]


def identity_of(folder: Path) -> str | None:
    """Which run a folder is of, by its configuration, or without one by its report; None: an earlier version wrote it."""
    if (folder / CONFIG).is_file():
        return _unsealed_config(folder / CONFIG)[1]
    return read_report(folder).get(IDENTITY) if is_finished(folder) else None


def expect_of_run(folder: Path, name: str, identity: Any) -> None:
    """Refuse a file that holds the identity of another run than its folder's."""
    known = identity_of(folder)
    if known is None and identity is not None and (folder / CONFIG).is_file() and not (folder / CONFIG).stat().st_size:
        raise ValueError(f"{folder / CONFIG} is empty; {_EMPTY}")
    if known is None or identity == known:
        return
    if is_extending(folder) and identity == identity_of(extension(folder)):  # killed while it was put in place
        return
    other = CONFIG if (folder / CONFIG).is_file() else REPORT
    wrong = (
        "is damaged or of an earlier run: it does not say that it belongs to"
        if identity is None
        else "is of another run than"
    )
    raise ValueError(
        f"{folder / name} {wrong} {folder / other}; expected files of one run; put back a copy of the one that was exchanged, or "
        "train the run again"
    )


def _identified(identity: str | None) -> dict[str, Any]:
    """The facts that say which run tensors are of; none in the folder of an earlier version."""
    return {} if identity is None else {IDENTITY: identity}


def _sealed_config(config: Config, identity: str) -> bytes:
    words = f"{_HEAD}{dumps(config)}# run {identity}, sealed by sha256 ".encode()
    return words + hashlib.sha256(words).hexdigest().encode() + b"\n"


def _unsealed_config(file: Path) -> tuple[str, str | None]:
    """The text of a run's configuration, and the run's identity, which is None of one that an earlier version wrote."""
    refuse_links(file.parent)
    content, head = read_text_file(file, MOST_OF_CONFIG), _HEAD.encode()
    last = content[content.rfind(b"\n", 0, -1) + 1 :]
    found = _LAST.fullmatch(last)
    if found is None and not content.startswith(head) and not (head.startswith(content) and content.strip()):
        try:
            return content.decode("utf-8"), None
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not text; expected a configuration in TOML") from None
    if found is None or hashlib.sha256(content[:-65]).hexdigest().encode() != found[4]:
        raise ValueError(
            f"{file} was damaged or changed: its last line does not agree with the others; expected it as training wrote it; put a "
            "copy of it back; to train with other settings, change a copy and give that to `rankgrad train`"
        )
    return content.decode("utf-8"), found[2].decode()


def expect_run(folder: Path) -> None:
    """Refuse a folder that is not a run."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a run: it has no {CONFIG}; expected a folder that `rankgrad train` made")


def read_config(folder: Path) -> Config:
    """The configuration of a run; keys that no longer exist are left out with a warning."""
    expect_run(folder)
    file = folder / CONFIG
    if not read_text_file(file, MOST_OF_CONFIG).strip():
        raise ValueError(f"{file} is empty; {_EMPTY}")
    return loads(_unsealed_config(file)[0], str(file), of_run=True)


def read_config_of(source: Path) -> Config:
    """The configuration of a run, or of a saved ranker."""
    if source.is_dir():
        return read_config(source)
    _, facts = load_tensors(source)
    if "config" not in facts:
        raise ValueError(
            f"{source} does not say how its model is built; expected a run, or a file that Ranker.save wrote"
        )
    return loads(facts["config"], f"the configuration in {source}", of_run=True)


def read_config_table(folder: Path) -> dict[str, Any]:
    """The configuration as it was written, for showing it: of any version, and empty where there is none."""
    file = folder / CONFIG
    return parse_toml(_unsealed_config(file)[0], str(file)) if file.is_file() else {}


# --- more epochs of a finished run ------------------------------------------------------------------------------------


def extension(folder: Path) -> Path:
    """Where a finished run is trained for more epochs; until that is done its own files stay as they are."""
    return folder / ".extending"


def is_extending(folder: Path) -> bool:
    """Whether that has begun and is not done."""
    return (extension(folder) / CONFIG).is_file()


def is_done(folder: Path) -> bool:
    """Whether a run has ended and is not being extended: there is nothing to resume."""
    return is_finished(folder) and not is_extending(folder)


def adopt_extension(folder: Path) -> None:
    """Put the files of the extended run in place of the run's own.

    The configuration is the last: killed before it, the run is still being extended, and resuming it does this again.
    """
    place = extension(folder)
    (folder / EXPLANATION).unlink(missing_ok=True)  # it explains another model
    found = sorted(path.relative_to(place) for path in place.rglob("*") if path.is_file())
    for name in sorted(found, key=lambda name: (name == Path(CONFIG), name == Path(REPORT))):
        (folder / name).parent.mkdir(exist_ok=True)
        (place / name).replace(folder / name)
    fsync_folder(folder)
    shutil.rmtree(place)


# --- the ranker -------------------------------------------------------------------------------------------------------


def write_ranker(folder: Path, ranker: Ranker) -> None:
    """Write the model with all that is needed to use it."""
    ranker.save(folder / MODEL, _identified(identity_of(folder)))


def read_ranker(folder: Path, device: str = "auto", model: OwnModel = None) -> Ranker:
    """The ranker of a finished run; no code from the folder is executed: a network of one's own is to be given."""
    if (folder / TREES).is_file():
        raise ValueError(
            f"{folder} holds trees of another library, which are no model of ours; expected a run of networks; score with "
            "`rankgrad evaluate`, `rankgrad rank` or rankgrad.runs.ensemble.open_run"
        )
    for name in (MODEL, CONFIG):
        expect_finished(folder, name)
    ranker = Ranker.load(folder / MODEL, device, model=model, config=read_config(folder), hint=_AGAIN)
    expect_of_run(folder, MODEL, ranker.facts.get(IDENTITY))
    return ranker


def read_start(source: Path) -> Start:
    """What a new run may start from: the weights of a finished run or a saved ranker, with their scaling and columns."""
    if (source / TREES).is_file():
        raise ValueError(
            f"{source} holds trees, which have no weights to start from; expected a run of networks; choose another --init"
        )
    if source.is_dir():
        refuse_links(source)
        expect_finished(source, MODEL)
    tensors, facts = load_tensors(source / MODEL if source.is_dir() else source)
    if source.is_dir():
        expect_of_run(source, MODEL, facts.get(IDENTITY))
    try:
        scaling = Scaling.from_state({name: tensor.numpy() for name, tensor in under(tensors, "scaling.").items()})
        names = tuple(facts["feature_names"]) if facts.get("feature_names") else None
    except (LookupError, TypeError):
        raise _not_whole(source) from None
    weights = under(tensors, "model.")
    if "members.weights" in weights:  # of those that were kept
        checkpoints = Checkpoints(source)
        if not source.is_dir() or not checkpoints.exist():
            raise ValueError(
                f"{source} holds the members that were kept, and all of them are needed to start from; expected a run with its "
                "checkpoint.safetensors; put a copy back, or train anew without --init"
            )
        state, _, complaints = checkpoints.load()
        if complaints:  # the one before it holds other weights
            raise ValueError(f"{complaints[0]}{_AGAIN}")
        weights = {MEMBERS: state["members.best"]}
    return Start(weights, scaling, names, str(source))


# --- history ----------------------------------------------------------------------------------------------------------


class HistoryFile:
    """history.jsonl: a line per epoch, rewritten whole, because a line that was cut short is of no use."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / HISTORY
        self._lines: list[str] = []

    def cut(self, epochs: int, before: Path | None = None, known: Mapping[str, Any] | None = None) -> None:
        """Keep the lines of the first epochs, which the checkpoint knows of; where there are none yet, those in `before`.

        `known` is what `facts` gave when the checkpoint was written.
        """
        places = [self._path, *([] if before is None else [before / HISTORY])]
        found = next((path for path in places if path.exists()), None)
        if found is not None:
            lines = read_text_file(found).splitlines(keepends=True)[: epochs if known is None else known["lines"]]
            if known is not None and _history_facts(b"".join(lines)) != known:
                raise _damaged_history(found)
            self._lines = [line.decode().rstrip("\n") for line in lines]
        self._write()

    def facts(self) -> dict[str, Any]:
        """How many lines there are, and their checksum."""
        return _history_facts(self._content())

    def add(self, line: dict[str, Any]) -> None:
        """Add an epoch."""
        self._lines.append(json.dumps(nullable(line)))
        self._write()

    def _content(self) -> bytes:
        return "".join(f"{line}\n" for line in self._lines).encode()

    def _write(self) -> None:
        write_atomically(self._path, self._content())


def read_history(folder: Path) -> list[dict[str, Any]]:
    """A dict per epoch, empty where there is none: epoch, loss, metric, ...; null where a number was NaN."""
    file = folder / HISTORY
    if not file.is_file():
        return []
    content = read_text_file(file)
    known = read_report(folder).get("history") if is_done(folder) else None
    if known is not None and known != _history_facts(content):
        raise _damaged_history(file)
    try:
        epochs = [parsed_json(line) for line in content.decode("utf-8").splitlines()]
    except ValueError:
        raise _damaged_history(file) from None
    if not all(isinstance(epoch, dict) and isinstance(epoch.get("epoch"), int) for epoch in epochs):
        raise _damaged_history(file)
    return epochs


def _history_facts(content: bytes) -> dict[str, Any]:
    return {"lines": content.count(b"\n"), "sha256": hashlib.sha256(content).hexdigest()}


def _damaged_history(file: Path) -> ValueError:
    return ValueError(
        f"{file} is damaged, or of another run; expected a JSON object per epoch, as training wrote it; put a copy of it back, or "
        "remove it to do without"
    )


# --- per query --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerQuery:
    """Per-query values [Q] of one split, NaN at empty queries; what an older file does not hold is None or empty."""

    split: str
    query_ids: list[Any]
    metrics: dict[str, np.ndarray]  # by name, float64
    documents: np.ndarray | None = None  # int64
    relevant: np.ndarray | None = None  # int64
    curve: dict[int, np.ndarray] = field(default_factory=dict)  # NDCG@k by k, float32


def kept_split(splits: Mapping[str, RankingDataset]) -> str:
    """The split whose per-query values are kept: the only one, or test where it has a relevant document."""
    if len(splits) == 1:
        return next(iter(splits))
    return "test" if "test" in splits and (splits["test"].labels > 0).any() else "vali"


def metrics_to_measure(splits: Mapping[str, RankingDataset], metrics: Sequence[str]) -> dict[str, list[str]]:
    """The metrics of each split that `write_results` needs: those of the report, and a curve on the split that is kept."""
    wanted = {split: list(metrics) for split in splits}
    return wanted | {kept_split(splits): list(dict.fromkeys([*metrics, *CURVE.values()]))}


def write_per_query(
    folder: Path,
    split: str,
    data: RankingDataset,
    values: Mapping[str, np.ndarray],
    metrics: Sequence[str],
    identity: str | None = None,
) -> None:
    """Write queries.safetensors from the values [Q] of the metrics and of the curve."""
    tensors = {name: torch.from_numpy(values[name]) for name in metrics}
    tensors["documents"] = torch.from_numpy(data.lengths)
    tensors["relevant"] = torch.from_numpy(np.add.reduceat(data.labels > 0, data.offsets[:-1], dtype=np.int64))
    curve = np.stack([values[name] for name in CURVE.values()])
    tensors["curve"] = torch.from_numpy(curve.astype(np.float32))  # [K, Q]
    facts = {"split": split, "query_ids": data.query_ids.tolist(), "metrics": list(metrics), "cutoffs": list(CURVE)}
    save_tensors(folder / QUERIES, tensors, facts | _identified(identity))


def read_per_query(folder: Path) -> PerQuery:
    """The per-query values of a finished run; an older file holds the metrics alone."""
    expect_finished(folder)
    tensors, facts = load_tensors(folder / QUERIES, _AGAIN)
    expect_of_run(folder, QUERIES, facts.get(IDENTITY))
    try:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        found = PerQuery(
            split=str(facts["split"]),
            query_ids=list(facts["query_ids"]),
            metrics={name: arrays[name] for name in facts["metrics"]},
            documents=arrays.get("documents"),
            relevant=arrays.get("relevant"),
            curve={int(k): of for k, of in zip(facts.get("cutoffs", ()), arrays.get("curve", ()))},
        )
    except (LookupError, TypeError, ValueError):
        raise _not_whole(folder / QUERIES) from None
    per_query = [*found.metrics.values(), *found.curve.values(), found.documents, found.relevant]
    if any(array is not None and array.shape != (len(found.query_ids),) for array in per_query):
        raise _not_whole(folder / QUERIES)
    return found


def _not_whole(file: Path) -> ValueError:
    return ValueError(f"{file} does not hold what training writes there; was it changed?{_AGAIN}")


# --- per document -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerDocument:
    """Scores and labels [N] of the documents of the queries in queries.safetensors, list after list, and what they are called."""

    scores: np.ndarray
    labels: np.ndarray
    rows: np.ndarray  # of the source, from 0
    ids: Sequence[Any] | None  # where the source has any


def write_per_document(folder: Path, data: RankingDataset, scores: np.ndarray, identity: str | None = None) -> None:
    """Write scores.safetensors: scores [N] of lists in the dataset's order."""
    rows = np.arange(len(scores)) if data.rows is None else data.rows
    arrays = {"scores": scores, "labels": data.labels, "rows": rows}
    if data.document_ids is not None and data.document_ids.dtype.kind != "U":
        arrays["ids"] = data.document_ids
    elif data.document_ids is not None:  # end to end: a JSON of all of them would be longer than safetensors takes
        texts = [text.encode("utf-8", "surrogatepass") for text in data.document_ids.tolist()]
        arrays["texts"] = np.frombuffer(b"".join(texts), np.uint8)
        arrays["ends"] = np.cumsum([len(text) for text in texts])
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    save_tensors(folder / SCORES, tensors, _identified(identity))


def read_per_document(folder: Path) -> PerDocument | None:
    """The scores of a finished run; None where it kept none."""
    if not (folder / SCORES).is_file():
        return None
    tensors, facts = load_tensors(folder / SCORES, _AGAIN)
    expect_of_run(folder, SCORES, facts.get(IDENTITY))
    try:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        ids: Sequence[Any] | None = arrays["ids"].tolist() if "ids" in arrays else None
        if "texts" in arrays:
            text, ends = arrays["texts"].tobytes(), arrays["ends"].tolist()
            ids = [text[start:end].decode("utf-8", "surrogatepass") for start, end in pairwise([0, *ends])]
        found = PerDocument(arrays["scores"], arrays["labels"], arrays["rows"], ids)
    except (LookupError, TypeError, ValueError):
        raise _not_whole(folder / SCORES) from None
    if any(array.shape != (found.scores.size,) for array in (found.scores, found.labels, found.rows)):
        raise _not_whole(folder / SCORES)
    return found


# --- report -----------------------------------------------------------------------------------------------------------


def write_results(
    folder: Path,
    splits: Mapping[str, RankingDataset],
    results: Mapping[str, Mapping[str, np.ndarray]],
    metrics: Sequence[str],
    facts: Mapping[str, Any],
    *,
    device: torch.device,
    threads: int,
    scores: np.ndarray | None = None,
    convention: str = CONVENTION,
    identity: str | None = None,
) -> dict[str, Any]:
    """Write the per-query values of what `metrics_to_measure` named and, last, the report, which comes back.

    `facts` holds what was trained and how: loss, data, seed, selection, best_epoch, epochs, seconds, processes. `scores` are
    those of the split that is kept, [N], where they are what was measured; `identity` that of a folder without a configuration.
    """
    split = kept_split(splits)
    identity = identity_of(folder) if (folder / CONFIG).is_file() else identity
    write_per_query(folder, split, splits[split], results[split], metrics, identity)
    if scores is not None:
        write_per_document(folder, splits[split], scores, identity)
    known = versions()
    report = {
        "loss": facts["loss"],
        "metrics": {split: summarise({name: of[name] for name in metrics}) for split, of in results.items()},
        "convention": f"{convention}; {facts['selection']}",
        "splits": {split: _counts(data) for split, data in splits.items()},
        **facts,
        "commit": known.pop("commit"),
        "versions": known,
        "machine": machine_facts(device, threads),
    }
    if (folder / HISTORY).is_file():
        report["history"] = _history_facts((folder / HISTORY).read_bytes())
    write_sealed(folder, REPORT, report, identity)
    return read_report(folder)


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a finished run."""
    expect_finished(folder)
    report = read_sealed(
        folder, REPORT, "expected what `rankgrad train` wrote; put a copy of it back, or train the run again"
    )
    tables = [report.get(key, {}) for key in ("metrics", "splits", "versions", "machine")]
    plain = [report.get(key) for key in ("best_epoch", "seconds")]
    if not all(isinstance(of, dict) for of in tables) or any(isinstance(of, (list, dict)) for of in plain):
        raise _not_whole(folder / REPORT)
    return report


def write_sealed(folder: Path, name: str, facts: Mapping[str, Any], identity: str | None = None) -> None:
    """Write a JSON file of a run with its checksum; `identity` as in `write_results`."""
    identity = identity_of(folder) if (folder / CONFIG).is_file() else identity
    write_atomically(folder / name, sealed(nullable(facts) | {IDENTITY: identity}))


def read_sealed(folder: Path, name: str, remedy: str) -> dict[str, Any]:
    """What `write_sealed` wrote into a run's folder; JSON of an earlier version is taken as it is, in the folder of an earlier version."""
    try:
        refuse_links(folder)
        facts = unsealed(read_text_file(folder / name), [IDENTITY])
    except ValueError as error:
        raise ValueError(f"{folder / name} is damaged ({error}); {remedy}") from None
    if name != REPORT or (folder / CONFIG).is_file():
        expect_of_run(folder, name, facts.get(IDENTITY))
    return facts


def _counts(data: RankingDataset) -> dict[str, int]:
    empty = data.describe().empty_queries
    return {"queries": len(data), "documents": len(data.labels), "empty_queries": empty}


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Checkpoints:
    """Two generations of a run's checkpoint: the last and the one before.

    A crash may leave a third, written and not yet in its place: `load` looks at it first and puts it there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.next = folder / "checkpoint.next.safetensors"
        self.last = folder / "checkpoint.safetensors"
        self.before = folder / "checkpoint.previous.safetensors"
        self._damaged: list[Path] = []

    def exist(self) -> bool:
        """Whether there is anything to load, good or bad."""
        return any(path.exists() for path in (self.next, self.last, self.before))

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a new generation; the last one becomes the one before, unless it was found damaged."""
        save_tensors(self.next, tensors, {**facts, **_identified(identity_of(self._folder))})
        self._rotate()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
        """The newest good generation, and a sentence for each newer one that was not good."""
        complaints: list[str] = []
        for path in (self.next, self.last, self.before):
            if path.exists():
                try:
                    tensors, facts = load_tensors(path)
                    expect_of_run(self._folder, path.name, facts.pop(IDENTITY, None))
                except ValueError as error:
                    complaints.append(str(error))
                    self._damaged.append(path)
                    continue
                if path == self.next:
                    self._rotate()
                return tensors, facts, complaints
        raise ValueError("; ".join(complaints) or f"{self.last} does not exist; expected a checkpoint of a run")

    def _rotate(self) -> None:
        """Put the file that has been written in its place."""
        if self.last.exists() and self.last not in self._damaged:
            self.last.replace(self.before)
        self.next.replace(self.last)
        fsync_folder(self.last.parent)
        self._damaged.clear()


def discard_unlearned(folder: Path) -> None:
    """Remove a run that failed before it learned anything, so that the same command can be given again."""
    if Checkpoints(folder).exist():
        return
    with contextlib.suppress(OSError):  # a folder that cannot be removed stays
        written = (HISTORY, INIT, TREES, QUERIES, SCORES, "model*", ".*.writing")
        for path in [path for pattern in written for path in folder.glob(pattern)]:
            path.unlink()
        for path in folder.glob(".scaled-*"):
            shutil.rmtree(path)
        if [path.name for path in folder.iterdir()] == [CONFIG]:  # without it, what somebody put there would be no run
            (folder / CONFIG).unlink()
        folder.rmdir()
