"""A loss of the caller's own trains like one of ours: its mean is over the lists that count, in the loop, in a run, by name."""

import ast
import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from training_cases import CPU, VALI, new_state, with_

import rankgrad
from rankgrad.core.lists import prepare, reduce
from rankgrad.data.dataset import RankingDataset
from rankgrad.estimator import NeuralRanker
from rankgrad.losses import LOSS_TABLE, LOSSES, LossSpec
from rankgrad.losses.informative import has_document, has_error, has_match, has_pair, has_relevant
from rankgrad.runs.run import Finished, train_run
from rankgrad.training.build import as_spec, losses_of, make_objectives, validate
from rankgrad.training.config import Config, Data, Loss, Model, Train
from rankgrad.training.evaluate import score
from rankgrad.training.loop import Epoch, train


def hinge(scores, labels, mask=None, *, margin=1.0, reduction="mean", check=None):
    """Sum over pairs y_i > y_j of max(0, margin - (s_i - s_j)); [..., L] -> scalar. As the documentation writes it."""
    lists = prepare(scores, labels, mask, check)
    pairs = lists.labels[..., :, None] > lists.labels[..., None, :]
    pairs = pairs & lists.mask[..., :, None] & lists.mask[..., None, :]
    gaps = lists.scores[..., :, None] - lists.scores[..., None, :]
    values = torch.where(pairs, (margin - gaps).relu(), 0.0).sum((-2, -1))
    return reduce(values, has_pair(lists.labels, lists.mask), lists, reduction)


def hinge_by_hand(scores, labels, margin):
    return sum(
        max(0.0, margin - (s - t)) for s, y in zip(scores, labels) for t, z in zip(scores, labels) if y > z
    )  # fmt: skip


# Of six lists three have a pair; two have labels that are all equal and above 0, one has all zeros.
LABELS = [[2, 0, 1], [1, 1, 1, 1], [0, 1], [3, 3], [0, 0, 0], [1, 0, 0, 2, 0]]
OFFSETS = np.concatenate([[0], np.cumsum([len(labels) for labels in LABELS])])
LISTS = RankingDataset(
    np.random.default_rng(0).normal(size=(OFFSETS[-1], 136)).astype(np.float32),
    np.concatenate(LABELS).astype(np.float32),
    OFFSETS,
    np.arange(6),
)
ONE_STEP = with_(loss_options={"margin": 0.5}, model_dropout=0.0, train_epochs=1, train_batch_size=64)


def first_epoch(config, loss, data=LISTS):
    """The loss that the first epoch reports, and the scores before it; its single step sees all lists."""
    state = new_state(with_(config, loss_name="rmse", loss_options={}))
    scores = score(state.model, data, device=CPU)
    events = train(state, make_objectives(config, loss), data, VALI, config, CPU)
    (epoch,) = [event for event in events if isinstance(event, Epoch)]
    return epoch.loss, np.split(scores.astype(np.float64), data.offsets[1:-1])


@pytest.mark.parametrize(
    "loss", [LossSpec(hinge, counts=has_pair), hinge, LossSpec(hinge)], ids=["rule", "bare function", "no rule"]
)
@pytest.mark.parametrize("pack", [False, True])
def test_the_mean_is_over_the_lists_that_have_a_pair(loss, pack):
    reported, scores = first_epoch(with_(ONE_STEP, train_pack=pack), loss)
    total = sum(hinge_by_hand(s, y, 0.5) for s, y in zip(scores, LABELS))
    assert reported == pytest.approx(total / 3, rel=1e-5)


def test_the_gradient_is_that_of_the_mean_too():
    """One step of plain gradient descent moves the weights by lr times the gradient of the loss's own mean."""
    moved = {}
    for loss in (LossSpec(hinge, counts=has_pair), hinge, "by hand"):
        state = new_state(with_(ONE_STEP, loss_name="rmse", loss_options={}))
        before = state.model.output.weight.detach().clone()
        if loss == "by hand":
            padded = torch.nn.utils.rnn.pad_sequence(
                [torch.from_numpy(LISTS.features[a:b]) for a, b in pairwise(OFFSETS)], batch_first=True
            )
            labels = torch.nn.utils.rnn.pad_sequence([torch.tensor(y) for y in LABELS], batch_first=True)
            mask = torch.arange(padded.shape[1]) < torch.tensor([len(y) for y in LABELS])[:, None]
            hinge(state.model(padded, mask), labels, mask, margin=0.5).backward()
            moved[loss] = state.model.output.weight.grad.clone()
        else:
            state.optimiser = torch.optim.SGD(state.model.parameters(), lr=0.01, fused=True)
            list(train(state, make_objectives(ONE_STEP, loss), LISTS, VALI, ONE_STEP, CPU))
            moved[loss] = (before - state.model.output.weight.detach()) / 0.01
    for found in moved.values():
        torch.testing.assert_close(found, moved["by hand"], atol=1e-4, rtol=1e-3)


