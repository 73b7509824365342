"""CPU threads: how fast training and single predictions are, idle and beside a program that burns every core.

    python benchmarks/threads.py [--work small strong ...] [--seconds 0.5] [--rounds 9] [--processes 1]
    python benchmarks/threads.py --fits [--work members mlp ...] [--rounds 3]

Every setting has processes of its own, because OpenMP reads its settings once, and they measure in turn, round by round, because a
machine is not equally fast for long. Beside busy programs equal processes differ by a third: there several of each tell more. `before`
is torch's own choice: a thread for every core, and threads that spin. `Python` and `command line` are what rankgrad chooses now, the
second with what it tells OpenMP. The others are settings to compare with. Training is lists/s; a prediction is the latency of one list
of 30 documents, or of 20,000 documents in such lists, in ms; all are medians over rounds and processes. The last column says how much slower the worse of the two choices is
than the best of all settings. Run it on an idle machine.

With `--fits` each figure is what a user waits for: the seconds of a whole `NeuralRanker.fit`, from its first check to its last epoch, in a
process of its own that has done nothing before. Beside busy programs `before` is left out: it would take most of an hour.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from rankgrad import NeuralRanker, ranker as scoring
from rankgrad.data import fit_scaling, synthetic
from rankgrad.training import loop, threads as choice
from rankgrad.training.build import fit_to_data, make_objectives, make_state
from rankgrad.training.config import RECIPES
from rankgrad.training.data import scaled
from rankgrad.training.loop import Step, train

CORES = len(os.sched_getaffinity(0))
TRAINING = {  # recipe, size of synthetic lists, lists
    "small": ("small", "small", 400),
    "strong": ("strong", "small", 400),
    "paper": ("paper", "small", 400),
    "paper, long lists": ("paper", "web30k", 256),
}
PREDICTING = {  # documents in lists of 30, parameters
    "predict, strong": (30, {}),
    "predict, paper": (30, {"recipe": "paper"}),
    "predict, mlp": (30, {"model": "mlp"}),
    "predict 20,000, strong": (20_000, {"members": 8}),
    "predict 20,000, mlp": (20_000, {"model": "mlp"}),
}
FITS = {  # size of synthetic lists, lists, parameters
    "members": ("small", 300, {"members": 8, "epochs": 8}),
    "mlp": ("small", 400, {"model": "mlp", "epochs": 30}),
    "mlp, small batches": ("small", 400, {"model": "mlp", "epochs": 15, "batch_size": 8}),
    "linear": ("small", 400, {"model": "linear", "epochs": 40}),
    "transformer": ("small", 400, {"model": "transformer", "epochs": 4}),
    "transformer, long lists": ("web30k", 192, {"model": "transformer", "epochs": 3, "batch_size": 32}),
}
SETTINGS = {  # threads, 0: rankgrad's choice; what OpenMP is told
    "before": (CORES, {}),
    "1": (1, {}),
    f"{CORES} passive": (CORES, {"OMP_WAIT_POLICY": "PASSIVE"}),
    f"{CORES} spin 10,000": (CORES, {"GOMP_SPINCOUNT": "10000"}),
    f"{CORES} spin 100,000": (CORES, {"GOMP_SPINCOUNT": "100000"}),
    "Python": (0, {}),
    "command line": (0, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}),
}
OURS = ("Python", "command line")
RIVAL = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"  # ends with a benchmark that is killed


def training(work, threads):
    """A function that trains for some seconds, and says how many lists/s it did."""
    recipe, size, lists = TRAINING[work]
    data, cpu = synthetic(size).select(slice(lists)), torch.device("cpu")
    data = scaled(data, fit_scaling(data, "auto"))
    config = fit_to_data(RECIPES[recipe](), data, cpu, validated=True)
    config = replace(config, train=replace(config.train, epochs=10_000, patience=None))
    torch.manual_seed(0)
    state = make_state(config, data, cpu)
    if threads:
        loop.paces_of_training = lambda _: None  # as torch's threads wait by themselves
    threads = threads or choice.threads_of_training(config, state.model, data, cpu)
    choice.set_threads(threads or CORES)
    config = replace(config, train=replace(config.train, threads=threads))
    events = train(state, make_objectives(config), data, data.select(slice(4)), config, cpu)

    def lists_a_second(seconds):
        begun, done, event = time.perf_counter(), 0, None
        # Whole epochs, because batches of long lists take longer.
        while time.perf_counter() - begun < seconds or isinstance(event, Step):
            event = next(events)
            done += event.lists if isinstance(event, Step) else 0
        return done / (time.perf_counter() - begun)

    return lists_a_second


def predicting(work, threads):
    """A function that predicts for some seconds, and says how many milliseconds each took."""
    if threads:
        torch.set_num_threads(threads)
        choice.WORTH_A_THREAD = 1e-9  # all that there are
        scoring.threads_asleep = choice.torch_threads  # as they wait by themselves
    documents, parameters = PREDICTING[work]
    draw, rows = np.random.default_rng(0), max(600, documents)
    X, y, qid = draw.normal(size=(rows, 136)), draw.integers(0, 5, rows), np.arange(rows) // 30
    ranker = NeuralRanker(**parameters, epochs=1, n_jobs=1, random_state=0, verbose=0)
    ranker.fit(X[:600], y[:600], qid=qid[:600]).set_params(n_jobs=None)

    def milliseconds(seconds):
        begun, taken = time.perf_counter(), []
        while time.perf_counter() - begun < seconds:
            before = time.perf_counter()
            ranker.predict(X[:documents], qid=qid[:documents])
            taken.append(time.perf_counter() - before)
        return 1e3 * float(np.median(taken))

    return milliseconds


def fitting(work, threads):
    """The seconds of a fit."""
    if threads:
        loop.paces_of_training = lambda _: None  # as torch's threads wait by themselves
    size, lists, parameters = FITS[work]
    data = synthetic(size).select(slice(lists))
    qid = np.repeat(data.query_ids, data.lengths)
    ranker = NeuralRanker(**parameters, n_jobs=threads or None, device="cpu", random_state=0, verbose=0)
    begun = time.perf_counter()
    ranker.fit(np.array(data.features), data.labels, qid=qid)
    return time.perf_counter() - begun


def started(work, setting):
    """A process that measures whenever it is told for how long; a fit only once."""
    threads, told = SETTINGS[setting]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, __file__, "--one", work, "--threads", str(threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment | told, **pipes)


def asked(process, seconds):
    print(seconds, file=process.stdin, flush=True)
    return float(process.stdout.readline())


@contextlib.contextmanager
def rivals(count):
    """So many programs that never rest."""
    burning = [subprocess.Popen([sys.executable, "-c", RIVAL]) for _ in range(count)]
    try:
        yield
    finally:
        for one in burning:
            one.kill()
            one.wait()


def in_turns(works, seconds, rounds, alike):
    """(work, busy, the median of each setting), of processes that go on."""
    for work in works:
        processes = {setting: [started(work, setting) for _ in range(alike)] for setting in SETTINGS}
        for process in itertools.chain(*processes.values()):
            asked(process, 1.0)  # warming up
        for busy in (False, True):
            with rivals(CORES * busy):
                found = [[[asked(one, seconds) for one in same] for same in processes.values()] for _ in range(rounds)]
            yield work, busy, dict(zip(processes, np.median(found, axis=(0, 2))))
        for process in itertools.chain(*processes.values()):
            process.communicate()  # the end of its input is its end


def whole_fits(works, rounds):
    """The same of fits, each in a new process."""
    for work in works:
        for busy in (False, True):
            settings = [setting for setting in SETTINGS if not (busy and setting == "before")]
            with rivals(CORES * busy):
                found = [[float(started(work, one).communicate()[0]) for one in settings] for _ in range(rounds)]
            yield work, busy, dict(zip(settings, np.median(found, axis=0)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--fits", action="store_true", help="whole fits instead")
    parser.add_argument("--work", nargs="+", help="some of the rows only")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--processes", type=int, default=1, help="of each setting")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one in FITS:
        print(fitting(given.one, given.threads))
        return
    if given.one:
        measure = (training if given.one in TRAINING else predicting)(given.one, given.threads)
        for seconds in sys.stdin:
            print(measure(float(seconds)), flush=True)
        return
    known = FITS if given.fits else {**TRAINING, **PREDICTING}
    works = given.work or [*known]
    if {*works} - {*known}:
        parser.error(f"--work is one of {', '.join(known)}")
    unit = "seconds of whole fits" if given.fits else "training in lists/s, predictions in ms"
    print(f"{CORES} cores, torch {torch.__version__}; {unit}\n")
    print(f"| work | machine | {' | '.join(SETTINGS)} | best / ours |\n|{'---|' * (len(SETTINGS) + 3)}")
    if given.fits:
        rows = whole_fits(works, given.rounds or 3)
    else:
        rows = in_turns(works, given.seconds, given.rounds or 9, given.processes)
    for work, busy, found in rows:
        speeds = work in TRAINING
        worse = (min if speeds else max)(found[name] for name in OURS)
        ratio = max(found.values()) / worse if speeds else worse / min(found.values())
        values = [found.get(setting) for setting in SETTINGS]
        numbers = " | ".join(
            "-" if value is None else f"{value:,.0f}" if speeds else f"{value:.2f}" for value in values
        )
        print(f"| {work} | {'busy' if busy else 'idle'} | {numbers} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
