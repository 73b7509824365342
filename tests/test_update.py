"""Weights that products read in bfloat16 follow those that learn, and give their gradients back."""

import torch

from rankgrad.models import Transformer, rounded
from rankgrad.update import Rounded


def test_rounded_weights_follow_and_teach_those_that_learn():
    torch.manual_seed(0)
    model = Transformer(7, width=8, layers=1, feedforward=16)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = rounded(model)
    rounding = Rounded(model, twin)
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for round_number in range(2):
        rounding.refresh()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for own, its in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(its.float(), own.to(its.dtype).float(), rtol=0, atol=0)
            its.grad = torch.full_like(its, own.numel() % 7 + round_number)
        rounding.collect()
        assert all(its.grad is None for its in twin.parameters() if its.dtype == torch.bfloat16)
        optimiser.step()
        optimiser.zero_grad()
        for name, own in model.named_parameters():
            torch.testing.assert_close(own, before[name] - 0.5 * (own.numel() % 7 + round_number))


def test_a_weight_without_a_gradient_gets_none_of_its_neighbour_s():
    model = Transformer(7, width=8, layers=1, feedforward=16)
    twin = rounded(model)
    rounding = Rounded(model, twin)
    twin.blocks[0].narrow.weight.grad = torch.ones_like(twin.blocks[0].narrow.weight)
    rounding.collect()
    assert (model.blocks[0].narrow.weight.grad == 1).all()
    assert (model.input.weight.grad == 0).all() and (model.blocks[0].narrow.bias.grad == 0).all()
