"""Scores that another program gave to our lists: reading them, and keeping them as a folder that reads like a run's.

A file is a number per row, a TREC run, or a table (Parquet, CSV, Arrow) with a column `score`.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.tables.arrow import TEXT, expect_numbers, kind_of, open_table, plain, reads_as_number
from rankgrad.files import expect_no_holes, replacing
from rankgrad.inert import inert_cell
from rankgrad.metrics import parse_metric
from rankgrad.runs import folder as files
from rankgrad.runs.provenance import ask_other_programs
from rankgrad.training.config import Train
from rankgrad.training.evaluate import measure

# What a table calls its columns; the first of each is `rankgrad rank --format csv`'s.
SCORE = "score"
QUERY = ("qid", "query", "query_id")
DOCUMENT = ("document", "document_id", "docid", "doc_id", "docno")
ROW = "row"
SELECTION = "scores from elsewhere"
WRITTEN = {files.QUERIES, files.SCORES, files.REPORT}
EXPECTED = "expected a number per line, or lines QUERY Q0 DOCUMENT RANK SCORE TAG, or a Parquet or CSV file"


def read_scores(
    file: Path, data: RankingDataset, *, qid: str = QUERY[0], document: str | None = DOCUMENT[0]
) -> np.ndarray:
    """The scores of all documents, in the dataset's order, [N] float64.

    - `file`: a number per row of the source, in its order; a TREC run, whose rank column is not looked at; or a table with the
      column `score`, which is in the order of the source, or has the columns `qid` and `document` too.
    - `data`: the lists. A DOCUMENT is its id where documents have any, or its row in the source, counted from 1.
    - `qid`, `document`: what a table may call its columns of ids instead.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist; expected a file with scores; check the path")
    if kind_of(file) is not None and not _is_bare(file):
        return _of_table(file, data, qid, document)
    lines = _lines(file, 2 * len(data.labels) + 1000)
    fields = len(lines[0][1]) if lines else 1
    if fields not in (1, 6):
        number, words = lines[0]
        raise ValueError(f"{file}, line {number} has {len(words)} fields; {EXPECTED}")
    for number, words in lines:
        if len(words) != fields:
            raise ValueError(
                f"{file}, line {number} has {len(words)} fields and the first has {fields}; expected as many in every line; "
                "is the file whole?"
            )
    scores = _numbers(
        [words[-2 if fields == 6 else 0] for _, words in lines], lambda at: f"{file}, line {lines[at][0]}"
    )
    if fields == 1:
        return _in_order(file, scores, data)
    queries, documents = [words[0] for _, words in lines], [words[2] for _, words in lines]
    return _by_name(file, queries, documents, scores, data, lambda at: f"{file}, line {lines[at][0]}")


def keep_scores(
    folder: Path,
    name: str,
    scores: np.ndarray,
    data: RankingDataset,
    *,
    split: str,
    metrics: Sequence[str] = (),
    source: str = "",
    overwrite: bool = False,
    gain: str | tuple[float, ...] = "exp2",
) -> dict[str, np.ndarray]:
    """Measure scores [N] and write them as a folder that `compare` and `report` take; the metrics per query, [Q].

    - `folder`: appears whole or not at all. One that exists is refused, or replaced with `overwrite` if it holds such scores.
    - `name`: of whoever gave the scores.
    - `data`, `split`: the lists they are of, and of which split these are: runs are compared on the same one.
    - `metrics`: to report; by default those of a run.
    - `source`: where the lists come from.
    - `gain`: what a label is worth to metrics that take one: "exp2", "linear", or a number for each of the grades 0, 1, ...
    """
    started = time.perf_counter()
    if folder.exists():
        ours = is_elsewhere(folder) and {path.name for path in folder.iterdir()} <= WRITTEN  # all of it is replaced
        if not (overwrite and ours):
            raise ValueError(
                f"{folder} exists already; expected a new folder; choose another --out"
                + (", or --overwrite" if ours else "")
            )
    names = tuple(dict.fromkeys(parse_metric(metric).name for metric in metrics)) or Train().metrics
    wanted = files.metrics_to_measure({split: data}, names)
    values = {
        of: measure(scores, data, [parse_metric(name, gain) for name in names_of]) for of, names_of in wanted.items()
    }
    ask_other_programs()
    with replacing(folder) as building:
        facts = {
            "loss": name,
            "name": name,
            "selection": SELECTION,
            "data": os.path.abspath(source) if Path(source).exists() else source,
            "seconds": round(time.perf_counter() - started, 3),
        }
        files.write_results(
            building,
            {split: data},
            values,
            names,
            facts,
            device=torch.device("cpu"),
            threads=torch.get_num_threads(),
            scores=scores,
            convention=files.convention_of(gain),
            identity=files.digest_of(name, split, scores.tobytes(), data.labels.tobytes(), data.offsets.tobytes()),
        )
    return {metric: values[split][metric] for metric in names}


