"""The loop: what a step does, what it refuses, and what decides the rate, the end and the best epoch."""

import contextlib
import copy
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from training_cases import CONFIG, CPU, TRAIN, VALI, new_state, run, same, stops_at, with_

from rankgrad.data.batches import batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.errors import NonFiniteError
from rankgrad.losses import LOSSES
from rankgrad.training.build import make_objectives
from rankgrad.training.config import Model, Optimiser
from rankgrad.training.evaluate import evaluate, mean
from rankgrad.training.loop import Epoch, Step, train
from rankgrad.training.state import Progress, learning_rate
from rankgrad.training.step import Objective

# --- a step is what the formula says ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_steps_are_those_of_a_plain_torch_loop(name):
    config = with_(
        loss_name="neural_ndcg@5",
        model_dropout=0.0,
        optimiser_name=name,
        optimiser_weight_decay=0.1,
        optimiser_clip=0.05,
    )
    state = new_state(config)
    model = copy.deepcopy(state.model)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    optimiser = kind(model.parameters(), lr=0.01, weight_decay=0.1)
    _, epochs, _ = run(config, state=state)
    sums = []
    for epoch in range(2):
        total = count = 0.0
        for batch in batches(TRAIN, 8, seed=0, epoch=epoch):
            loss = LOSSES["neural_ndcg"](model(batch.features, batch.mask), batch.labels, batch.mask, k=5)
            optimiser.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert norm > 0.05  # clipping clips
            optimiser.step()
            counted = (batch.labels * batch.mask).amax(1).gt(0).sum().item()
            total, count = total + loss.item() * counted, count + counted
        sums.append(total / count)
    for own, plain in zip(state.model.parameters(), model.parameters()):
        torch.testing.assert_close(own, plain, atol=1e-6, rtol=1e-5)
    assert [e.loss for e in epochs] == pytest.approx(sums, abs=1e-6)


