"""Weights that products read in bfloat16 follow those that learn, and give their gradients back."""

import torch

from rankgrad.capture import Compiler
from rankgrad.config import Config, Loss
from rankgrad.data.packing import packed_lists
from rankgrad.models import Transformer, rounded
from rankgrad.resolve import make_objective
from rankgrad.update import Rounded, Update, packed_scores
from test_train import CPU, TRAIN


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


def test_a_rehearsal_sees_every_width_and_teaches_nothing():
    torch.manual_seed(0)
    model = Transformer(136, width=8, layers=1, feedforward=16)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective, seen = make_objective(Config(loss=Loss("listnet"))), []

    def values(scores, labels, mask, generator):
        seen.append(tuple(scores.shape))
        return objective.values(scores, labels, mask, generator)

    update = Update(
        packed_scores(model, TRAIN.tensors(CPU)[:2], Compiler(on=False), kernel=False, exact=True),
        objective._replace(values=values),
        list(model.parameters()),
        torch.optim.Adam(model.parameters(), lr=0.1, fused=True),
        weights=None,
        clip=None,
        halts=True,
        amp=torch.autocast("cpu", enabled=False),
        generator=torch.Generator(),
        rounded=None,
        compiler=Compiler(on=False),
    )
    batch, *_ = packed_lists(TRAIN, 4, list_size=16, seed=0, epoch=0, device=CPU)
    update.rehearse([batch, batch._replace(width=32)])
    assert sorted(seen) == [(4, 16), (4, 32)]
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not update._optimiser.state