def squares(scores, labels, mask=None, *, reduction="mean", check=None):
    """Sum of squared errors of a list's documents."""
    lists = prepare(scores, labels, mask, check)
    values = torch.where(lists.mask, (lists.scores - lists.labels) ** 2, 0.0).sum(-1)
    return reduce(values, lists.mask.any(-1), lists, reduction)


@pytest.mark.parametrize(("unit", "divisor"), [("list", 6), ("document", 19)])
def test_the_mean_is_over_lists_or_documents(unit, divisor):
    config = with_(ONE_STEP, loss_options={})
    reported, scores = first_epoch(config, LossSpec(squares, counts=has_document, unit=unit))
    total = sum(((s - np.array(y)) ** 2).sum() for s, y in zip(scores, LABELS))
    assert reported == pytest.approx(total / divisor, rel=1e-5)


def test_documents_are_counted_in_lists_that_count_and_by_their_query_s_weight():
    config = with_(ONE_STEP, loss_options={})
    weights = np.array([1.0, 2.0, 0.5, 1.0, 1.0, 1.0])
    data = dataclasses.replace(LISTS, weights=weights)
    reported, scores = first_epoch(config, LossSpec(squares, counts=has_pair, unit="document"), data)
    having_pair = [0, 2, 5]
    total = sum(weights[q] * ((scores[q] - np.array(LABELS[q])) ** 2).sum() for q in having_pair)
    assert reported == pytest.approx(total / sum(weights[q] * len(LABELS[q]) for q in having_pair), rel=1e-5)


def at_k(scores, labels, mask=None, *, k=None, threshold=1.0, reduction="mean", check=None):
    """A loss with a cut-off and a threshold: minus the sum of the scores of relevant documents, times k."""
    lists = prepare(scores, labels, mask, check)
    values = -torch.where(lists.mask & (lists.labels >= threshold), lists.scores, 0.0).sum(-1) * (k or 1)
    return reduce(values, has_match(lists.labels, lists.mask, threshold), lists, reduction)


def test_options_reach_the_loss_and_its_rule_and_a_name_may_have_a_cut_off():
    own = LossSpec(at_k, counts=has_match)
    config = Config(loss=Loss("at_k@3", {"threshold": 2.0}))
    assert losses_of(config, own)[config.loss.name][1] == {"k": 3, "threshold": 2.0}
    for loss in (own, at_k):
        (objective,) = make_objectives(config, loss).values()
        labels, mask = torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool)
        assert objective.counts(labels, mask).tolist() == [False, True]
        assert objective.values(torch.ones(2, 2), labels, mask, torch.Generator()).tolist() == [0.0, -3.0]
    with pytest.raises(ValueError, match="hinge has no cut-off"):
        make_objectives(Config(loss=Loss("hinge@3")), hinge)
    with pytest.raises(ValueError, match="at_k.*'tau'.*threshold"):
        validate(Config(loss=Loss("at_k", {"tau": 1.0})), own)


def test_what_is_not_a_loss_is_refused():
    with pytest.raises(ValueError, match="function of scores, labels and mask.*3"):
        LossSpec(3)
    with pytest.raises(ValueError, match=r"total .*one value per list.*\[\]"):
        make_objectives(Config(), LossSpec(lambda scores, *_, **__: scores.sum(), name="total"))


def test_a_run_and_an_estimator_take_it(tmp_path):
    config = Config(
        Data("synthetic:tiny"), Model("linear"), Loss(options={"margin": 0.5}), train=Train(epochs=2, device="cpu")
    )
    reports = []
    for number, loss in enumerate((LossSpec(hinge, counts=has_pair), hinge)):
        *_, last = train_run(tmp_path / f"run{number}", config, loss=loss)
        assert isinstance(last, Finished) and last.report["loss"] == "hinge"
        reports.append(last.report["metrics"])
    assert reports[0] == reports[1]
    fitted = [
        NeuralRanker(loss=loss, loss_options={"margin": 0.5}, model="linear", epochs=2, device="cpu", random_state=0)
        .fit(LISTS.features, LISTS.labels, qid=np.repeat(LISTS.query_ids, LISTS.lengths))
        .history_
        for loss in (LossSpec(hinge, counts=has_pair), hinge)
    ]
    assert [epoch["loss"] for epoch in fitted[0]] == [epoch["loss"] for epoch in fitted[1]]


