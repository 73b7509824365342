"""RankingLoss, RankingMetric, pad_lists, unpad_lists and load: the pieces for a training loop of one's own."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import children
import rankgrad
from rankgrad import LOSS_TABLE, RankingLoss, RankingMetric, ndcg, pad_lists, unpad_lists

SPECS = pytest.mark.parametrize("spec", LOSS_TABLE, ids=lambda spec: spec.name)


def batch(units=1, seed=0):
    """Three lists of 5, 1 and 3 documents with NaN under the padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(5) < torch.tensor([5, 1, 3])[:, None]
    scores = torch.randn(3, 5, *([units] if units > 1 else []), generator=generator)
    scores[~mask] = torch.nan
    labels = torch.randint(0, 3, (3, 5), generator=generator)
    labels[0, 0] = 1
    return scores, labels, mask


@SPECS
def test_a_loss_is_the_function_of_its_name_and_survives_pickle_and_its_configuration(spec):
    scores, labels, mask = batch(spec.units(2))
    torch.manual_seed(0)  # one of the losses is random
    expected = spec.function(scores, labels, mask, reduction="sum")
    loss = RankingLoss(spec.name, reduction="sum")
    assert repr(loss) == f"RankingLoss('{spec.name}', reduction='sum')"
    again = RankingLoss(**json.loads(json.dumps(loss.config())))
    for same in (loss, again, pickle.loads(pickle.dumps(loss))):
        torch.manual_seed(0)
        assert same(scores, labels, mask).equal(expected)
        assert repr(same) == repr(loss)
    assert not [*loss.parameters()]


def test_a_cutoff_is_part_of_the_name_or_an_option():
    scores, labels, mask = batch()
    expected = rankgrad.neural_ndcg(scores, labels, mask, k=2, tau=0.5)
    for loss in (RankingLoss("neural_ndcg@2", tau=0.5), RankingLoss("neural_ndcg", k=2, tau=0.5)):
        assert loss(scores, labels, mask).equal(expected)


def test_randomness_and_weights_come_with_the_call():
    scores, labels, mask = batch()
    loss = RankingLoss("neural_ndcg", samples=4)
    first, second = (loss(scores, labels, mask, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.equal(second)
    noise = torch.zeros(4, 3, 5)
    expected = rankgrad.neural_ndcg(scores, labels, mask, samples=4, noise=noise)
    assert loss(scores, labels, mask, noise=noise).equal(expected)
    weights = torch.rand(3, 5)
    expected = rankgrad.listnet(scores, labels, mask, weights=weights)
    assert RankingLoss("listnet")(scores, labels, mask, weights=weights).equal(expected)
    with pytest.raises(ValueError, match=r"neural_ndcg.*weights"):
        loss(scores, labels, mask, weights=weights)
    with pytest.raises(ValueError, match=r"listnet.*generator"):
        RankingLoss("listnet")(scores, labels, mask, generator=torch.Generator())


@pytest.mark.slow
def test_a_loss_with_its_padding_compiles_whole():
    loss = RankingLoss("listnet")
    step = torch.compile(lambda *tensors: loss(*tensors, weights=tensors[2].float()), fullgraph=True, backend="eager")
    scores, labels, mask = batch()
    torch.testing.assert_close(step(scores, labels, mask), loss(scores, labels, mask, weights=mask.float()))


def test_making_a_loss_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    RankingLoss("neural_ndcg", samples=4)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("name", "options", "facts"),
    [
        ("neural_ndgc", {}, "'neural_ndgc' is not a loss.*neural_ndcg"),
        ("neural_ndcg@0", {}, "neural_ndcg@0.*1 or above"),
        ("listnet@5", {}, "listnet has no cut-off"),
        ("neural_ndcg", {"taus": 1.0}, "no option 'taus'.*'tau'"),
        ("listnet", {"samples": 3}, "listnet has no option 'samples'.*reduction"),
        ("neural_ndcg", {"tau": 0.0}, "tau must be"),
        ("neural_ndcg", {"reduction": "average"}, "reduction must be one of"),
        ("neural_ndcg", {"backend": "cuda"}, "backend must be one of"),
        ("neural_ndcg@5", {"k": 3}, "twice"),
        ("neural_ndcg", {"generator": None}, "generator belongs to a batch"),
    ],
)
def test_mistakes_show_when_the_loss_is_made(name, options, facts):
    with pytest.raises(ValueError, match=facts):
        RankingLoss(name, **options)


def test_a_kernel_can_be_asked_for_before_there_are_tensors():
    assert RankingLoss("neural_ndcg", backend="triton").config()["backend"] == "triton"


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda sizes: torch.tensor(sizes, dtype=torch.uint8)]
)
@pytest.mark.parametrize("sizes", [[3, 0, 2], [0, 5], [5, 0, 0], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("columns", [(), (4,), (2, 3)])
def test_lists_end_to_end_are_padded_and_come_back(kind, sizes, columns):
    values = torch.arange(1.0, 6.0).reshape(-1, *[1] * len(columns)).expand(5, *columns)
    padded, mask = pad_lists(values, kind(sizes))
    assert padded.shape == (len(sizes), max(sizes), *columns)
    assert mask.sum(-1).tolist() == sizes
    first = 0
    for row, keep, size in zip(padded, mask, sizes):
        assert keep.tolist() == [True] * size + [False] * (max(sizes) - size)
        assert row[:size].equal(values[first : first + size])
        assert not row[size:].any()
        first += size
    assert unpad_lists(padded, mask).equal(values)


@pytest.mark.parametrize("sizes", [[], [0, 0], torch.zeros(2, dtype=torch.int64), np.array([])])
def test_nothing_is_padded_to_nothing(sizes):
    padded, mask = pad_lists(torch.zeros(0, 3), sizes)
    assert padded.shape == (len(sizes), 0, 3)
    assert mask.shape == (len(sizes), 0)
    assert unpad_lists(padded, mask).shape == (0, 3)


def test_gradients_flow_through_padding_and_back():
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pad_lists(x, [2, 0, 4])[0], values)
    mask = pad_lists(values, [2, 0, 4])[1]
    padded = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpad_lists(x, mask), padded)


