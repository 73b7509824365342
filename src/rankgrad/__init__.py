"""rankgrad: train ranking models on the metric itself.

>>> from rankgrad import neural_ndcg
>>> import torch
>>> scores = torch.tensor([[0.3, 0.1, 0.2]], requires_grad=True)
>>> loss = neural_ndcg(scores, torch.tensor([[0, 2, 1]]))
>>> loss.backward()

Public names are imported when first used: `import rankgrad` is instant, torch takes its second only when needed.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_LOSSES = (
    "neural_ndcg neural_ndcg_transposed approx_ndcg listnet listmle ranknet lambdarank ndcg_loss1 ndcg_loss2 ndcg_loss2pp "
    "rmse ordinal bce softmax xe_ndcg soft_rank neural_map neural_mrr neural_err neural_precision query_rmse"
).split()

_HOME = {
    **dict.fromkeys(("LOSSES", *_LOSSES), "rankgrad.losses"),
    **dict.fromkeys(
        "METRICS parse_metric ndcg average_precision reciprocal_rank err precision recall hit_rate".split(),
        "rankgrad.metrics",
    ),
    **dict.fromkeys("neural_sort soft_sort ot_sort sinkhorn".split(), "rankgrad.sorting"),
    **dict.fromkeys("RankingDataset read_svmlight read_table".split(), "rankgrad.data"),
    "NeuralRanker": "rankgrad.estimator",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rankgrad' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