def is_elsewhere(folder: Path) -> bool:
    """Whether a folder holds scores from elsewhere, and no model."""
    of_run = (files.CONFIG, files.MODEL, files.TREES)
    has = {name for name in (*of_run, files.SCORES, files.REPORT) if (folder / name).is_file()}
    return has == {files.SCORES, files.REPORT}


# --- files ------------------------------------------------------------------------------------------------------------


def _lines(file: Path, most: int) -> list[tuple[int, list[str]]]:
    """The words of every line that is not blank, with its number."""
    lines = []
    expect_no_holes(file)
    try:
        with file.open(encoding="utf-8-sig") as text:
            for number, line in enumerate(text, 1):
                if words := line.split(maxsplit=20):
                    lines.append((number, words))
                if len(lines) > most:
                    raise ValueError(
                        f"{file} holds more than {most:,} lines, and the lists have fewer documents; expected one for each"
                    )
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text; {EXPECTED}") from None
    return lines


def _is_bare(file: Path) -> bool:
    """Whether a CSV file is a number per line, without a line of names."""
    if kind_of(file) not in TEXT or file.suffix.lower() not in TEXT:  # packed ones are tables
        return False
    with file.open("rb") as lines:
        return reads_as_number(lines.readline(64).decode("utf-8-sig", "replace").strip() or "no number")


def _numbers(texts: Sequence[Any], where: Callable[[int], str]) -> np.ndarray:
    scores = np.empty(len(texts))
    for at, text in enumerate(texts):
        try:
            scores[at] = math.nan if text is None or "_" in str(text) else float(text)
        except ValueError:
            scores[at] = math.nan
        if not math.isfinite(scores[at]):
            raise ValueError(f"{where(at)}: the score is {text!r}; expected a finite number")
    return scores


def _of_table(file: Path, data: RankingDataset, qid: str, document: str | None) -> np.ndarray:
    table = open_table(file, 0, qid, lambda name: name == SCORE)
    columns = table.arrow.column_names
    if SCORE not in columns:
        raise ValueError(
            f"{file} has no column {SCORE!r}; it has {', '.join(map(repr, columns[:12]))}; expected one of numbers; rename it"
        )
    expect_numbers(table, SCORE, "convert the column")
    scores = _numbers(plain(table.arrow[SCORE]).to_pylist(), lambda at: f"{file}, row {at + 1}, column {SCORE!r}")
    query = next((name for name in (qid, *QUERY) if name in columns), None)
    named = next((name for name in (document, *DOCUMENT, ROW) if name in columns), None)
    queries = _texts(table.arrow[query], f"{file}, column {query!r}") if query is not None else None
    if named is not None:
        if queries is None:
            raise ValueError(
                f"{file} has a column {named!r} but no column {qid!r}; expected the query of each document"
            )
        documents = _texts(table.arrow[named], f"{file}, column {named!r}")
        lists = dataclasses.replace(data, document_ids=None) if named == ROW else data
        return _by_name(file, queries, documents, scores, lists, lambda at: f"{file}, row {at + 1}")
    found = _in_order(file, scores, data)
    own = np.repeat(data.query_ids, data.lengths)
    for at, (query, expected) in enumerate(zip(queries or (), data.in_source_order(own).tolist())):
        if query != str(expected):
            raise ValueError(
                f"{file}, row {at + 1} is of query {query!r} and that row of the lists of query {str(expected)!r}; expected the "
                f"same rows in the same order; name the documents in a column {DOCUMENT[0]!r}"
            )
    return found


