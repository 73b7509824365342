"""The service of docs/production.md, started as its first lines say, asked many things at once."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from rankgrad.cli.rank import rank
from rankgrad.runs.run import train_run
from rankgrad.training.config import configure

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NAMES = ("price", "clicks", "größe")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """200 queries of 1 to 30 documents as a table, some values missing; and the same in Python, [N, F] for each query."""
    rng = np.random.default_rng(0)
    queries = [rng.normal(size=(rng.integers(1, 31), 3)).round(3) for _ in range(200)]
    lines = [f"label,qid,{','.join(NAMES)}"]
    for number, rows in enumerate(queries):
        rows[rng.random(rows.shape) < 0.1] = np.nan
        for row in rows:
            words = ["" if np.isnan(value) else repr(value) for value in row.tolist()]
            lines.append(f"{int(np.nansum(row) > 0)},{number},{','.join(words)}")
    path = tmp_path_factory.mktemp("lists") / "lists.csv"
    path.write_text("\n".join(lines) + "\n")
    return path, [[[None if np.isnan(v) else v for v in row] for row in rows.tolist()] for rows in queries]


@pytest.fixture(scope="module")
def run(lists, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    [*train_run(folder, configure(str(lists[0]), {"train.epochs": 1, "members.count": 3, "train.device": "cpu"}, []))]
    return folder


@pytest.fixture(scope="module")
def service(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "service:app", "--app-dir", str(EXAMPLES), "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "error"],
        env={**os.environ, "RANKER": str(run), "OMP_NUM_THREADS": "1"},
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(f"{address}/health", trust_env=False)
                break
            except httpx.TransportError:
                assert process.poll() is None, "the service ended"
                time.sleep(0.1)
        yield address
        assert process.poll() is None  # whatever was asked, it lives
    finally:
        process.terminate()
        process.wait(20)


def ask(address, body, **options):
    content = {"json": body} if not isinstance(body, bytes) else {"content": body}
    return httpx.post(f"{address}/rank", trust_env=False, timeout=60, **content, **options)


def test_200_requests_at_once_are_answered_as_rank_does(service, lists, run, tmp_path):
    path, queries = lists
    rank([run], str(path), out=str(tmp_path / "scores.txt"))
    expected = np.loadtxt(tmp_path / "scores.txt")

    async def ask_all():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) as client:
            return await asyncio.gather(*[client.post(f"{service}/rank", json={"documents": rows}) for rows in queries])

    answers = asyncio.run(ask_all())
    assert [answer.status_code for answer in answers] == [200] * len(queries)
    given = [answer.json() for answer in answers]
    np.testing.assert_allclose(np.concatenate([one["scores"] for one in given]), expected, rtol=0, atol=1e-5)
    for one in given:
        ordered = np.array(one["scores"])[one["order"]]
        assert (np.diff(ordered) <= 0).all() and sorted(one["order"]) == list(range(len(ordered)))


def test_columns_by_name_in_any_order_and_what_is_served(service, lists):
    rows = lists[1][3]
    named = [dict(reversed([pair for pair in zip(NAMES, row) if pair[1] is not None])) for row in rows]
    assert ask(service, {"documents": named}).json() == ask(service, {"documents": rows}).json()
    served = httpx.get(f"{service}/health", trust_env=False).json()
    assert served["features"] == 3 and served["names"] == list(NAMES) and "rankgrad" in served["versions"]
    assert ask(service, {"documents": []}).json() == {"scores": [], "order": []}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "JSON"),
        (b"", "body"),
        ({}, "documents"),
        ({"documents": 7}, "documents"),
        ({"documents": [["a", 1, 2]]}, "number"),
        ({"documents": [[1, 2, 3], [1, 2]]}, "document 1 has 2 features; expected 3"),
        ({"documents": [{"price": 1}, {"prize": 1}]}, "document 1 has a feature 'prize'; expected price, clicks"),
        (b'{"documents": [[1, 2, Infinity]]}', "infinity"),
        (b'{"documents": [[1, 2, 1e999]]}', "infinity"),
        ({"documents": [[1, 2, 3]] * 10_001}, "10001 documents; expected at most 10000"),
    ],
)
def test_bad_input_is_answered_with_a_sentence_and_the_service_lives_on(service, body, words):
    answer = ask(service, body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["error"]
    assert ask(service, {"documents": [[1, 2, 3]]}).status_code == 200
