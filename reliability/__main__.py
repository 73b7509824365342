"""`python -m reliability chaos|nightly`: try every promise of a command, print what failed, write docs/reliability.md."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reliability.promise import Promise
from reliability.table import PAGE, Row, merged

ROOMS = {
    "chaos": ("damaged", "hostile", "killed", "refused", "numbers", "workers", "names"),
    "nightly": ("invariants", "readers", "load"),
}  # the files of each command's promises
LOGS = Path("build/reliability")


def promises(command: str) -> list[Promise]:
    """All promises of a command, in the order of its files."""
    return [promise for room in ROOMS[command] for promise in importlib.import_module(f"reliability.{room}").PROMISES]


def try_one(command: str, promise: Promise, given: argparse.Namespace) -> tuple[Promise, dict[str, object]]:
    """A promise in a process of its own: what it does to memory, threads and files is its own."""
    asked = [sys.executable, "-m", "reliability", command, "--only", promise.name, "--one", "--seed", str(given.seed)]
    begun = time.perf_counter()
    done = subprocess.run([*asked, "--share", str(given.share)], capture_output=True, text=True)
    (LOGS / f"{promise.name}.log").write_text(done.stdout + done.stderr)
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        found = {"tried": 1, "failures": [f"the attempt itself ended with status {done.returncode}"], "note": ""}
    found["seconds"] = time.perf_counter() - begun
    print(
        f"{promise.name:<24}{found['tried']:>8,} tried{len(found['failures']):>6} failed{found['seconds']:>8.0f} s",
        flush=True,
    )
    return promise, found


def _commit() -> str:
    """That of the checkout, and whether it is changed; the page itself is, by whichever command ran first."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "--no-optional-locks", *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":!{PAGE.name}", f":!*/{PAGE.name}")
    return git("describe", "--always") + ("-dirty" if changed else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m reliability", description=__doc__)
    parser.add_argument("command", choices=list(ROOMS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these promises alone")
    parser.add_argument(
        "--share", type=float, default=1.0, help="this share of the tries; the page is written for all of them only"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = promises(given.command)
    if unknown := set(given.only or ()) - {promise.name for promise in known}:
        parser.error(
            f"no promise {', '.join(sorted(unknown))}; there are {', '.join(promise.name for promise in known)}"
        )
    chosen = [promise for promise in known if not given.only or promise.name in given.only]
    if given.one:
        (promise,) = chosen
        counted = promise.attempt(max(1, round(promise.times * given.share)), given.seed)
        print(json.dumps({"tried": counted.tried, "failures": counted.failures, "note": counted.note}))
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count() or 1) as together:
        found = list(together.map(lambda one: try_one(given.command, one, given), [p for p in chosen if not p.alone]))
    found += [try_one(given.command, promise, given) for promise in chosen if promise.alone]
    minutes = (time.perf_counter() - begun) / 60
    failures = [f"{promise.name}: {line}" for promise, result in found for line in result["failures"]]
    print("\n".join(failures) or "every promise held", flush=True)
    if given.share == 1:
        rows = [
            Row(
                p.words,
                f"{given.command} --only {p.name}",
                r["tried"],
                r["tried"] - len(r["failures"]),
                r["note"],
                _commit(),
            )
            for p, r in found
        ]
        whole = (
            ""
            if given.only
            else f"`make {given.command}`: {minutes:.0f} minutes on {os.cpu_count()} cores, seed {given.seed}"
        )
        PAGE.write_text(merged(PAGE.read_text() if PAGE.is_file() else "", rows, given.command, whole))
        print(f"{PAGE.relative_to(Path.cwd())} written after {minutes:.1f} minutes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
