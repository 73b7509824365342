"""Commands that cannot write: the disk is full or read-only, files may not grow, nothing is permitted, another process is at work.

One sentence with the path and the cause, a status that is not 0, what was there before untouched, nothing left beside it. A run that
had learned something goes on when there is room again.
"""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reliability.commands import (
    AtChange,
    Ended,
    Nobody,
    SizeLimit,
    SmallDisk,
    Trap,
    contents,
    difference,
    own_disks,
    run,
    start,
)
from reliability.killed import cleared, expect, outputs, training, workplace
from reliability.promise import Promise, Tally

CAUSES = {
    "full disk": "No space left on device",
    "size limit": "File too large",
    "read-only": "Read-only file system",
    "permission": "Permission denied",
}


@dataclass
class Command:
    """A command that writes, and what it leaves when nothing is in its way."""

    name: str
    words: list[str]
    older: list[list[str]]  # commands before it
    old: dict[str, bytes]
    whole: dict[str, bytes]


def commands(inputs: Path, folder: Path, only: Sequence[str] = ()) -> list[Command]:
    """Every command that writes, or those called so, with what it needs in the folder or beside it."""
    known = {case.name: case for case in [*training(inputs), *outputs(inputs)]}
    data, first = str(inputs / "data"), str(inputs / "first")
    expect(run(["rank", first, data, "--out", "scores.txt"], inputs))
    begun = ["train", data, "--model", "linear", "--epochs", "1", "--threads", "1", "--quiet", "--out", "run"]
    scores = ["evaluate", "--scores", str(inputs / "scores.txt"), data, "--name", "x", "--out", "kept", "--overwrite"]
    made: list[tuple[str, list[str], list[list[str]]]] = [
        ("train", known["train"].words, []),
        ("train --resume", ["train", "--resume", "run", "--epochs", "3", "--quiet"], [begun]),
        ("prepare", known["prepare"].words, [known["prepare"].older]),
        ("evaluate --scores", scores, [scores]),
        ("rank --out", known["rank"].words, [known["rank"].older]),
        ("report", known["report"].words, [known["report"].older]),
        ("explain", ["explain", "run", data, "--queries", "3", "--repeats", "2", "--quiet"], [begun]),
        ("export", ["export", "run", "--format", "torch", "--out", "model.pt2", "--overwrite"], [begun]),
        ("distil", ["distil", first, data, "--into", "linear", "--epochs", "1", "--quiet", "--out", "small"], []),
        ("reproduce figure1", ["reproduce", "figure1", "--out", "figure.svg"], []),
        ("reproduce table2", known["reproduce"].words, []),
        ("synthetic", ["synthetic", "--size", "tiny", "--out", "lists", "--quiet"], []),
    ]
    found = []
    for name, words, older in [line for line in made if not only or line[0] in only]:
        cleared(folder)
        for line in older:
            expect(run(line, folder))
        old = contents(folder)
        ended = run(words, folder)
        expect(ended)
        found.append(Command(name, words, older, old, contents(folder)))
    return found