def test_a_weight_of_two_is_the_query_twice():
    half = TRAIN.select(np.arange(12))
    weights = np.ones(12)
    weights[[2, 7]] = 2.0
    twice = RankingDataset.concatenate([half, half.select([2, 7])])
    config = with_(loss_name="neural_ndcg", train_batch_size=64, train_epochs=5, model_dropout=0.0)
    one, one_epochs, _ = run(config, replace(half, weights=weights))
    other, other_epochs, _ = run(config, twice)
    for own, plain in zip(one.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(own, plain, atol=1e-6, rtol=1e-5)
    assert [e.loss for e in one_epochs] == pytest.approx([e.loss for e in other_epochs], abs=1e-6)


def test_a_weight_of_zero_is_a_query_never_seen_whatever_it_holds():
    weights = np.ones(len(TRAIN))
    weights[[0, 5]] = 0.0
    features = TRAIN.features.copy()
    features[: TRAIN.offsets[1]] = np.nan
    one, _, _ = run(CONFIG, replace(TRAIN, features=features, weights=weights))
    other, _, _ = run(CONFIG, TRAIN.select(weights > 0))
    assert same(one.model.state_dict(), other.model.state_dict())
    with pytest.raises(ValueError, match="every query has weight 0"):
        run(CONFIG, replace(TRAIN, weights=np.zeros(len(TRAIN))))


def test_weights_scale_out():
    one, _, _ = run(CONFIG, replace(TRAIN, weights=np.full(len(TRAIN), 4.0)))
    other, _, _ = run(CONFIG)
    assert same(one.model.state_dict(), other.model.state_dict())


def test_a_seed_gives_one_result_and_another_seed_another():
    caller = torch.get_rng_state()
    one, _, _ = run(CONFIG, state=new_state(CONFIG))
    torch.manual_seed(99)
    random = torch.get_rng_state()
    start = new_state(CONFIG)
    torch.set_rng_state(random)
    other, _, _ = run(CONFIG, state=start)
    assert torch.equal(torch.get_rng_state(), random)  # the caller's random numbers are left alone
    assert same(one.model.state_dict(), other.model.state_dict())
    third, _, _ = run(with_(train_seed=1))
    assert not same(one.model.state_dict(), third.model.state_dict())
    torch.set_rng_state(caller)


def test_lists_that_do_not_count_change_neither_loss_nor_gradient():
    empty = RankingDataset(TRAIN.features[:6], np.zeros(6), [0, 3, 6], [901, 902])
    config = with_(loss_name="neural_ndcg", train_batch_size=64, model_dropout=0.0, train_epochs=3)
    one, with_empty, _ = run(config, RankingDataset.concatenate([TRAIN, empty]))
    other, without, _ = run(config)
    for own, plain in zip(one.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(own, plain, atol=1e-6, rtol=1e-5)
    assert [e.loss for e in with_empty] == pytest.approx([e.loss for e in without], abs=1e-6)
    _, nothing, _ = run(config, empty)
    assert all(math.isnan(e.loss) and e.skipped == 0 for e in nothing)


# --- numbers that are not finite --------------------------------------------------------------------------------------


def poisoned(query, value=np.nan, data=TRAIN):
    features = data.features.copy()
    features[data.offsets[query] + 1] = value
    return replace(data, features=features)


def tensors_of(state):
    return {name: tensor.clone() for name, tensor in state.tensors().items() if not name.startswith("best.")}


@pytest.mark.parametrize("query", [24, "does not count"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("loss", ["softmax", "neural_ndcg", "lambdarank"])
def test_a_bad_list_stops_the_run_and_is_named_and_never_learned(query, value, loss):
    if query == "does not count":
        query = int(np.argmax(np.maximum.reduceat(TRAIN.labels, TRAIN.offsets[:-1]) == 0))
    config = with_(loss_name=loss)
    state = new_state(config)
    clean = new_state(config)
    good = train(clean, make_objectives(config), TRAIN, VALI, config, CPU)
    bad = train(state, make_objectives(config), poisoned(query, value), VALI, config, CPU)
    with pytest.raises(NonFiniteError) as caught:
        all(next(good) for _ in bad)  # step by step beside each other
    named = f"look at query {TRAIN.query_ids[query]}, "
    assert named in str(caught.value)
    assert f"of step {state.progress.step} in epoch 1 was not finite and the step was refused" in str(caught.value)
    assert state.progress.step > 1
    done, expected = tensors_of(state), tensors_of(clean)  # as after the last good step
    for name, tensor in expected.items():
        assert torch.equal(done[name], tensor)


def test_a_skipped_step_is_counted_and_changes_nothing():
    config = with_(train_nonfinite="skip", train_epochs=3)
    state = new_state(config)
    before, skips = tensors_of(state), 0
    bad = poisoned(3)
    for event in train(state, make_objectives(config), bad, VALI, config, CPU):
        after = tensors_of(state)
        assert all(tensor.isfinite().all() for tensor in after.values())
        if isinstance(event, Step):
            if state.progress.skipped > skips:
                for name, tensor in before.items():
                    assert torch.equal(after[name], tensor)
            else:
                assert not torch.equal(after["model.output.weight"], before.get("model.output.weight"))
            skips = state.progress.skipped
        else:
            assert event.skipped == 1 and math.isfinite(event.loss)
            skips = 0
        before = after
    assert state.progress.epoch == 3


def test_a_gradient_that_is_not_finite_is_refused_though_the_loss_is():
    config = with_(train_nonfinite="skip", train_epochs=1)
    state = new_state(config)
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    state.model.output.weight.register_hook(lambda gradient: gradient * math.inf)
    _, (epoch,), events = run(config, state=state)
    assert epoch.skipped == len(events) - 1 and math.isnan(epoch.loss)
    assert same(state.model.state_dict(), before)
    with pytest.raises(NonFiniteError) as caught:  # no list did it alone: all of the step are named
        run(with_(train_epochs=2), state=state)
    assert str(caught.value).count(", ") >= 8


def test_a_loss_that_is_not_finite_is_refused_though_the_gradient_is():
    config = with_(train_epochs=1)
    state, (objective,) = new_state(config), make_objectives(config).values()
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    spoilt = {"spoilt": Objective(lambda *given: objective.values(*given) + math.inf, objective.counts)}
    with pytest.raises(NonFiniteError, match="step 1 in epoch 1"):
        list(train(state, spoilt, TRAIN, VALI, config, CPU))
    assert same(state.model.state_dict(), before)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_refusing_works_with_and_without_clipping(clip):
    state, epochs, _ = run(with_(train_nonfinite="skip", optimiser_clip=clip), poisoned(3))
    assert [e.skipped for e in epochs] == [1, 1]
    assert all(tensor.isfinite().all() for tensor in state.tensors().values())


# --- rates ------------------------------------------------------------------------------------------------------------


def rates(settings, epochs, steps=4):
    return [
        learning_rate(settings, Progress(epoch=e, step=s), steps, epochs) for e in range(epochs) for s in range(steps)
    ]


def test_schedules():
    assert set(rates(Optimiser(schedule="constant", lr=0.5), 3)) == {0.5}
    step = rates(Optimiser(schedule="step", lr=1.0, milestones=(1, 3), gamma=0.1), 4, steps=2)
    assert step == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01])
    cosine = rates(Optimiser(schedule="cosine", lr=2.0), 2, steps=2)
    assert cosine == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])
    warm = rates(Optimiser(schedule="constant", lr=1.0, warmup=4), 2)
    assert warm == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1])
    plateau = Optimiser(schedule="plateau", lr=1.0, gamma=0.5)
    assert learning_rate(plateau, Progress(drops=3), 1, 9) == 0.125


