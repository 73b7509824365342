"""`make chaos` kills commands hundreds of times; here three rounds of each, three kills a round."""

import signal

import pytest
from reliability.killed import outputs, rounds, training


def one_training(inputs):
    return training(inputs)[:1]


def three_outputs(inputs):
    """Three rounds do not reach the fourth, a table, which would be trained twice to be measured."""
    return outputs(inputs)[:3]


@pytest.mark.slow
@pytest.mark.parametrize(("commands", "ranks"), [(training, 1), (three_outputs, 1), (one_training, 2)])
def test_killed_three_times_a_command_ends_as_if_nothing_had_been(commands, ranks):
    counted = rounds(commands, 3, 0, signal.SIGKILL, signal.SIGTERM, ranks=ranks)
    assert counted.tried == 6 and not counted.failures