def test_the_loss_of_padded_lists_is_the_mean_of_the_lists_alone():
    scores, labels = torch.randn(7), torch.tensor([1, 0, 2, 0, 1, 0, 0])
    padded, mask = pad_lists(scores, [3, 4])
    together = rankgrad.neural_ndcg(padded, pad_lists(labels, [3, 4])[0], mask)
    alone = [rankgrad.neural_ndcg(scores[part], labels[part]) for part in (slice(0, 3), slice(3, 7))]
    torch.testing.assert_close(together, torch.stack(alone).mean())


@pytest.mark.parametrize(
    ("values", "sizes", "facts"),
    [
        ([1.0, 2.0], [2], "values must be a tensor.*list"),
        (torch.tensor(1.0), [1], r"values .*shape \(\)"),
        (torch.zeros(3), [2], "2 documents.*values have 3"),
        (torch.zeros(3), [4, -1], "0 or above, got -1 for list 1"),
        (torch.zeros(3), [1.5, 1.5], "whole numbers.*float64"),
        (torch.zeros(3), [True, True], "whole numbers.*bool"),
        (torch.zeros(3), [[3]], r"one per list.*\(1, 1\)"),
        (torch.zeros(3), ["3"], "whole numbers"),
        (torch.zeros(3), None, "whole numbers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(values, sizes, facts):
    with pytest.raises(ValueError, match=facts):
        pad_lists(values, sizes)


@pytest.mark.parametrize(
    ("padded", "mask", "facts"),
    [
        (torch.zeros(2, 3), torch.ones(2, 3), "torch.bool"),
        (torch.zeros(2, 3), torch.ones(3, 2, dtype=torch.bool), r"\(2, 3\), got \(3, 2\)"),
        (torch.zeros(2, 3), None, "mask must be a torch.Tensor"),
    ],
)
def test_masks_that_do_not_fit_are_refused(padded, mask, facts):
    with pytest.raises(ValueError, match=facts):
        unpad_lists(padded, mask)


@pytest.mark.parametrize("name", rankgrad.METRICS)
@pytest.mark.parametrize("empty", [0.0, 1.0, float("nan")])
def test_a_metric_is_the_mean_over_all_batches(name, empty):
    metric = RankingMetric(f"{name}@3", empty=empty)
    values = []
    for seed in range(4):
        scores, labels, mask = batch(seed=seed)
        metric.update(scores, labels, mask)
        values.append(rankgrad.METRICS[name](scores, labels, mask, k=3, empty=empty).double())
    expected = torch.cat(values).nanmean()
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(pickle.loads(pickle.dumps(metric)).compute(), expected, rtol=1e-12, atol=0)
    metric.reset()
    metric.update(scores, labels, mask)
    torch.testing.assert_close(metric.compute(), values[-1].nanmean(), rtol=1e-12, atol=0)


def test_a_metric_takes_the_options_of_its_function_and_shows_them():
    scores, labels, mask = batch()
    metric = RankingMetric("ndcg", gain="linear", empty=0.0)
    expected = ndcg(scores, labels, mask, gain="linear", empty=0.0).mean()
    torch.testing.assert_close(metric(scores, labels, mask).float(), expected)
    assert repr(metric) == "RankingMetric('ndcg', empty=0.0, gain='linear')"
    assert repr(RankingMetric("map", threshold=2.0)) == "RankingMetric('map', threshold=2.0)"
    for wrong in ({"gain": "cubic"}, {"empty": float("inf")}, {"threshold": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RankingMetric("ndcg", **wrong)


def test_a_bad_value_shows_in_the_mean_and_is_not_taken_for_an_empty_list():
    scores, labels, mask = batch()
    metric = RankingMetric("ndcg", empty=float("nan"), check=False)
    metric.update(scores.masked_fill(mask, torch.nan), labels, mask)
    assert metric.compute().isnan()


def test_metrics_make_a_collection():
    from torchmetrics import MetricCollection

    scores, labels, mask = batch()
    together = MetricCollection({"ndcg": RankingMetric("ndcg@5"), "map": RankingMetric("map")})
    together.update(scores, labels, mask)
    assert {name: value.item() for name, value in together.compute().items()} == pytest.approx(
        {
            "ndcg": ndcg(scores, labels, mask, k=5).mean().item(),
            "map": rankgrad.average_precision(scores, labels, mask).mean().item(),
        }
    )


def _measure(folder):
    """What one of two processes does: its own share of the lists, and the mean over all."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    metric = RankingMetric("ndcg@3")
    for seed in range(3 if rank else 1):  # unequal shares: a mean of means would be wrong
        metric.update(*batch(seed=10 * rank + seed))
    (folder / str(rank)).write_text(repr(metric.compute().item()))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_measure_the_mean_over_the_lists_of_both(tmp_path):
    for process in children.group(_measure, 2, tmp_path):
        assert children.code(process) == 0
    values = torch.cat([ndcg(*batch(seed=seed), k=3).double() for seed in (0, 10, 11, 12)])
    for rank in "01":
        assert float((tmp_path / rank).read_text()) == pytest.approx(values.mean().item(), rel=1e-12)


@pytest.mark.slow
def test_without_torchmetrics_the_metric_says_what_to_install_and_all_else_works():
    code = (
        "import sys; sys.modules['torchmetrics'] = None\n"
        "import rankgrad; rankgrad.RankingLoss('listnet')\n"
        "try: rankgrad.RankingMetric\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'rankgrad[torchmetrics]'" in done.stdout


def test_load_takes_the_folder_of_a_run_and_the_file_of_an_estimator(tmp_path):
    fixtures = Path(__file__).parent / "fixtures" / "b0f1ce3"
    with pytest.warns(UserWarning, match="train.compile"):  # a key that runs of that time had
        run = rankgrad.load(str(fixtures / "finished"), device="cpu")
    assert isinstance(run, rankgrad.Ranker)
    X = np.random.default_rng(0).normal(size=(8, 3))
    ranker = rankgrad.NeuralRanker(loss="listnet", model="linear", epochs=1, device="cpu", random_state=0)
    ranker.fit(X, [0, 1, 0, 1, 2, 0, 0, 1], qid=[1, 1, 1, 1, 2, 2, 2, 2]).save(tmp_path / "ranker.safetensors")
    loaded = rankgrad.load(tmp_path / "ranker.safetensors", "cpu")
    expected = ranker.predict(X, qid=[1, 1, 1, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(loaded.score(X, sizes=[4, 4]), expected)
    with pytest.raises(ValueError, match="nothing.safetensors does not exist"):
        rankgrad.load(tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="is not a run"):
        rankgrad.load(tmp_path)
