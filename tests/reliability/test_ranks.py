"""Two processes: the promises of reliability/numbers.py and reliability/workers.py, a few tries each."""

import sys

import pytest

import children

pytestmark = pytest.mark.slow  # each starts processes


def held(attempt, times):
    """Try a promise in a process that has no threads, because it forks."""
    from reliability import numbers

    found = getattr(numbers, attempt)(times, 1)
    print("\n".join(found.failures), file=sys.stderr)
    sys.exit(bool(found.failures) or found.tried != times)


@pytest.mark.parametrize(
    ("attempt", "times"), [("refused_steps", 5), ("dropped_members", 3), ("nothing_relevant", 1)]
)  # every kind once
def test_bad_numbers_in_one_of_two_processes(attempt, times):
    assert children.code(children.start(held, attempt, times), seconds=120) == 0
