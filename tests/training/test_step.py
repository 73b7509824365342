"""Weights that products read in bfloat16 follow those that learn, and give their gradients back."""

import torch

from rankgrad.models import Transformer, bf16_twin
from rankgrad.training.step import REPORT_HEAD, Bf16Shadow, _report


def test_rounded_weights_follow_those_that_learn_and_give_their_gradients_back():
    torch.manual_seed(0)
    model = Transformer(7, width=8, layers=1, feedforward=16)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = bf16_twin(model)
    shadow = Bf16Shadow(model, twin)
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for round_number in range(2):
        shadow.refresh()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for own, its in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(its.float(), own.to(its.dtype).float(), rtol=0, atol=0)
            its.grad = torch.full_like(its, own.numel() % 7 + round_number)
        shadow.collect()
        assert all(its.grad is None for its in twin.parameters() if its.dtype == torch.bfloat16)
        optimiser.step()
        optimiser.zero_grad()
        for name, own in model.named_parameters():
            torch.testing.assert_close(own, before[name] - 0.5 * (own.numel() % 7 + round_number))


def test_a_weight_without_a_gradient_gets_none_of_its_neighbour_s():
    model = Transformer(7, width=8, layers=1, feedforward=16)
    twin = bf16_twin(model)
    shadow = Bf16Shadow(model, twin)
    twin.blocks[0].narrow.weight.grad = torch.ones_like(twin.blocks[0].narrow.weight)
    shadow.collect()
    assert (model.blocks[0].narrow.weight.grad == 1).all()
    assert (model.input.weight.grad == 0).all() and (model.blocks[0].narrow.bias.grad == 0).all()


BAD = (torch.inf, -torch.inf, torch.nan)


def spoilt_steps():
    """(what was spoilt, refused, the lists that are suspects) for each way in which a step can go wrong."""
    for where in ("nothing", "total", "norm", "value", "gradient", "halted"):
        for bad in BAD if where not in ("nothing", "halted") else (0.0,):
            totals, norms = torch.tensor([3.0, 3.0, 0.0], dtype=torch.float64), torch.tensor([1e18, 1.0])
            values, gradient = torch.tensor([1.0, 3e38, -3e38]), torch.full((3, 4), 3e38)
            {"total": totals[:1], "norm": norms[:1], "value": values[1:2], "gradient": gradient[1, 2:3]}.get(
                where, torch.zeros(1)
            ).fill_(bad)
            report, found, norm = _report(totals, norms, values, gradient, torch.tensor(where == "halted"))
            assert report.dtype == torch.float64 and found.item() == report[2].item()
            assert torch.equal(norm, torch.linalg.vector_norm(norms)) or norm.isnan()
            yield where, bool(report[2]), report[REPORT_HEAD:].tolist()


def test_a_step_is_refused_and_its_lists_are_named():
    for where, refused, suspects in spoilt_steps():
        assert refused == (where in ("total", "norm", "halted")), where
        assert suspects == ([0, 1, 0] if where in ("value", "gradient") else [0, 0, 0]), where
