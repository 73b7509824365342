"""How many CPU threads torch takes, and the caller's number again afterwards.

torch's threads wait for each other after every operation, and by default they do so by spinning. On an idle machine two of them gain
little where operations are small; where other programs want the cores too, one thread spins while the other does not run, and
training becomes ten times slower and more. So small work is done by one thread, and other work follows the load of the moment (`paces`):
by the number of threads where a model learns the same to the bit with any, else by whether they spin or sleep (`sleeping`).

No environment is changed here. The command line asks for short spinning before torch is loaded.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rankgrad.checks import whole
from rankgrad.data.dataset import RankingDataset
from rankgrad.models import MEMBERS_IN_ONE, MLP, Linear, Members, SharedMLP, SharedTransformer, Transformer
from rankgrad.training import distributed
from rankgrad.training.config import Config
from rankgrad.training.one_order import InOneOrder
from rankgrad.training.openmp import waiting_was_chosen
from rankgrad.training.paces import Paces, Way, paces
from rankgrad.training.room import quota

WORTH_A_THREAD = 5e8  # multiplications, documents x weights: fewer cost more in waiting than a thread saves
WORTH_IN_TRAINING = 1.2e8  # of a step, where threads wait as the load says
WORTH_TRYING = 1.5e7  # of a step, for which several threads may pay on an idle machine
# Inputs of the lists on which numbers of threads are compared: few, for some tenths of a second.
PROBED, PROBED_WITHOUT_GRADIENT = 2**18, 2**21
NETWORKS = (Transformer, MLP, Linear, SharedMLP, SharedTransformer)  # to be called changes nothing in them

_home = os.getpid()
_lock = threading.Lock()
_borrowed = 0  # contexts that are open, in all threads
_outside = 1  # torch's number before the first of them
_last_set = 1  # what was asked of torch last, which new threads are told
_known = threading.local()  # threads that have been here before
_shared_out = False  # whether torch has had more than one thread here


def most_threads() -> int:
    """What torch takes by itself, and a container has time for; 1 in a forked process, where OpenMP would wait for threads that are not there."""
    return min(_own_number(), _of_container()) if os.getpid() == _home else 1


def threads_worth(work: float, of_one: float | None = None) -> int:
    """As many threads as a piece of work is worth, at most torch's own number.

    >>> threads_worth(1e6)
    1
    """
    return max(1, min(most_threads(), int(work / (of_one or WORTH_A_THREAD))))


def threads_of_jobs(jobs: Any) -> int:
    """Threads for scikit-learn's `n_jobs`: -1 is a thread for every core, -2 one less.

    >>> threads_of_jobs(3)
    3
    """
    number = whole("n_jobs", jobs)
    if number == 0:
        raise ValueError("n_jobs must be None, a number of threads, or -1 for all cores, got 0")
    return number if number > 0 else max(1, min(cores(), _of_container()) + 1 + number)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _of_container() -> int:
    """Threads that a container has time for, all cores or more where it has no quota."""
    return max(1, math.ceil(min(quota(), 2**16)))


def weights_of(model: nn.Module) -> int:
    """How many numbers a model has learned: the multiplications it does for a document."""
    return sum(parameter.numel() for parameter in model.parameters())


def threads_of_training(config: Config, model: nn.Module, data: RankingDataset, device: torch.device) -> int:
    """Those of the configuration; where it leaves them open, 0 for what pays at the moment, or what a step is worth."""
    if config.train.threads or device.type != "cpu":
        return config.train.threads or most_threads()
    lists, lengths = min(config.train.batch_size, len(data)), data.lengths.clip(max=config.data.list_size)
    work = lists * lengths.mean() * weights_of(model)
    worth = threads_worth(work, WORTH_IN_TRAINING)
    if distributed.place()[1] > 1 or config.train.precision == "bf16":
        return worth
    usual, longest = int(lengths.mean()), int(lengths.max())
    if isinstance(model, Members):  # each product is one thread's
        return 0 if most_threads() > 1 and learns_the_same(model, lists, [usual]) else worth
    # Also where there is one thread, so that a run learns the same wherever it goes on.
    follows = type(model) in NETWORKS and work >= WORTH_TRYING
    return 0 if follows and learns_the_same(model, lists, [usual, longest]) else worth


def learns_the_same(model: nn.Module, lists: int, lengths: Iterable[int]) -> bool:
    """Whether a model learns the same to the bit however many threads compute it: tried on so many lists of each length."""
    document: Any = model.document
    parameters, training = list(model.parameters()), model.training
    numbers = numbers_to_try(most_threads())

    def learned(threads: int, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = torch.ones(features.shape[:2], dtype=torch.bool)
        mask[1::2, 1:] = False  # every second list is short
        times = max(1, min(2 * MEMBERS_IN_ONE, PROBED_WITHOUT_GRADIENT // document.width) // mask.numel())
        many = features.repeat(times, 1, 1), mask.repeat(times, 1)  # a validation split has more lists than a step
        in_one_order = contextlib.nullcontext() if isinstance(model, Members) else InOneOrder()
        with working() as work, torch.random.fork_rng(devices=[]):
            work(Way(threads, asleep=threads > 1 and not waiting_was_chosen()))  # the machine may be busy
            torch.manual_seed(0)
            with in_one_order:
                scores = model.train()(features, mask)
                with torch.no_grad():
                    evaluated = [model.eval()(*lists) for lists in ((features, mask), many)]
            return scores.detach(), *evaluated, *torch.autograd.grad(scores.square().sum(), parameters)

    for length in lengths:
        longest = max(1, min(length, PROBED // document.width))
        shape = max(1, min(lists, PROBED // (longest * document.width))), longest, document.features
        features = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        features[..., list(document.categories)] = 0.0  # the code of a level
        first = learned(1, features) if len(numbers) > 1 else ()
        same = all(torch.equal(*pair) for number in numbers[1:] for pair in zip(first, learned(number, features)))
        model.train(training)
        if not same:
            return False
    return True


def numbers_to_try(most: int) -> list[int]:
    """Of threads.

    >>> numbers_to_try(6)
    [1, 2, 4, 6]
    """
    return sorted({*(2**power for power in range(most.bit_length())), most})


def paces_of_training(follows_load: bool) -> Paces | None:
    """What says how each step is done, by the paces of those before it; None where there is nothing to choose.

    The number of threads follows the load, or only how they wait; the latter is left alone where the user has said it.
    """
    numbers = numbers_to_try(most_threads()) if follows_load else [torch.get_num_threads()]
    sleeps = not waiting_was_chosen()
    return paces(numbers, cores=cores(), sleeps=sleeps) if len(numbers) > 1 or (sleeps and numbers != [1]) else None


@contextlib.contextmanager
def working() -> Iterator[Callable[[Way], None]]:
    """A function that lets torch's threads work in a way from then on; the caller's comes back."""
    now = Way(torch.get_num_threads())
    with torch_threads(now.threads), contextlib.ExitStack() as standing_by:

        def work(way: Way) -> None:
            nonlocal now
            if way != now:
                standing_by.close()
                set_threads(way.threads)
                if way.asleep:
                    standing_by.enter_context(sleeping(way.threads))
                now = way

        yield work


@contextlib.contextmanager
def threads_asleep(number: int) -> Iterator[None]:
    """Let torch take so many for large operations, as those of scoring are, asleep while they wait unless the user has said how.

    On an idle machine that is a twentieth slower than to spin, beside busy programs twice as fast, and faster than one thread.
    """
    number = number if os.getpid() == _home else 1
    with sleeping(number) if number > 1 and not waiting_was_chosen() else torch_threads(number):
        yield


@contextlib.contextmanager
def sleeping(threads: int) -> Iterator[None]:
    """Let torch's threads sleep soon while they wait for each other.

    GNU's OpenMP does so while it has more threads than cores: here some that never work stand by. Elsewhere they change nothing.
    """
    ready, over = threading.Event(), threading.Event()
    enough = max(2, cores() - threads + 2)  # with the calling one

    def stand_by() -> None:
        try:
            torch.set_num_threads(enough)
            torch.zeros(2**16 * enough).add_(1)  # large enough for all of them
        finally:
            ready.set()
        over.wait()

    with torch_threads(threads):
        helper = threading.Thread(target=stand_by, name="rankgrad-stands-by", daemon=True)
        try:
            try:
                helper.start()
                ready.wait()
            finally:
                _ask(threads)  # also for threads that begin now, whose number the other one has changed
            yield
        finally:
            over.set()
            if helper.ident is not None:
                helper.join()


def set_threads(number: int) -> None:
    """Let torch take so many, within `torch_threads`, which gives the caller's number back."""
    global _shared_out
    number = number if os.getpid() == _home else 1
    _shared_out = _shared_out or number > 1
    if torch.get_num_threads() != number:  # to set it takes as long as a layer of a small model
        _ask(number)


def _ask(number: int) -> None:
    global _last_set
    _last_set = number
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
            _ask(before)


def _own_number() -> int:
    """Torch's number in this thread. A new thread would be told what another has borrowed at the moment."""
    number = torch.get_num_threads()
    return _outside if _borrowed and number == _last_set and not hasattr(_known, "yes") else number


def _begin_with_one() -> None:
    """In a forked process, also for the caller's own code: GNU's OpenMP would wait for threads that a fork leaves behind."""
    if _shared_out:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_with_one)
