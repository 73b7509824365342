"""A metric over many batches and processes, in the manners of torchmetrics: the one module that imports it."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from rankgrad.metrics import parse_metric

try:
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(
        "RankingMetric needs torchmetrics; install it with: pip install 'rankgrad[torchmetrics]'"
    ) from error

OPTIONS = ("gain", "threshold", "max_label", "check")  # of the metrics
LEFT_OUT = -(2.0**100)  # marks empty lists; NaN would not tell them from lists with bad values, which must show


class RankingMetric(Metric):
    """The mean of a metric over all lists seen, on all processes.

    - `name`: one of `rankgrad.METRICS`, `@k` for a cut-off: "ndcg@10".
    - `empty`: the value of a list without a relevant document; None: the metric's own rule, 1 for NDCG and 0 for the others;
      NaN: such lists are left out.
    - `gain`, `threshold`, `max_label`: as in the metric's function, where it takes them.
    - `check`: of values, as in the metrics.
    - all else: options of `torchmetrics.Metric`.

    >>> metric = RankingMetric("ndcg@10")
    >>> metric.update(torch.tensor([[0.3, 0.1, 0.2]]), torch.tensor([[0, 2, 1]]))
    >>> round(metric.compute().item(), 4)
    0.5869
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    total: Tensor
    lists: Tensor

    def __init__(self, name: str, *, empty: float | None = None, **options: Any) -> None:
        metric = parse_metric(name)
        taken = inspect.signature(metric.function).parameters
        own = {key: options.pop(key) for key in OPTIONS if key in options and key in taken}
        super().__init__(**options)
        self.name, self.metric, self.options = name, metric, own
        self.empty = metric.empty if empty is None else empty
        metric(torch.zeros(1, 1), torch.zeros(1, 1), empty=self.empty, **own)  # bad options are refused here
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("lists", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask [..., L], mask True = a real document."""
        empty = LEFT_OUT if math.isnan(self.empty) else self.empty
        values = self.metric(scores.detach(), labels, mask, empty=empty, **self.options).double()
        counted = values != LEFT_OUT
        self.total += torch.where(counted, values, 0.0).sum()
        self.lists += counted.sum()

    def compute(self) -> Tensor:
        """The mean over the lists so far; NaN before the first."""
        return self.total / self.lists

    def __repr__(self) -> str:
        options = {"empty": self.empty, **self.options} if self.empty != self.metric.empty else self.options
        return f"{type(self).__name__}({self.name!r}{''.join(f', {key}={value!r}' for key, value in options.items())})"
