"""Pairwise losses and ApproxNDCG: the kernels against the torch path in float64."""

import pytest
import torch
from kernel_cases import (
    PAIRWISE,
    agree,
    batch,
    check_bad_values,
    check_degenerate_lists_and_reductions,
    check_gain_that_is_not_finite,
    check_graph_capture,
    check_half_precision_and_strides,
    on_the_gpu,
)

every_loss = pytest.mark.parametrize("name", [*PAIRWISE, "approx_ndcg"])


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("options", [{}, {"k": 3}, {"k": 3, "pairs": "both"}])
def test_pairwise(name, options):
    agree(name, *batch(), **options)


def test_approx_ndcg():
    agree("approx_ndcg", *batch(), alpha=10.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lambdarank", "ndcg_loss2pp", "approx_ndcg"])
def test_lists_of_several_tiles(name):
    agree(name, *batch((67, 131), 133))


@pytest.mark.parametrize("name", ["ndcg_loss2pp", "approx_ndcg"])
@pytest.mark.parametrize("gain", ["linear", torch.sqrt])
def test_gains(name, gain):
    agree(name, *batch(), gain=gain)


@pytest.mark.parametrize("name", ["approx_ndcg", "lambdarank", "ndcg_loss1"])
def test_a_gain_that_is_not_finite_in_a_list_that_is_not_informative(name):
    check_gain_that_is_not_finite(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lambdarank", "ranknet", "approx_ndcg"])
def test_huge_score_gaps(name):
    agree(name, *batch((7, 10), 12, spread=1e4, ties=False))


@every_loss
def test_degenerate_lists_and_reductions(name):
    check_degenerate_lists_and_reductions(name)


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strides(name, dtype):
    check_half_precision_and_strides(name, dtype)


@every_loss
def test_bad_values_are_loud_and_stay_in_their_list(name):
    check_bad_values(name)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64, torch.bfloat16])
def test_label_dtypes(dtype):
    scores, labels, mask = batch((7, 5), 9)
    labels = labels.nan_to_num(0).to(dtype)
    agree("lambdarank", scores, labels, mask)
    agree("lambdarank", scores[0][mask[0]], labels[0][mask[0]], None)


@on_the_gpu
@every_loss
def test_lists_of_up_to_256_on_the_gpu(name):
    agree(name, *batch((240, 200, 129, 128, 3, 256), 256, ties=False), tolerance=5e-5)


@on_the_gpu
@pytest.mark.parametrize("name", PAIRWISE)
def test_very_long_lists_on_the_gpu(name):
    agree(name, *batch((3000, 2500), 3001, ties=False), tolerance=5e-5)


@on_the_gpu
@every_loss
def test_graph_capture(name):
    check_graph_capture(name, *batch((240, 200, 129), 240, ties=False), replays=3)
