"""Commands that are killed, or asked to stop, at random moments, again and again, and then left alone.

What they end with is compared byte for byte with what an undisturbed one left. After every kill what is in the place of the output is
the old one or the new one, whole. A kill comes at a random moment, just before a random change of the disk, or inside of a write.
"""

import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from reliability.commands import (
    AtChange,
    Ended,
    InWrite,
    Running,
    Trap,
    contents,
    difference,
    restore,
    run,
    start,
    start_ranks,
)
from reliability.promise import Promise, Tally, tally

KILLS = 3  # of a round
PATIENCE = 10.0  # seconds within which a command that was asked to stop has saved and ended
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGXFSZ)
STOPPED = 128 + signal.SIGTERM
PREVIOUS = "checkpoint.previous.safetensors"  # of a run that was asked to stop it is a step within an epoch


@dataclass
class Case:
    """A command, and what an undisturbed one leaves in its folder."""

    name: str
    words: list[str]
    out: str  # the file or folder it writes
    older: list[str] = field(default_factory=list)  # writes something else there
    often: int = 1  # how many of a turn's rounds are its own: three of those that take no time
    goes_on: bool = False  # after a kill it does not begin again from nothing
    old: dict[str, bytes] = field(default_factory=dict)  # what may be there before
    whole: dict[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    changes: list[int] = field(default_factory=list)  # of the disk, by each process; one may make none

    def next_words(self, folder: Path) -> list[str]:
        """What a person would type after a kill."""
        if self.name.startswith("train") and (folder / self.out / "config.toml").is_file():
            return ["train", "--resume", self.out, "--quiet"]
        return self.words

    def finished(self, folder: Path) -> bool:
        """Whether a run has ended; what begins again each time has not."""
        return self.name.startswith("train") and (folder / self.out / "report.json").is_file()


# --- what is killed ---------------------------------------------------------------------------------------------------


def letor(queries: int, seed: int) -> str:
    """Made-up lists as text."""
    draw = random.Random(seed)
    lines = []
    for query in range(queries):
        for _ in range(draw.randint(3, 9)):
            values = " ".join(f"{column}:{draw.gauss(0, 1):.6g}" for column in range(1, 6))
            lines.append(f"{draw.choice((0, 0, 1, 2, 3))} qid:{query + 1} {values}\n")
    return "".join(lines)


@contextmanager
def workplace() -> Iterator[tuple[Path, Path]]:
    """Inputs, and a folder in which every round begins anew: it keeps its name, which runs write down."""
    with tempfile.TemporaryDirectory(prefix="killed-") as name:
        inputs, folder = Path(name) / "inputs", Path(name) / "work"
        for data, seed in (("data", 1), ("other", 2)):
            (inputs / data).mkdir(parents=True)
            for number, split in enumerate(("train", "vali", "test")):
                (inputs / data / f"{split}.txt").write_text(letor(14 if split == "train" else 8, 10 * seed + number))
        folder.mkdir()
        yield inputs, folder


def training(inputs: Path) -> list[Case]:
    """Runs with everything random in them: dropout, a random loss, sampled lists; several networks at once; one more epochs."""
    data, quiet = str(inputs / "data"), ["--threads", "1", "--quiet", "--device", "cpu", "--out", "run"]
    small = ["--model", "mlp", "--set", "model.hidden=[6]", "--set", "model.dropout=0.2", "--list-size", "5"]
    return [
        Case(
            "train",
            ["train", data, *small, "--loss", "xe_ndcg", "--epochs", "4", "--batch-size", "4", *quiet],
            "run",
            goes_on=True,
        ),
        Case(
            "train members",
            ["train", data, "--members", "4", "--epochs", "3", "--batch-size", "5", *quiet],
            "run",
            goes_on=True,
        ),
    ]


def outputs(inputs: Path) -> list[Case]:
    """What writes a page, a file, a prepared dataset, a table."""
    data, other, first, second = (str(inputs / name) for name in ("data", "other", "first", "second"))
    two_runs(inputs)
    prepared = ["--out", "prepared", "--overwrite", "--quiet"]
    scores = ["--format", "trec", "--out", "scores.run", "--overwrite"]
    page = ["--out", "page.html", "--overwrite"]
    table = [
        "--rows",
        "listnet,rmse",
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--device",
        "cpu",
        "--recipe",
        "small",
        "--quiet",
    ]
    return [
        Case("prepare", ["prepare", data, *prepared], "prepared", ["prepare", other, *prepared], often=3),
        Case("rank", ["rank", first, data, *scores], "scores.run", ["rank", second, data, *scores], often=3),
        Case("report", ["report", first, second, *page], "page.html", ["report", second, *page]),
        Case("reproduce", ["reproduce", "table2", "--data", data, *table, "--out", "table"], "table", goes_on=True),
    ]


def two_runs(inputs: Path) -> None:
    """Finished runs, which are ranked with and reported."""
    for name, loss in (("first", "listnet"), ("second", "rmse")):
        words = [
            "train",
            inputs / "data",
            "--model",
            "linear",
            "--loss",
            loss,
            "--epochs",
            "1",
            "--quiet",
            "--out",
            name,
        ]
        expect(run(words, inputs))


def measured(case: Case, folder: Path, ranks: int = 1) -> Case:
    """The case with what an undisturbed command leaves, how long it takes, and what an older one had left."""
    if case.older:
        expect(run(case.older, cleared(folder)))
        case.old = contents(folder)
    for _ in range(2):  # the first may compile
        cleared(folder)
        begun = time.monotonic()
        ended = all_ended(begin(case.words, folder, {rank: AtChange(0) for rank in range(ranks)}, ranks))
        case.seconds, case.changes = time.monotonic() - begun, [one.changes for one in ended]
        for one in ended:
            expect(one)
        if case.whole and (differs := difference(contents(folder), case.whole)):
            raise RuntimeError(f"{case.name}: two undisturbed commands do not leave the same: {differs}")
        case.whole = contents(folder)
    return case


def expect(ended: Ended) -> None:
    """The command did what it was asked for."""
    if ended.status:
        raise RuntimeError(f"status {ended.status}: {ended.err[-2000:]}")


def cleared(folder: Path, old: dict[str, bytes] | None = None) -> Path:
    """The folder with what an older command left, or with nothing."""
    shutil.rmtree(folder)
    folder.mkdir()
    restore(folder, old or {})
    return folder


# --- a round ----------------------------------------------------------------------------------------------------------


def begin(words: list[str], folder: Path, traps: dict[int, Trap], ranks: int) -> list[Running]:
    """One process, or as many as torchrun would start; a trap for some of them, by rank."""
    return [start(words, folder, traps.get(0))] if ranks == 1 else start_ranks(words, folder, ranks, traps)


def all_ended(running: list[Running]) -> list[Ended]:
    """How they end; where one has failed the others are asked to, as torchrun does: one may wait for it."""
    while len(running) > 1 and any(one.process.is_alive() for one in running):
        wait([one.process.sentinel for one in running if one.process.is_alive()], 120)
        if any(one.process.exitcode for one in running):
            time.sleep(0.2)  # most notice by themselves
            for one in running:
                if one.process.is_alive():
                    one.process.terminate()
            break
    return [one.wait() for one in running]


def disturbed(case: Case, folder: Path, draw: random.Random, what: int, share: float, ranks: int) -> tuple[bool, str]:
    """One command that is killed or stopped somewhere in this share of its time: whether it was, and what went wrong."""
    largest = max(len(content) for content in case.whole.values())
    how = draw.choice(("moment", "change", "write") if what == signal.SIGKILL else ("moment", "change"))
    rank = draw.choice([rank for rank, changes in enumerate(case.changes) if changes])
    traps: dict[int, Trap] = {}
    if how == "change":
        traps[rank] = AtChange(draw.randint(1, max(1, round(share * case.changes[rank]))), what)
    elif how == "write":
        traps[rank] = InWrite(round(math.exp(draw.uniform(0, math.log(largest)))))
    running = begin(case.next_words(folder), folder, traps, ranks)
    asked = time.monotonic()
    if how == "moment":
        running[0].process.join(draw.uniform(0, share * case.seconds))
        asked = time.monotonic()
        for one in running if what == signal.SIGTERM else draw.sample(running, draw.randint(1, ranks)):
            if one.process.is_alive():
                os.kill(one.process.pid or 0, what)
    ended = all_ended(running)
    took = time.monotonic() - asked
    statuses = [one.status for one in ended]
    if not any(statuses):
        return False, ""
    if any("Traceback" in one.err for one in ended):
        return True, f"{case.name}, {how}: {next(one.err for one in ended if 'Traceback' in one.err)[-1500:]}"
    where = f"{case.name}, {how}"
    if what == signal.SIGTERM and how == "moment" and took > PATIENCE:
        return True, f"{where}: ended {took:.1f} s after SIGTERM"
    allowed = {STOPPED} if what == signal.SIGTERM else {*KILLED}
    if ranks > 1:
        allowed |= {0, 2, STOPPED, 128 + signal.SIGINT}  # the others have lost one, or ended well
    if not {*statuses} <= allowed:
        said = next(one.err for one in ended if one.status not in allowed)
        return True, f"{where}: statuses {statuses}: {said[-500:]}"
    if what == signal.SIGTERM and not {*statuses} & {STOPPED}:
        said = "".join(one.err for one in ended)
        return True, f"{where}: statuses {statuses}, none of them {STOPPED}: {said[-500:]}"
    return True, ""


def half_written(case: Case, folder: Path, old: dict[str, bytes], previous: bool) -> str:
    """What is in the output's place and is neither the old nor the new, whole; "" where nothing is."""
    if not case.goes_on:
        found = {name: content for name, content in contents(folder).items() if name.split("/")[0] == case.out}
        return "" if found in (old, case.whole) else f"{case.out} is neither the old nor the new, whole"
    for report in folder.rglob("report.json"):  # a run with one says that it is finished
        place = str(report.parent.relative_to(folder)) + "/"
        expected = {name: content for name, content in case.whole.items() if name.startswith(place)}
        found = {place + name: content for name, content in contents(report.parent).items()}
        if differs := difference(without(found, previous), without(expected, previous)):
            return f"{place} has a report and {differs}"
    return ""


def without(found: dict[str, bytes], previous: bool) -> dict[str, bytes]:
    """All files, or all but the checkpoint before the last."""
    return found if previous else {name: content for name, content in found.items() if Path(name).name != PREVIOUS}


def round_of(
    case: Case, folder: Path, draw: random.Random, what: int, *, over_old: bool = False, ranks: int = 1
) -> str:
    """Killed three times and then left alone; what went wrong, "" if nothing did."""
    previous = what == signal.SIGKILL and ranks == 1  # else some process may have saved within an epoch
    old = case.old if over_old else {}
    for again in range(8):  # one that ends before it was killed three times does not count: the next is killed earlier
        cleared(folder, old)
        kills = 0
        for attempt in range(12):
            if kills == KILLS or case.finished(folder):
                break
            share = 1.0 if not case.goes_on or kills == KILLS - 1 else 0.4
            was, wrong = disturbed(case, folder, draw, what, share / 2**again, ranks)
            wrong = wrong or half_written(case, folder, old, previous)
            if wrong:
                return f"{wrong} (kill {kills + 1}, attempt {attempt + 1})"
            kills += was
        if kills == KILLS:
            break
    if not case.finished(folder):
        for ended in all_ended(begin(case.next_words(folder), folder, {}, ranks)):
            if ended.status:
                return f"{case.name}: left alone after {kills} kills it ended with {ended.status}: {ended.err[-500:]}"
    if kills < KILLS:
        return f"{case.name}: it ended before it was killed {KILLS} times, again and again"
    differs = difference(without(contents(folder), previous), without(case.whole, previous))
    return differs and f"{case.name}: {differs} after {KILLS} kills"


def rounds(make: Callable[[Path], list[Case]], times: int, seed: int, *signals: int, ranks: int = 1) -> Tally:
    """So many rounds for each of the signals, the commands in turn."""
    draw = random.Random(seed)
    with workplace() as (inputs, folder):
        cases = [measured(case, folder, ranks) for case in make(inputs)]
        turn = [case for case in cases for _ in range(case.often)]
        order = [turn[number % len(turn)] for number in range(max(times, len(turn)))]
        chosen = order[:times] if times >= len(turn) else cases[:times]
        return tally(
            round_of(case, folder, draw, what, over_old=draw.random() < 0.7, ranks=ranks)
            for what in signals
            for case in chosen
        )


WHOLE = "and left alone then ends with the bytes of an undisturbed one"
PROMISES = [
    Promise(
        "killed-train",
        f"`train` killed 3 times, by SIGKILL at a random moment, at a random change of the disk or inside of a write, resumed each time {WHOLE}",
        100,
        lambda times, seed: rounds(training, times, seed, signal.SIGKILL),
    ),
    Promise(
        "killed-outputs",
        f"`prepare`, `rank --out`, `report` and `reproduce` killed so 3 times, mostly over older output, which stays whole until the new is; {WHOLE}",
        120,
        lambda times, seed: rounds(outputs, times, seed, signal.SIGKILL),
    ),
    Promise(
        "killed-ranks",
        f"`train` with 2 processes, one or both killed so 3 times, resumed {WHOLE}",
        20,
        lambda times, seed: rounds(training, times, seed, signal.SIGKILL, ranks=2),
    ),
    Promise(
        "stopped-train",
        f"`train` asked to stop by SIGTERM 3 times saves within {PATIENCE:.0f} s, status {STOPPED}, resumed {WHOLE}",
        100,
        lambda times, seed: rounds(training, times, seed, signal.SIGTERM),
    ),
    Promise(
        "stopped-outputs",
        f"`prepare`, `rank --out`, `report` and `reproduce` stopped by SIGTERM 3 times, status {STOPPED}; {WHOLE}",
        120,
        lambda times, seed: rounds(outputs, times, seed, signal.SIGTERM),
    ),
    Promise(
        "stopped-ranks",
        f"`train` with 2 processes asked to stop by SIGTERM 3 times, status {STOPPED}, resumed {WHOLE}",
        20,
        lambda times, seed: rounds(training, times, seed, signal.SIGTERM, ranks=2),
    ),
]
