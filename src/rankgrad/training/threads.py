"""How many CPU threads torch takes, and the caller's number again afterwards.

torch's threads wait for each other after every operation, and by default they do so by spinning. On an idle machine two of them gain
little where operations are small; where other programs want the cores too, one thread spins while the other does not run, and
training becomes ten times slower and more. So small work is done by one thread.

No environment is changed here. The command line asks for waiting without spinning before torch is loaded.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rankgrad.checks import whole
from rankgrad.data.dataset import RankingDataset
from rankgrad.training.config import Config

WORTH_A_THREAD = 5e8  # multiplications of a step, documents x weights: fewer cost more in waiting than a thread saves

_home = os.getpid()
_lock = threading.Lock()
_borrowed = 0  # contexts that are open, in all threads
_outside = 1  # torch's number before the first of them
_known = threading.local()  # threads that have been here before


def most_threads() -> int:
    """What torch takes by itself; 1 in a forked process, where GNU's OpenMP would wait for threads that are not there."""
    return _own_number() if os.getpid() == _home else 1


def threads_worth(work: float) -> int:
    """As many threads as a piece of work is worth, at most torch's own number.

    >>> threads_worth(1e6)
    1
    """
    return max(1, min(most_threads(), int(work / WORTH_A_THREAD)))


def threads_of_jobs(jobs: Any) -> int:
    """Threads for scikit-learn's `n_jobs`: -1 is a thread for every core, -2 one less.

    >>> threads_of_jobs(3)
    3
    """
    number = whole("n_jobs", jobs)
    if number == 0:
        raise ValueError("n_jobs must be None, a number of threads, or -1 for all cores, got 0")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return number if number > 0 else max(1, cores + 1 + number)


def weights_of(model: nn.Module) -> int:
    """How many numbers a model has learned: the multiplications it does for a document."""
    return sum(parameter.numel() for parameter in model.parameters())


def threads_of_training(config: Config, model: nn.Module, data: RankingDataset, device: torch.device) -> int:
    """Those of the configuration; where it leaves them open, what a step is worth."""
    if config.train.threads or device.type != "cpu":
        return config.train.threads or most_threads()
    documents = data.lengths.clip(max=config.data.list_size).mean() * min(config.train.batch_size, len(data))
    return threads_worth(documents * weights_of(model))


def set_threads(number: int) -> None:
    """Let torch take so many, within `torch_threads`, which gives the caller's number back."""
    number = number if os.getpid() == _home else 1
    if torch.get_num_threads() != number:  # to set it takes as long as a layer of a small model
        torch.set_num_threads(number)


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch take so many; the number of the calling thread is given back."""
    global _borrowed, _outside
    with _lock:
        before = _own_number()
        _outside = before if not _borrowed else _outside
        _borrowed += 1
        _known.yes = True
    set_threads(number)
    try:
        yield
    finally:
        with _lock:
            _borrowed -= 1
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _own_number() -> int:
    """Torch's number in this thread. A new thread would be told what another has borrowed at the moment."""
    number = torch.get_num_threads()
    return _outside if _borrowed and not hasattr(_known, "yes") else number
