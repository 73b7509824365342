"""Which path a tensor gets, and what is checked before a kernel gets it."""

import math
import subprocess
import sys

import pytest
import torch
from kernel_cases import CUDA, DEVICE, EVERY, batch, on_the_gpu, run

from rankgrad import kernels
from rankgrad.losses import LOSSES


def test_which_path_a_tensor_gets(monkeypatch):
    scores = torch.zeros(2, 3)
    assert kernels.choose("auto", scores) == kernels.choose("torch", scores) == "torch"
    for backend, tensor, message in (
        ("triton", scores.double(), "float64"),
        ("fast", scores, "'auto', 'torch', 'triton', got 'fast'"),
    ):
        if CUDA and backend == "triton":
            tensor = tensor.cuda()
            assert kernels.choose("auto", tensor) == "torch"
        with pytest.raises(ValueError, match=message):
            kernels.choose(backend, tensor)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="scores are on cpu"):
        kernels.choose("triton", scores)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_INSTALLED", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        kernels.choose("triton", scores)


def test_why_there_is_no_attention_kernel():
    assert "CUDA" in kernels.why_no_attention(torch.device("cpu"), 96)
    assert "up to 128 dimensions, got 256" in kernels.why_no_attention(torch.device("cuda"), 256)
    assert kernels.why_no_attention(torch.device("cuda"), 96) == ""


def test_losses_do_not_import_triton_until_used():
    code = "import sys, torch, rankgrad.losses as l; l.neural_ndcg(torch.zeros(3), torch.ones(3)); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", EVERY)
def test_empty_tensors_take_the_torch_path(name):
    for shape in ((0, 5), (3, 0)):
        scores = torch.zeros(shape, device=DEVICE, requires_grad=True)
        LOSSES[name](scores, torch.zeros(shape, device=DEVICE), backend="triton").backward()
        assert scores.grad.shape == shape


@pytest.mark.parametrize("name", ["lambdarank", "approx_ndcg", "neural_ndcg"])
def test_arguments_are_validated_before_a_kernel_too(name):
    scores = torch.zeros(2, 3, device=DEVICE)
    options = [("reduction", "median"), ("gain", "cubic"), ("check", 3)]
    for option, wrong in options if name == "approx_ndcg" else [*options, ("k", 0)]:
        with pytest.raises(ValueError, match=f"{option} must"):
            LOSSES[name](scores, scores, backend="triton", **{option: wrong})
    with pytest.raises(ValueError, match="labels must have the shape"):
        LOSSES[name](scores, scores[:1], backend="triton")


def test_the_gradient_is_scaled_before_it_is_rounded():
    scores = torch.tensor([20.0, 0.0], dtype=torch.float16, device=DEVICE, requires_grad=True)
    loss = LOSSES["ranknet"](scores, torch.tensor([1, 0], device=DEVICE), backend="triton")
    loss.backward(torch.tensor(2.0**16, device=DEVICE))  # as a loss scaler does; float16 has no number near exp(-20)
    expected = 2.0**16 * math.exp(-20)
    torch.testing.assert_close(scores.grad.tolist(), [-expected, expected], rtol=2e-3, atol=0)


@on_the_gpu
@pytest.mark.parametrize("name", EVERY)
def test_on_a_gpu_kernels_are_chosen(name):
    lists = batch((240, 200, 129), 240, ties=False)
    assert all(torch.equal(a, b) for a, b in zip(run(name, *lists, "triton"), run(name, *lists, "auto")))
