"""rankgrad: train ranking models on the metric itself.

>>> from rankgrad import neural_ndcg
>>> import torch
>>> scores = torch.tensor([[0.3, 0.1, 0.2]], requires_grad=True)
>>> loss = neural_ndcg(scores, torch.tensor([[0, 2, 1]]))
>>> loss.backward()

Public names are imported when first used: `import rankgrad` is instant, torch takes its second only when needed.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# What type checkers and editors read; `_HOME` says the same to the interpreter, and a test compares the two.
if TYPE_CHECKING:
    from rankgrad.data import (
        RankingDataset as RankingDataset,
        read_svmlight as read_svmlight,
        read_table as read_table,
    )
    from rankgrad.estimator import NeuralRanker as NeuralRanker
    from rankgrad.explain import feature_importances as feature_importances
    from rankgrad.export import export_ranker as export_ranker, read_export as read_export
    from rankgrad.losses import (
        LOSS_TABLE as LOSS_TABLE,
        LOSSES as LOSSES,
        LossSpec as LossSpec,
        approx_ndcg as approx_ndcg,
        bce as bce,
        lambdarank as lambdarank,
        listmle as listmle,
        listnet as listnet,
        ndcg_loss1 as ndcg_loss1,
        ndcg_loss2 as ndcg_loss2,
        ndcg_loss2pp as ndcg_loss2pp,
        neural_err as neural_err,
        neural_map as neural_map,
        neural_mrr as neural_mrr,
        neural_ndcg as neural_ndcg,
        neural_ndcg_transposed as neural_ndcg_transposed,
        neural_precision as neural_precision,
        ordinal as ordinal,
        query_rmse as query_rmse,
        ranknet as ranknet,
        rmse as rmse,
        soft_rank as soft_rank,
        softmax as softmax,
        xe_ndcg as xe_ndcg,
    )
    from rankgrad.metrics import (
        METRICS as METRICS,
        average_precision as average_precision,
        dcg as dcg,
        err as err,
        hit_rate as hit_rate,
        ndcg as ndcg,
        parse_metric as parse_metric,
        precision as precision,
        recall as recall,
        reciprocal_rank as reciprocal_rank,
    )
    from rankgrad.modules import RankingLoss as RankingLoss, pad_lists as pad_lists, unpad_lists as unpad_lists
    from rankgrad.ranker import Ranker as Ranker
    from rankgrad.running_metric import RankingMetric as RankingMetric
    from rankgrad.runs.load import load as load
    from rankgrad.sorting import (
        neural_sort as neural_sort,
        ot_sort as ot_sort,
        sinkhorn as sinkhorn,
        soft_sort as soft_sort,
    )

_NAMES = {
    "rankgrad.losses": """
        LOSSES LOSS_TABLE LossSpec
        neural_ndcg neural_ndcg_transposed neural_map neural_mrr neural_err neural_precision
        approx_ndcg soft_rank listnet listmle softmax xe_ndcg query_rmse
        ranknet lambdarank ndcg_loss1 ndcg_loss2 ndcg_loss2pp rmse ordinal bce""",
    "rankgrad.metrics": """
        METRICS parse_metric ndcg dcg average_precision reciprocal_rank err precision recall hit_rate""",
    "rankgrad.sorting": "neural_sort soft_sort ot_sort sinkhorn",
    "rankgrad.modules": "RankingLoss pad_lists unpad_lists",
    "rankgrad.running_metric": "RankingMetric",
    "rankgrad.data": "RankingDataset read_svmlight read_table",
    "rankgrad.estimator": "NeuralRanker",
    "rankgrad.export": "export_ranker read_export",
    "rankgrad.explain": "feature_importances",
    "rankgrad.ranker": "Ranker",
    "rankgrad.runs.load": "load",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOME]

if not TYPE_CHECKING:  # a checker that saw this function would take every misspelt name for one of ours

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module 'rankgrad' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