def test_a_run_of_one_s_own_loss_is_resumed_with_it(tmp_path):
    config = Config(Data("synthetic:tiny"), Model("linear"), Loss(), train=Train(epochs=2, device="cpu", threads=1))
    list(train_run(tmp_path / "whole", config, loss=hinge))
    events = train_run(tmp_path / "cut", config, loss=hinge)
    next(event for event in events if isinstance(event, Epoch))
    events.close()
    with pytest.raises(ValueError, match="'hinge' is not a loss"):
        list(train_run(tmp_path / "cut"))
    list(train_run(tmp_path / "cut", loss=hinge))
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other


def test_a_loss_that_is_called_like_one_of_ours_is_refused(tmp_path):
    """Files keep the name: resumed without it, such a run would go on with ours."""

    def softmax(scores, labels, mask=None, *, reduction="mean", check=None):
        return hinge(scores, labels, mask, reduction=reduction, check=check)

    config = Config(Data("synthetic:tiny"), Model("linear"), Loss(), train=Train(epochs=2, device="cpu", threads=1))
    for loss in (softmax, LossSpec(softmax), LossSpec(hinge, name="rmse"), LossSpec(LOSSES["softmax"], tanh=True)):
        with pytest.raises(ValueError, match="'(softmax|rmse)'.*name="):
            next(train_run(tmp_path / "run", config, loss=loss))
        with pytest.raises(ValueError, match="'(softmax|rmse)'.*name="):
            NeuralRanker(loss=loss).fit(LISTS.features, LISTS.labels, qid=np.repeat(LISTS.query_ids, LISTS.lengths))
    assert not (tmp_path / "run").exists()
    for loss in (LossSpec(softmax, name="my_softmax"), LOSSES["softmax"], LOSS_TABLE[0]):
        next(train_run(tmp_path / as_spec(loss).name, config, loss=loss)).folder.rename(tmp_path / "used")
        (tmp_path / "used" / "config.toml").unlink()
        (tmp_path / "used").rmdir()


# --- our own losses: what the table says, and that nothing else does --------------------------------------------------


ONE_SCORE = [spec for spec in LOSS_TABLE if spec.units(2) == 1]  # per document


@pytest.mark.parametrize("spec", ONE_SCORE, ids=lambda spec: spec.name)
def test_lists_found_by_their_gradient_are_those_of_the_rule(spec):
    """What a bare function is given by evaluating it is what the table's line says of it."""
    labels = torch.tensor([[2.0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [3, 0, 9, 9], [2, 9, 9, 9], [0, 9, 9, 9]])
    mask = torch.tensor([[True] * 4] * 3 + [[True, True, False, False]] + [[True, False, False, False]] * 2)
    found = LossSpec(spec.function).counting({})(labels, mask)
    expected = spec.counts(labels, mask)
    if spec.counts is has_pair or spec.counts is has_document:
        assert found.tolist() == expected.tolist()
    else:  # a list of equal labels counts with a constant loss, whose gradient is 0
        assert (found <= expected).all() and found[0] and found[3]
    assert not expected[1] or spec.counts is has_document
    assert expected[2] == (spec.counts in (has_document, has_error, has_relevant, has_match))


NAMES_MAY_STAND_IN = ("losses/", "reproduce/rows.py", "reproduce/claims.py", "cli/demo.py", "trees/settings.py")
# rows of tables have them, and LightGBM calls an objective of its own lambdarank


def compared_names(tree):
    """Names of losses that a module compares something with: ==, in, startswith, match."""
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
            "startswith",
            "endswith",
            "removeprefix",
        ):
            parts = node.args
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for constant in (part for whole in parts for part in ast.walk(whole) if isinstance(part, ast.Constant)):
            text = constant.value
            if isinstance(text, str) and text and (text.partition("@")[0] in LOSSES or text in PREFIXES):
                yield constant.lineno, text


PREFIXES = {name[:end] for name in LOSSES for end in range(3, len(name)) if name[end - 1] == "_"}  # neural_, ndcg_, ...


def test_no_module_outside_losses_tests_the_name_of_a_loss():
    package = Path(rankgrad.__file__).parent
    found = [
        (name, *place)
        for path in sorted(package.rglob("*.py"))
        if not (name := path.relative_to(package).as_posix()).startswith(NAMES_MAY_STAND_IN)
        for place in compared_names(ast.parse(path.read_text()))
    ]
    assert not found
    caught = "x == 'ordinal'\nname.startswith('neural_')\nx in ('rmse', 'bce@5')\ny = Loss('softmax')"
    assert [text for _, text in compared_names(ast.parse(caught))] == ["ordinal", "neural_", "rmse", "bce@5"]
