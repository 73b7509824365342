"""A promise: one sentence, and a function that tries it so often and counts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Tally:
    """How often something was tried, and each time it did not hold."""

    tried: int = 0
    failures: list[str] = field(default_factory=list)  # a line each: what was done, what came of it
    note: str = ""  # a measured number that belongs to the promise, "peak 2.1 GiB" for instance

    @property
    def survived(self) -> int:
        return self.tried - len(self.failures)

    def add(self, failure: str = "") -> None:
        """One more try; `failure` says what went wrong, "" that nothing did."""
        self.tried += 1
        if failure:
            self.failures.append(failure)


@dataclass(frozen=True)
class Promise:
    """`attempt(times, seed)` tries it `times` times; the same seed tries the same."""

    name: str  # of the command's --only
    words: str  # the promise, for the table
    times: int  # how often the whole command tries it
    attempt: Callable[[int, int], Tally]
    alone: bool = False  # needs all cores for itself: it measures seconds or memory


def tally(outcomes: Iterable[str]) -> Tally:
    """Count outcomes, "" for each that held."""
    counted = Tally()
    for failure in outcomes:
        counted.add(failure)
    return counted
