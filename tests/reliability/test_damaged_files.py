"""`make chaos` damages every file 800 times; here each a few times, the last byte and all of it cut off among them."""

import pytest
from reliability.damaged import FILES, attempt, exchange


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_damage_is_noticed_by_whoever_reads_the_file(kind):
    counted = attempt(kind)(3, 0)
    assert counted.tried >= 3 and not counted.failures


@pytest.mark.slow
def test_a_file_of_another_run_is_noticed():
    counted = exchange(1, 0)
    assert counted.tried > 40 and not counted.failures
