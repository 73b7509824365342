"""Into lists end to end and out of them: the kernels against torch's path of the same step."""

import numpy as np
import pytest
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.packed import packed_lists
from rankgrad.kernels.encoder.gather import gather
from rankgrad.models import MLP, Transformer, bf16_twin
from rankgrad.training.step import packed_scores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dataset(lengths, features):
    rng = np.random.default_rng(0)
    rows = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.normal(size=(rows, features)).astype(np.float32)
    return RankingDataset(values, rng.integers(0, 5, rows).astype(np.float32), offsets, np.arange(len(lengths)))


@pytest.mark.parametrize("shape", [(7, 1), (130, 3), (40, 136), (5, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_a_table_and_zeros_for_the_padding_rows(shape, dtype):
    torch.manual_seed(0)
    table = torch.randn(9, shape[1], device=DEVICE)
    table[0] = torch.nan  # which the padding rows point at
    slots = torch.randint(0, 20, (shape[0],), device=DEVICE)
    rows = torch.randint(1, 9, (shape[0],), device=DEVICE).where(slots < 10, 0)
    expected = table[rows].masked_fill((slots >= 10)[:, None], 0.0).to(dtype)
    assert torch.equal(gather(table, rows, slots, 10, dtype), expected)


@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("list_size", [5, 30, 300])
def test_scores_labels_mask_and_gradients_are_those_of_torch(units, list_size):
    data = dataset([3, 1, 40, 2, 300, 17, 8], 6)
    torch.manual_seed(0)
    model = MLP(6, hidden=(4,), units=units).to(DEVICE)
    table = tuple(tensor.to(DEVICE) for tensor in data.tensors(DEVICE)[:2])
    for batch in packed_lists(data, 3, list_size=list_size, seed=0, epoch=0, device=DEVICE):
        found = []
        for kernel in (False, True):
            scored = packed_scores(model, table, kernel=kernel, exact=True)(batch)
            torch.manual_seed(1)
            slope = torch.randn_like(scored.scores)  # also under the padding, from where it must not come back
            found.append([*scored, *torch.autograd.grad(scored.scores, list(model.parameters()), slope)])
        for plain, fused in zip(*found, strict=True):
            assert fused.dtype == plain.dtype
            torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_transformer_s_step_is_that_of_torch():
    data = dataset([3, 20, 7], 6)
    torch.manual_seed(0)
    model = Transformer(6, width=8, layers=2, feedforward=8, dropout=0.0).to(DEVICE)
    table = data.tensors(DEVICE)[:2]
    (batch,) = packed_lists(data, 3, list_size=16, seed=0, epoch=0, device=DEVICE)
    plain, fused = (packed_scores(model, table, kernel=kernel, exact=True)(batch) for kernel in (False, True))
    torch.testing.assert_close(fused.scores, plain.scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(fused.labels, plain.labels)
    assert torch.equal(fused.mask, plain.mask)


def test_documents_come_in_the_dtype_that_the_first_product_reads(monkeypatch):
    class Table(torch.nn.Module):
        """Its first parameter is not what its documents are."""

        def __init__(self):
            super().__init__()
            self.register_parameter("table", torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))

        def packed(self, documents, lists):
            return documents.sum(1)

    wanted = []

    def gathered(table, rows, slots, limit, dtype):
        wanted.append(dtype)
        return gather(table, rows, slots, limit, torch.float32)

    monkeypatch.setattr("rankgrad.kernels.encoder.gather.gather", gathered)
    data = dataset([3, 20, 7], 6)
    (batch,) = packed_lists(data, 3, list_size=16, seed=0, epoch=0, device=DEVICE)
    transformer = Transformer(6, width=8, layers=1, feedforward=8).to(DEVICE)
    monkeypatch.setattr(Transformer, "packed", lambda self, documents, lists: documents.sum(1))
    for model in (transformer, bf16_twin(transformer), MLP(6, hidden=(4,)).to(DEVICE), Table()):
        packed_scores(model, data.tensors(DEVICE)[:2], kernel=True, exact=True)(batch)
    assert wanted == [torch.float32, torch.bfloat16, torch.float32, torch.float32]


def test_scores_and_their_gradients_need_not_be_contiguous():
    data = dataset([3, 9], 6)
    (batch,) = packed_lists(data, 2, list_size=9, seed=0, epoch=0, device=DEVICE)

    class Given(torch.nn.Module):
        def packed(self, documents, lists):
            return given.t()

    found = []
    for kernel in (True, False):
        given = torch.arange(2.0 * len(batch.rows), device=DEVICE).view(2, -1).requires_grad_()
        score = packed_scores(Given(), data.tensors(DEVICE)[:2], kernel=kernel, exact=True)
        turned = score(batch).scores.flatten(0, 1).t()  # [2, B * L]
        (turned * torch.arange(1.0, 1 + turned.numel(), device=DEVICE).view(turned.shape)).sum().backward()
        found.append((turned, given.grad))
    torch.testing.assert_close(*found)