def test_the_rate_reaches_the_optimiser_and_the_history():
    config = with_(train_epochs=3, optimiser_milestones=(2,), optimiser_gamma=0.5)
    state, epochs, _ = run(config)
    assert [e.lr for e in epochs] == [0.01, 0.01, 0.005]
    assert state.optimiser.param_groups[0]["lr"] == 0.005


def stuck(config, **changes):
    """A run whose validation metric never changes: every list holds one document."""
    vali = RankingDataset(VALI.features[:3], [1, 1, 1], [0, 1, 2, 3], [1, 2, 3])
    return run(with_(config, **changes), vali_set=vali)


def test_a_plateau_lowers_the_rate_and_a_better_metric_starts_the_count_again():
    _, epochs, _ = stuck(CONFIG, optimiser_schedule="plateau", optimiser_plateau=2, optimiser_gamma=0.5, train_epochs=6)
    assert [e.lr for e in epochs] == [0.01, 0.01, 0.01, 0.005, 0.005, 0.0025]
    config = with_(optimiser_schedule="plateau", optimiser_plateau=1, optimiser_gamma=0.5, train_epochs=6)
    _, epochs, _ = run(config)
    for before, after in pairwise(epochs):
        assert after.lr == (before.lr if before.best else before.lr / 2)
    assert len({e.best for e in epochs}) == 2


# --- ends -------------------------------------------------------------------------------------------------------------


def test_patience_stops_a_run_that_gets_no_better():
    state, epochs, _ = stuck(CONFIG, train_patience=2, train_epochs=9)
    assert [(e.epoch, e.best, e.stop) for e in epochs] == [(1, True, False), (2, False, False), (3, False, True)]
    assert state.finished(with_(train_patience=2, train_epochs=9).train)
    _, more, _ = run(with_(train_patience=2, train_epochs=9), state=state)
    assert more == []  # resumed after its end, it has nothing left to do


def test_the_best_weights_are_those_of_the_best_epoch():
    config = with_(train_epochs=6)
    state = new_state(config)
    events = train(state, make_objectives(config), TRAIN, VALI, config, CPU)
    kept = [(e.metric, copy.deepcopy(state.model.state_dict())) for e in events if isinstance(e, Epoch)]
    best = int(np.argmax([metric for metric, _ in kept]))
    assert best < 5  # the last is not the best here
    assert state.progress.best_epoch == best + 1 and state.progress.best == kept[best][0]
    assert same(state.best, kept[best][1])


def test_the_metric_is_measured_without_dropout_on_the_validation_split():
    state, epochs, _ = run(with_(model_dropout=0.9, train_epochs=1))
    values = evaluate(state.model, VALI, ["ndcg@10"], device=CPU)["ndcg@10"]
    assert epochs[0].metric == mean(values, 1.0)
    assert state.model.training


def test_events_count_steps_and_epochs():
    _, _, events = run(CONFIG)
    steps = [(e.epoch, e.step, e.steps) for e in events if isinstance(e, Step)]
    assert steps == [(epoch, step, 4) for epoch in (0, 1) for step in (1, 2, 3, 4)]
    assert all(math.isfinite(e.loss) for e in events)


@pytest.mark.parametrize("at", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("schedule", ["cosine", "step"])
def test_stopped_anywhere_and_resumed_a_run_ends_the_same(at, schedule):
    config = with_(loss_name="xe_ndcg", optimiser_schedule=schedule, optimiser_warmup=3, data_list_size=6)
    whole, expected, _ = run(config)
    first, before, _ = run(config, stop=stops_at(at))
    assert first.progress.epoch * 4 + first.progress.step == at
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second = new_state(config, seed=5)
    second.restore(saved, first.facts())
    _, after, _ = run(config, state=second)
    assert before + after == expected
    assert same(second.tensors(), whole.tensors()) and second.facts() == whole.facts()


def test_bfloat16_trains_and_stays_finite():
    model = Model(kind="transformer", width=8, layers=1, feedforward=16)
    config = replace(with_(train_precision="bf16", loss_name="neural_ndcg"), model=model)
    exact, _, _ = run(with_(config, train_precision="float32"))
    state, epochs, _ = run(config)
    assert all(math.isfinite(e.loss) and e.skipped == 0 for e in epochs)
    assert all(tensor.isfinite().all() and tensor.dtype == torch.float32 for tensor in state.tensors().values())
    assert not same(state.model.state_dict(), exact.model.state_dict())  # it was rounded


def test_a_gpu_is_current_while_it_trains_and_the_callers_is_between(monkeypatch):
    from rankgrad.training import loop

    current = ["cuda:0"]

    @contextlib.contextmanager
    def device(wanted):
        current.append(str(wanted))
        yield
        current.pop()

    def work(*_):
        yield current[-1]
        yield current[-1]

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(loop, "_train", work)
    events = train(None, None, TRAIN, VALI, CONFIG, torch.device("cuda:1"))
    assert [(at_work, current[-1]) for at_work in events] == [("cuda:1", "cuda:0")] * 2
