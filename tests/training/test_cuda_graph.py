"""What is compiled or recorded gives what it gave before; what cannot be is computed as it is, and says so."""

from typing import NamedTuple

import pytest
import torch

from rankgrad.training.cuda_graph import Captured, Compiler

on_the_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor
    times: int
    nothing: None = None


def combined(batch):
    return batch.one * batch.times + batch.other


def test_a_compiler_that_is_off_leaves_functions_alone():
    assert Compiler(on=False)(combined) is combined


def test_what_cannot_be_compiled_is_computed_and_said(monkeypatch):
    def compile_badly(function, dynamic):
        def broken(*given):
            from torch._dynamo.exc import BackendCompilerFailed

            raise BackendCompilerFailed(compile_badly, RuntimeError("no compiler\nat all"), None)

        return broken

    monkeypatch.setattr(torch, "compile", compile_badly)
    compiler = Compiler(on=True)
    function = compiler(lambda x: x + 1)
    assert function(1) == 2 and "the step cannot be compiled: " in compiler.reason and "\n" not in compiler.reason
    assert function(2) == 3
    with pytest.raises(ValueError, match="train.compile = true: the step cannot be compiled.*say 'auto' or false"):
        Compiler(on=True, required=True)(lambda x: x)(1)


def test_a_function_s_own_error_is_not_the_compiler_s(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)

    def wrong(x):
        raise RuntimeError("shapes")

    compiler = Compiler(on=True)
    with pytest.raises(RuntimeError, match="shapes"):
        compiler(wrong)(1)
    assert not compiler.reason


def pairs(sizes, generator):
    return [
        Pair(*(torch.randn(size, device="cuda", generator=generator) for _ in range(2)), times) for size, times in sizes
    ]


@on_the_gpu
def test_shapes_and_numbers_have_graphs_of_their_own():
    captured = Captured(combined, (), torch.device("cuda"))
    draw = torch.Generator("cuda").manual_seed(0)
    for batch in pairs([(3, 2), (5, 2), (3, 4)] * 4, draw):
        torch.testing.assert_close(captured(batch), combined(batch))
    assert not captured.reason


@on_the_gpu
def test_random_numbers_are_those_of_the_generators_when_replayed():
    own = torch.Generator("cuda")

    def noisy(batch):
        mine = torch.rand(4, device="cuda", generator=own)
        return torch.nn.functional.dropout(batch.one, 0.5) + mine

    default = torch.cuda.default_generators[torch.cuda.current_device()]
    captured = Captured(noisy, (default, own), torch.device("cuda"))
    batch = Pair(torch.ones(4, device="cuda"), torch.ones(4, device="cuda"), 1)
    for seed in (3, 4, 5, 3):
        results = []
        for function in (captured, noisy):
            torch.cuda.manual_seed(seed)
            own.manual_seed(seed + 1)
            results.append(function(batch).clone())
        assert torch.equal(*results)


@on_the_gpu
def test_what_cannot_be_recorded_is_computed_and_said():
    def asks(batch):
        return batch.one * float(batch.other.sum())

    captured = Captured(asks, (torch.cuda.default_generators[0],), torch.device("cuda"))
    for batch in pairs([(3, 1)] * 4, torch.Generator("cuda").manual_seed(0)):
        torch.testing.assert_close(captured(batch), asks(batch))
        torch.rand(1, device="cuda")  # the generator still works
    assert "the step cannot be recorded: " in captured.reason
    required = Captured(asks, (), torch.device("cuda"), required=True)
    with pytest.raises(ValueError, match="train.graph = true"):
        [required(batch) for batch in pairs([(3, 1)] * 2, torch.Generator("cuda").manual_seed(0))]