def trap_of(trouble: str, command: Command, folder: Path, draw: random.Random) -> Trap:
    """What is in its way, and how much of it fits."""
    new = {name: content for name, content in command.whole.items() if content != command.old.get(name)}
    if trouble == "size limit":
        largest = max(map(len, new.values()))
        return SizeLimit(draw.randrange(min(1024, largest), largest))
    if trouble == "full disk":
        return SmallDisk(folder, draw.choice((0, draw.randrange(sum(map(len, new.values()))))) // 4096 * 4096)
    return SmallDisk(folder, None) if trouble == "read-only" else Nobody()


def one(command: Command, trouble: str, folder: Path, draw: random.Random) -> str:
    """A command with a trouble in its way; what went wrong with that, "" if nothing did."""
    cleared(folder, command.old)
    ended = run(command.words, folder, trap_of(trouble, command, folder, draw))
    where = f"{command.name}, {trouble}"
    if ended.status == 0:  # there was room after all
        enough = trouble in ("full disk", "size limit") and sorted(contents(folder)) == sorted(command.whole)
        return "" if enough else f"{where}: it says that it has written"
    if wrong := sentence(ended, CAUSES[trouble]):
        return f"{where}: {wrong}"
    after = contents(folder)
    if lost := [name for name, content in command.old.items() if after.get(name) != content]:
        return f"{where}: {lost[0]}, which was there before, is not as it was"
    new = [name for name in after if name not in command.old]
    resumable = command.name.startswith("train") or command.name == "reproduce table2"
    if new and not resumable:
        return f"{where}: {new[0]} was left"
    if resumable:
        words = command.words
        if "run/config.toml" in after or "run/.extending/config.toml" in after:
            words = (
                ["train", "--resume", "run", "--quiet"]
                if "run/.extending/config.toml" in after or not command.old
                else words
            )
        again = run(words, folder)
        if again.status:
            return f"{where}: with room again it ended with {again.status}: {again.err[-300:]}"
        if differs := difference(contents(folder), command.whole):
            return f"{where}: with room again {differs}"
    return ""


def sentence(ended: Ended, cause: str) -> str:
    """What is wrong with what a command says of its trouble, "" if nothing is."""
    lines = ended.err.strip().splitlines()
    if "Traceback" in ended.err or ended.status not in (1, 2):
        return f"status {ended.status}: {ended.err[-700:]}"
    if len(lines) != 1 or not lines[0].startswith("rankgrad: "):
        return f"it says not one sentence but {lines}"
    if cause not in lines[0]:
        return f"the cause, {cause}, is not in {lines[0]!r}"
    if not re.search(
        r"\b(run|prepared|kept|scores\.run|page\.html|model\.pt2|small|figure\.svg|table|lists)\b", lines[0]
    ):
        return f"no path is in {lines[0]!r}"
    return ""


def troubles(times: int, seed: int, only: Sequence[str] = (), causes: Sequence[str] = tuple(CAUSES)) -> Tally:
    """Every command, or those called so, with every trouble, so many times each."""
    draw, counted = random.Random(seed), Tally()
    with workplace() as (inputs, folder):
        inputs.parent.chmod(0o755)  # for the other user
        found = commands(inputs, folder, only)
        known = causes if own_disks() else ["size limit"]
        counted.note = ", ".join(known)
        for command in found:
            for trouble in known:
                for _ in range(times if trouble in ("full disk", "size limit") else 1):
                    counted.add(one(command, trouble, folder, draw))
    return counted


# --- two at once ------------------------------------------------------------------------------------------------------

AT_ONCE = ("train", "prepare", "train --resume", "reproduce table2", "rank --out", "synthetic")


def two_at_once(times: int, seed: int) -> Tally:
    """A command while another one writes to the same place: refused, or one of them after the other, and the first ends whole."""
    draw, counted = random.Random(seed), Tally()
    with workplace() as (inputs, folder):
        found = commands(inputs, folder, AT_ONCE[:times])
        for number in range(times):
            counted.add(together(found[number % len(found)], folder, draw))
    return counted


def together(command: Command, folder: Path, draw: random.Random) -> str:
    """The first stands still somewhere among its changes of the disk, as if it took its time, and the second comes."""
    cleared(folder, command.old)
    count = run(command.words, folder, AtChange(0)).changes
    cleared(folder, command.old)
    first = start(command.words, folder, AtChange(draw.randint(1, count), signal.SIGSTOP))
    while not (stopped := _stopped(first.process.pid or 0)) and first.process.is_alive():
        first.process.join(0.02)
    begun = command.name.startswith("train") and (folder / "run" / "config.toml").is_file()
    second = ["train", "--resume", "run", "--quiet"] if begun else command.words
    came = start(second, folder, log=folder.parent / "second").wait()
    if stopped:
        os.kill(first.process.pid or 0, signal.SIGCONT)
    ended = first.wait()
    refused = came.status == 2 and "Traceback" not in came.err and len(came.err.strip().splitlines()) == 1
    if came.status and not refused:
        return f"{command.name}: the second ended with {came.status}: {came.err[-500:]}"
    lost = ended.status == 2 and "Traceback" not in ended.err and came.status == 0  # the second was faster
    if ended.status and not lost:
        return f"{command.name}: the first ended with {ended.status}: {ended.err[-500:]}"
    differs = difference(contents(folder), command.whole)
    return differs and f"{command.name}: {differs} after two at once"


def _stopped(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def no_cache(times: int, seed: int) -> Tally:  # noqa: ARG001 (nothing is drawn)
    """Without a home and with a folder for compiled code that cannot be written a command does its work."""
    counted = Tally()
    with workplace() as (inputs, folder):
        for _ in range(times):
            cleared(folder)
            words = ["prepare", str(inputs / "data"), "--out", "prepared", "--quiet"]
            environment = {name: text for name, text in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
            environment |= {"NUMBA_CACHE_DIR": "/proc/none", "MPLCONFIGDIR": "/proc/none"}
            done = subprocess.run(
                [sys.executable, "-m", "rankgrad", *words],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            good = done.returncode == 0 and not done.stderr and (folder / "prepared" / "summary.txt").is_file()
            counted.add("" if good else f"status {done.returncode}: {done.stderr[-500:]}")
    return counted


PROMISES = [
    Promise(
        "refused",
        "Every command that writes, on a full disk, a read-only one, under a file-size limit, without permission and home: one sentence with "
        "path and cause, old files as they were, and goes on when there is room",
        2,
        troubles,
    ),
    Promise(
        "two-at-once",
        "Of two processes on one run, prepared dataset, table or file the second is refused with a sentence, and the first ends whole",
        30,
        two_at_once,
    ),
    Promise("no-cache", "Without a home and a cache for compiled code a command does its work", 1, no_cache),
]
