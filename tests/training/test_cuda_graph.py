"""A recorded step gives what it gave before; one that cannot be recorded is computed as it is, with the reason."""

from typing import NamedTuple

import pytest
import torch

from rankgrad.training.cuda_graph import GraphedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor
    times: int
    nothing: None = None


def combined(batch):
    return batch.one * batch.times + batch.other


def pairs(sizes, generator):
    return [
        Pair(*(torch.randn(size, device="cuda", generator=generator) for _ in range(2)), times) for size, times in sizes
    ]


def test_shapes_and_numbers_have_graphs_of_their_own():
    graphed = GraphedStep(combined, (), torch.device("cuda"))
    draw = torch.Generator("cuda").manual_seed(0)
    for batch in pairs([(3, 2), (5, 2), (3, 4)] * 4, draw):
        torch.testing.assert_close(graphed(batch), combined(batch))
    assert not graphed.reason


def test_random_numbers_are_those_of_the_generators_when_replayed():
    own = torch.Generator("cuda")

    def noisy(batch):
        mine = torch.rand(4, device="cuda", generator=own)
        return torch.nn.functional.dropout(batch.one, 0.5) + mine

    default = torch.cuda.default_generators[torch.cuda.current_device()]
    graphed = GraphedStep(noisy, (default, own), torch.device("cuda"))
    batch = Pair(torch.ones(4, device="cuda"), torch.ones(4, device="cuda"), 1)
    for seed in (3, 4, 5, 3):
        results = []
        for function in (graphed, noisy):
            torch.cuda.manual_seed(seed)
            own.manual_seed(seed + 1)
            results.append(function(batch).clone())
        assert torch.equal(*results)


def test_what_cannot_be_recorded_is_computed_and_has_a_reason():
    def asks(batch):
        return batch.one * float(batch.other.sum())

    graphed = GraphedStep(asks, (torch.cuda.default_generators[0],), torch.device("cuda"))
    for batch in pairs([(3, 1)] * 4, torch.Generator("cuda").manual_seed(0)):
        torch.testing.assert_close(graphed(batch), asks(batch))
        torch.rand(1, device="cuda")  # the generator still works
    assert "cannot be recorded" in graphed.reason
    required = GraphedStep(asks, (), torch.device("cuda"), required=True)
    with pytest.raises(ValueError, match="train.graph = true"):
        [required(batch) for batch in pairs([(3, 1)] * 2, torch.Generator("cuda").manual_seed(0))]
    torch.rand(1, device="cuda")  # though nobody named it
