"""What the test modules share: batches of unequal lists, padding anywhere, and what each loss needs."""

import inspect

import torch

from rankgrad.losses import LOSSES

RANDOM_LOSSES = {"xe_ndcg"}  # need `noise=` to be a function of their inputs
UNITS = 4  # logits per document for `ordinal`


def without_seal(config):
    """The text of a run's config.toml as an earlier version wrote it, which could be edited."""
    first, *lines, last = config.read_text().splitlines(keepends=True)
    assert first.startswith("#") and last.startswith("# run ")
    return "".join(lines)


class Case:
    """A batch of lists of unequal length with padding in random places, and what a loss needs besides."""

    def __init__(self, name, *, lengths=(7, 3, 10, 1, 5), width=12, seed=0, dtype=torch.float64, labels=None):
        self.name, self.lengths = name, lengths
        draw = torch.Generator().manual_seed(seed)
        shape = (len(lengths), width)
        self.mask = torch.zeros(shape, dtype=torch.bool)
        for row, n in enumerate(lengths):
            self.mask[row, torch.randperm(width, generator=draw)[:n]] = True
        units = (*shape, UNITS) if name == "ordinal" else shape
        self.scores = torch.randn(units, generator=draw, dtype=torch.float64).to(dtype)
        self.labels = torch.randint(0, 5, shape, generator=draw).double() if labels is None else labels
        noise = torch.rand(shape, generator=draw, dtype=torch.float64)
        self.options = {"noise": noise} if name in RANDOM_LOSSES else {}

    @property
    def loss(self):
        return LOSSES[self.name]

    def __call__(self, scores=None, **options):
        scores = self.scores if scores is None else scores
        return self.loss(scores, self.labels, self.mask, **{**self.options, **options})

    def real(self, row, tensor):
        """The entries of one list's real documents."""
        return tensor[row][self.mask[row]]


def value_and_grad(function, scores, *args, **options):
    scores = scores.detach().clone().requires_grad_()
    value = function(scores, *args, **options)
    (grad,) = torch.autograd.grad(value.sum(), scores)
    return value.detach(), grad


def takes(name, option):
    return option in inspect.signature(LOSSES[name]).parameters


def exact_rounds(name):
    """Options that make a relaxed-sort loss a smooth function: no early stop."""
    return {"sinkhorn_tol": 0.0} if takes(name, "sinkhorn_tol") else {}
