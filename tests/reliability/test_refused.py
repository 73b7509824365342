"""`make chaos` tries every command on disks that are full in more places."""

import pytest
from reliability.refused import troubles, two_at_once


@pytest.mark.slow
def test_a_command_that_cannot_write_says_why_and_leaves_what_was_there():
    counted = troubles(1, 0)
    assert counted.tried >= 12 and not counted.failures


@pytest.mark.slow
def test_of_two_processes_in_one_place_the_second_is_refused():
    counted = two_at_once(6, 0)
    assert counted.tried == 6 and not counted.failures
