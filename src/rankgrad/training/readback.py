"""What steps report, read in order: at once on a CPU, some steps later on a GPU, which so never waits for the host."""

from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rankgrad.data.dataset import RankingDataset
from rankgrad.errors import NonFiniteError
from rankgrad.training.state import Progress
from rankgrad.training.step import REPORT_HEAD

REFUSED = (
    "and the step was refused",
    "lower the learning rate, clip gradients, or skip such steps with train.nonfinite = 'skip'",
)
REFUSED_BY_MEMBERS = (  # which are dropped one by one
    "for the last members, and every member has been dropped now",
    "lower members.ranges.lr, or clip gradients with optimiser.clip",
)
READ_BACK_LAG = 8  # steps a GPU may be ahead of what the host has read of it


class StepReports:
    """Adds the reports of steps to the progress; raises `NonFiniteError` for a refused step if that stops a run."""

    def __init__(
        self, progress: Progress, nonfinite: str, data: RankingDataset, device: torch.device, *, members: bool
    ) -> None:
        self._what, self._remedy = REFUSED_BY_MEMBERS if members else REFUSED
        self.loss: float | None = None  # the newest that has been read
        self._progress, self._nonfinite, self._query_ids = progress, nonfinite, data.query_ids
        self._lag = 0 if device.type == "cpu" else READ_BACK_LAG
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None, Tensor, int]] = deque()

    def push(self, report: Tensor, queries: Tensor) -> bool:
        """Take a step's report, read the one that is due; True if some process asked to stop."""
        event = None
        if report.device.type == "cuda":
            report = report.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((report, event, queries, self._progress.step))
        return len(self._waiting) > self._lag and self._read()

    def read_all(self) -> None:
        """Read all that is still waiting."""
        while self._waiting:
            self._read()

    def _read(self) -> bool:
        report, event, queries, step = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        (total, count, refused, stop), suspects = report[:REPORT_HEAD].tolist(), report[REPORT_HEAD:] > 0
        if refused and self._nonfinite == "stop":
            ids = self._query_ids[_suspected(len(self._query_ids), queries, suspects.to(queries.device))].tolist()
            more = f" and {len(ids) - 100} more" if len(ids) > 100 else ""
            raise NonFiniteError(
                f"the loss or gradient of step {step} in epoch {self._progress.epoch + 1} was not finite {self._what}; look at "
                f"{'query' if len(ids) == 1 else 'queries'} {', '.join(map(str, ids[:100]))}{more}, {self._remedy}"
            )
        if refused:
            self._progress.skipped += 1
        else:
            self.loss = total / count if count else self.loss
            self._progress.loss_sum += total
            self._progress.loss_count += count
        return bool(stop)


def _suspected(size: int, queries: Tensor, suspects: Tensor) -> np.ndarray:
    """Positions of the lists that were not finite, over all processes; all lists of the step if none was by itself."""
    for chosen in (queries[suspects], queries):
        marks = torch.zeros(size, device=queries.device)
        marks[chosen] = 1.0
        if dist.is_initialized():
            dist.all_reduce(marks)
        if bool(marks.any()):
            break
    return np.flatnonzero(marks.cpu().numpy())
