"""docs/reliability.md: a row for each promise, written by the command that tried it; rows of the other command stay as they are."""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
HEAD = """# Reliability

What may go wrong is made to go wrong, on purpose and many times. Each row is a promise: the command that tries it, how often it was
tried, and how often it held. The table is written by `make chaos` and `make nightly`, never by hand; tests/reliability tries each
promise a few times in `make test`. `python -m reliability chaos --only NAME` tries one of them.

"""
COLUMNS = ("promise", "command", "tried", "survived", "measured", "commit")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    promise: str
    command: str
    tried: int
    survived: int
    measured: str
    commit: str

    def line(self) -> str:
        cells = (self.promise, f"`{self.command}`", f"{self.tried:,}", f"{self.survived:,}", self.measured, self.commit)
        return f"| {' | '.join(cells)} |"


def read_rows(text: str) -> list[Row]:
    """The rows of a page."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == len(COLUMNS) and cells[2].replace(",", "").isdigit():
            tried, survived = (int(cell.replace(",", "")) for cell in cells[2:4])
            rows.append(Row(cells[0], cells[1].strip("`"), tried, survived, cells[4], cells[5]))
    return rows


def page(rows: list[Row], durations: list[str]) -> str:
    """The whole page; `durations` says how long each command took and on what."""
    table = [f"| {' | '.join(COLUMNS)} |", "|---|---|---:|---:|---|---|", *(row.line() for row in rows)]
    return HEAD + "\n".join([*table, "", *(f"- {line}" for line in durations)]) + "\n"


def merged(text: str, rows: list[Row], command: str, duration: str) -> str:
    """The page `text` with these rows of `command` instead of those it had; rows that were not tried again stay."""
    again = {row.command for row in rows}
    kept = [row for row in read_rows(text) if row.command not in again]
    durations = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- `make ")]
    if duration:
        durations = [line for line in durations if not line.startswith(f"`make {command}`")] + [duration]
    ordered = sorted([*kept, *rows], key=lambda row: row.command)
    return page(ordered, sorted(durations))
