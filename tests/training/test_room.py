"""How many cores others leave, by counters and clocks that are made up."""

import math
from types import SimpleNamespace

import pytest

from rankgrad.training import room
from rankgrad.training.room import WINDOW, Room


class Machine:
    """Two cores of ours and one that is not, on which time passes only when it is told."""

    def __init__(self, tmp_path, monkeypatch):
        self.now, self.own, self.idle, self.read = 100.0, 50.0, [0.0, 0.0, 0.0], 0
        self.counters = tmp_path / "stat"
        monkeypatch.setattr(room, "COUNTERS", self)
        monkeypatch.setattr(room, "time", SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: self.own))
        monkeypatch.setattr(room.os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
        monkeypatch.setattr(room.os, "sysconf", lambda _: 100)

    def read_text(self):
        self.read += 1
        lines = [f"cpu{core} 10 0 5 {round(100 * idle)} 3 0 0 0 0 0" for core, idle in enumerate(self.idle)]
        return "\n".join(["cpu 30 0 15 0 9 0 0 0 0 0", *lines, "intr 12345 0 0", "ctxt 99", ""])

    def passes(self, seconds, own, idle):
        self.now += seconds
        self.own += own * seconds
        self.idle = [before + seconds * share for before, share in zip(self.idle, idle)]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("own", "idle", "found"),
    [
        (1.0, (0.0, 0.0, 1.0), 2.0),  # alone
        (1.0, (0.0, 1.0, 0.0), 1.0),  # a core that is not ours is idle
        (0.67, (0.0, 1.0, 0.0), 0.67),  # two others
        (1.8, (0.1, 0.0, 0.1), 2.0),  # both at work
    ],
)
def test_room_is_what_was_had_and_what_was_idle(machine, own, idle, found):
    read = Room()
    assert read() == math.inf
    machine.passes(1.0, own, idle)
    assert read() == pytest.approx(found)
    machine.passes(WINDOW / 2, 0.0, (0.0, 0.0, 0.0))
    assert read() == pytest.approx(found)  # until the next window is over
    machine.passes(WINDOW / 2, 0.0, (0.0, 0.0, 0.0))
    assert read() == pytest.approx(0.0)


def test_readings_that_take_long_are_seldom(machine, monkeypatch):
    text = machine.read_text

    def slowly():
        machine.now += 0.002
        return text()

    monkeypatch.setattr(machine, "read_text", slowly)
    read = Room()
    for _ in range(100):
        machine.passes(0.01, 1.0, (0.0, 0.0, 1.0))
        read()
    assert machine.read <= 6


def test_counters_may_be_few(machine, monkeypatch):
    monkeypatch.setattr(machine, "read_text", lambda: f"cpu0 10 0 5 {machine.idle[0] * 100:.0f}\ncpu2 10 0 5 0\n")
    read = Room()
    machine.passes(1.0, 1.0, (1.0, 0.0, 0.0))
    assert read() == pytest.approx(2.0)


def test_of_a_thread_that_is_bound_to_a_core_nothing_is_said_of_others(machine, monkeypatch):
    monkeypatch.setattr(room.os, "sched_getaffinity", lambda _: {0})
    read = Room()
    machine.passes(1.0, 1.0, (0.0, 0.0, 1.0))
    assert read() == math.inf


@pytest.mark.parametrize("text", ["", "cpu0 0 0 0 0 0\ncpu2 0 0 0 0 0\n", "cpu0 1 2 3 4 5\n", "cpu0 a b\n", None])
def test_where_nobody_counts_room_is_infinite(machine, monkeypatch, text):
    def said():
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(machine, "read_text", said)
    read = Room()
    machine.passes(1.0, 1.0, (0.0, 0.0, 0.0))
    assert read() == math.inf


def test_without_a_set_of_cores_it_is_infinite(machine, monkeypatch):
    monkeypatch.delattr(room.os, "sched_getaffinity")
    read = Room()
    machine.passes(1.0, 1.0, (0.0, 0.0, 0.0))
    assert read() == math.inf


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu.max": "nonsense\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_quota_of_a_container(files, found, tmp_path, monkeypatch):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(room, "GROUP", tmp_path)
    assert room.quota() == found