def _texts(column: Any, where: str) -> list[str]:
    """Ids as texts, whole numbers without a point."""
    values = plain(column).to_pylist()
    if None in values:
        raise ValueError(f"{where}: row {values.index(None) + 1} is missing; expected an id in every row")
    return [str(int(value)) if isinstance(value, float) and value.is_integer() else str(value) for value in values]


# --- which score is whose ---------------------------------------------------------------------------------------------


def _in_order(file: Path, scores: np.ndarray, data: RankingDataset) -> np.ndarray:
    """Scores in the order of the source's rows, brought into the dataset's."""
    documents = len(data.labels)
    if len(scores) != documents:
        raise ValueError(
            f"{file} holds {len(scores):,} scores and the lists have {documents:,} documents; expected one for each row, in "
            "their order; score the same lists again"
        )
    if data.rows is None:
        return scores
    found = np.empty(documents)
    found[np.argsort(data.rows, kind="stable")] = scores
    return found


def _by_name(
    file: Path,
    queries: Sequence[str],
    documents: Sequence[str],
    scores: np.ndarray,
    data: RankingDataset,
    where: Callable[[int], str],
) -> np.ndarray:
    """The score of each document, from the names of the query and document that each score is of."""
    own_queries, given = np.repeat(data.query_ids, data.lengths).tolist(), set(zip(queries, documents))
    names = [(str(query), str(name)) for query, name in zip(own_queries, data.document_names().tolist())]
    cells = [(inert_cell(query), inert_cell(name)) for query, name in names]
    if cells != names and not set(names).issuperset(given) and set(cells).issuperset(given):
        names = cells  # as `rankgrad rank --format csv` writes them
    if data.document_ids is not None and documents and (queries[0], documents[0]) not in set(names):
        rows = dataclasses.replace(data, document_ids=None).document_names()
        names = [(str(query), str(row)) for query, row in zip(own_queries, rows.tolist())]
    places = {name: at for at, name in enumerate(names)}
    if len(places) < len(names):
        query, document = next(name for at, name in enumerate(names) if places[name] != at)
        raise ValueError(
            f"the lists have document {document!r} of query {query!r} twice, and {file} names documents; expected distinct ids; give "
            "a number per row instead"
        )
    found, seen = np.empty(len(names)), np.full(len(names), -1)
    for at, (query, document) in enumerate(zip(queries, documents)):
        place = places.get((query, document))
        if place is None:
            raise ValueError(
                f"{where(at)}: the lists have no document {document!r} of query {query!r}; expected those that were scored, "
                f"such as {names[0][1]!r} of query {names[0][0]!r}; give the same lists"
            )
        if seen[place] >= 0:
            raise ValueError(
                f"{where(at)}: document {document!r} of query {query!r} has a score already, in {where(seen[place])}; expected "
                "one score for each; leave one out"
            )
        found[place], seen[place] = scores[at], at
    missing = np.flatnonzero(seen < 0)
    if len(missing):
        query, document = names[missing[0]]
        raise ValueError(
            f"{file} has no score for {len(missing):,} of {len(names):,} documents, the first of them {document!r} of query "
            f"{query!r}; expected one for each, at any depth; is the file whole?"
        )
    return found
