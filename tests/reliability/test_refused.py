"""`make chaos` tries every command on disks that are full in more places."""

import pytest
from reliability.refused import troubles, two_at_once


@pytest.mark.slow
def test_a_command_that_cannot_write_says_why_and_leaves_what_was_there():
    # Not as another user: who may not read Python's own folder needs a server of processes that has imported all of it.
    causes = ("full disk", "size limit", "read-only")
    counted = troubles(1, 0, ("train", "prepare", "rank --out", "export"), causes)
    assert counted.tried >= 4 and not counted.failures


@pytest.mark.slow
def test_of_two_processes_in_one_place_the_second_is_refused():
    counted = two_at_once(3, 0)
    assert counted.tried == 3 and not counted.failures
