"""What `NeuralRanker` is given: documents X, grades y, evaluation sets, checked and brought into one form. Room 6.

Needs scikit-learn, whose checks of X and y these are, with their words.
"""

import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from rankgrad.data.batches import batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.grouping import as_float32
from rankgrad.training.evaluate import decides
from rankgrad.training.step import Objective

NUMBERS: dict[str, Any] = {"dtype": [np.float32, np.float64], "ensure_all_finite": "allow-nan"}


def features(ranker: BaseEstimator, X: Any) -> np.ndarray:
    """X [N, F] float32, after scikit-learn's checks of its shape, types, names and values."""
    return as_float32(validate_data(ranker, X, reset=False, **NUMBERS))


def documents(ranker: BaseEstimator, X: Any, y: Any, *, reset: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The same with y [N]; `reset` notes the number and names of the features instead of comparing them."""
    X, y = validate_data(ranker, X, y, y_numeric=True, reset=reset, **NUMBERS)
    if y.dtype.kind not in "fiub":
        raise ValueError(f"y is of type {y.dtype}; expected grades of relevance; map your labels to 0, 1, ...")
    if y.min() < 0:
        row = int(np.argmax(y < 0))
        raise ValueError(f"y[{row}] is {y[row]}; expected grades of relevance, 0 or above; shift or map your labels")
    return as_float32(X), y


def eval_parts(eval_set: Any, eval_qid: Any) -> tuple[Any, Any, Any] | None:
    """(X, y, qid) of the forms an evaluation set may have."""
    if eval_set is None:
        if eval_qid is not None:
            raise ValueError("eval_qid was given without eval_set; expected both; pass eval_set=(X, y, qid)")
        return None
    expected = "expected eval_set=(X, y, qid), or eval_set=[(X, y)] with eval_qid=[qid]"
    if not isinstance(eval_set, list | tuple):
        raise ValueError(f"eval_set is of type {type(eval_set).__name__}; {expected}")
    if len(eval_set) == 1 and isinstance(eval_set[0], list | tuple):  # as XGBoost and LightGBM have it
        eval_set = eval_set[0]
        if isinstance(eval_qid, list | tuple) and len(eval_qid) == 1:
            eval_qid = eval_qid[0]
    if len(eval_set) + (eval_qid is not None) != 3:
        raise ValueError(
            f"eval_set has {len(eval_set)} parts and eval_qid is {'' if eval_qid is None else 'not '}None; {expected}"
        )
    X, y, qid = (*eval_set, eval_qid)[:3]
    return X, y, qid


def warn_if_nothing_teaches(data: RankingDataset, objective: Objective, loss: str) -> None:
    """Say that a loss will learn nothing from these queries."""
    lists = batches(data, 256, list_size=None, shuffle=False, max_documents=2**16)
    if not any(bool(objective.teaches(batch.labels, batch.mask).any()) for batch in lists):
        warnings.warn(
            f"no query teaches {loss} anything and the model stays as it began; expected a query of at least two "
            "documents with different grades; look at y and qid",
            UserWarning,
            stacklevel=3,
        )


def warn_if_nothing_chooses(held_out: RankingDataset, metric: str) -> None:
    """Say that no epoch will be better than another on the queries that are to choose one."""
    if not decides(held_out, metric):
        warnings.warn(
            f"no query to judge epochs by has a relevant document for {metric}, so that the first epoch is as good as any and is "
            "kept; expected grades above 0 there, or from 1 on for metrics without gains; look at eval_set, or at y where queries "
            "were held out",
            UserWarning,
            stacklevel=3,
        )
