"""What the environment tells OpenMP about threads that wait for each other. Imports no torch, which reads it when it is loaded."""

import os

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SHORTLY = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}  # half a millisecond, as long as an operation takes


def spin_shortly() -> None:
    """Let threads sleep soon while they wait, and on an idle machine not between two operations. What the user has set stays."""
    if not any(name in os.environ for name in WAITING):
        os.environ |= SHORTLY


def waiting_was_chosen() -> bool:
    """Whether the environment says how threads wait, and `spin_shortly` did not put it there."""
    said = {name: os.environ[name] for name in WAITING if name in os.environ}
    return bool(said) and said != SHORTLY
