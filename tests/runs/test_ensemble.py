"""The mean of standardised scores against hand-made numbers: constant lists, scales, refusals."""

import math

import numpy as np
import pytest

from rankgrad.runs.averaging import mean_of_standardised


def test_scores_are_standardised_within_each_list_and_averaged():
    # list 1: 1, 2, 3 has mean 2 and deviation sqrt(2/3); list 2: 0, 4 becomes -1, 1; list 3 has one document
    first = [1.0, 2.0, 3.0, 0.0, 4.0, 9.0]
    second = [5.0, 5.0, 5.0, 1.0, -1.0, 0.0]  # a constant list has no opinion
    edge = math.sqrt(1.5)
    alone = mean_of_standardised([first], [0, 3, 5, 6])
    np.testing.assert_allclose(alone, [-edge, 0, edge, -1, 1, 0], atol=1e-15)
    both = mean_of_standardised([first, second], [0, 3, 5, 6])
    np.testing.assert_allclose(both, [-edge / 2, 0, edge / 2, 0, 0, 0], atol=1e-15)
    weighted_by_votes = mean_of_standardised([first, first, second], [0, 3, 5, 6])
    np.testing.assert_allclose(weighted_by_votes[3:], [-1 / 3, 1 / 3, 0], atol=1e-15)


def test_scale_and_shift_of_a_ranker_do_not_matter_and_equal_scores_are_exactly_zero():
    rng = np.random.default_rng(0)
    offsets = [0, 4, 5, 12]
    scores, other = rng.normal(size=12), rng.normal(size=12)
    expected = mean_of_standardised([scores, other], offsets)
    for scale, shift in ((1e150, 0), (1e-150, 0), (3.0, 1e6)):
        np.testing.assert_allclose(mean_of_standardised([scale * scores + shift, other], offsets), expected, atol=1e-9)
    for value in (0.1, -7.3, np.float32(0.7), 1e300):  # in sums, 0.1 three times is not 0.3
        assert not mean_of_standardised([np.full(12, value)], offsets).any()
    integers = mean_of_standardised([np.array([3, 1, 2, 2])], np.array([0, 2, 4]))
    assert integers.tolist() == [1, -1, 0, 0]


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(ValueError, match="there are no scores to take the mean of"):
        mean_of_standardised([], [0, 2])
    with pytest.raises(ValueError, match=r"scores have shape \[3\]; expected one for each of 2 documents"):
        mean_of_standardised([[1.0, 2.0], [1.0, 2.0, 3.0]], [0, 2])
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="the scores of a ranker are not finite"):
            mean_of_standardised([[1.0, bad]], [0, 2])
