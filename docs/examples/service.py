"""A ranking service. Start it with the ranker's folder or file:

    RANKER=runs/first uvicorn service:app --app-dir docs/examples --host 127.0.0.1 --port 8000

POST /rank takes the documents of one query and gives their scores and their order, best first:

    {"documents": [[0.3, 1, null], [0.1, 4, 2]]}                 values in the order of the columns, null = missing
    {"documents": [{"price": 0.3, "clicks": 1}, {"clicks": 4}]}  or by name, where the ranker was trained on named columns

A mistake is answered with status 400 and {"error": one sentence}. GET /health says what is served.
"""

import os
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import rankgrad

MOST = 10_000  # documents of one query

torch.set_num_threads(1)  # requests run side by side: one thread each
ranker = rankgrad.load(os.environ["RANKER"], "cpu")
app = FastAPI(title="ranking", version=rankgrad.__version__)


class Query(BaseModel):
    documents: list[list[float | None]] | list[dict[str, float | None]]


@app.post("/rank")
def rank(query: Query) -> dict[str, list[Any]]:  # not async: each request gets a thread
    if len(query.documents) > MOST:
        raise ValueError(f"there are {len(query.documents)} documents; expected at most {MOST}; send the best of them")
    scores = ranker.score(rows_of(query.documents))
    if not np.isfinite(scores).all():
        raise ValueError(
            "the scores are not finite; expected ordinary numbers as features; look at the largest of them"
        )
    return {"scores": scores.tolist(), "order": np.argsort(-scores, kind="stable").tolist()}


def rows_of(documents: list[Any]) -> np.ndarray:
    """Features [N, F] float32, NaN where a value is missing."""
    rows = np.full((len(documents), ranker.features), np.nan, np.float32)
    columns = {name: place for place, name in enumerate(ranker.names or ())}
    for number, document in enumerate(documents):
        if isinstance(document, dict):
            unknown = next((name for name in document if name not in columns), None)
            if unknown is not None:
                known = ", ".join(columns) or "values in the order of the columns, as this ranker has no names for them"
                raise ValueError(f"document {number} has a feature {unknown!r}; expected {known}")
            for name, value in document.items():
                rows[number, columns[name]] = np.nan if value is None else value
        elif len(document) != ranker.features:
            raise ValueError(f"document {number} has {len(document)} features; expected {ranker.features}")
        else:
            rows[number] = [np.nan if value is None else value for value in document]
    return rows


@app.get("/health")
def health() -> dict[str, Any]:
    return {"features": ranker.features, "names": ranker.names, "versions": ranker.provenance.get("versions")}


@app.exception_handler(ValueError)
def refuse(_: Request, error: ValueError) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=400)


@app.exception_handler(RequestValidationError)
def refuse_shape(_: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return JSONResponse({"error": f"{place}: {first['msg']}; see /docs for what is expected"}, status_code=400)
