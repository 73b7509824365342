"""Members trained at once: each as if alone, whatever happens to the others; folds, weights, losses, resuming, processes."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from training_cases import CONFIG, CPU, TRAIN, VALI, same

import children
from children import INTERRUPTED, Trap
from rankgrad.data.batches import batches
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.synthetic import synthetic
from rankgrad.errors import NonFiniteError
from rankgrad.files import load_tensors
from rankgrad.losses import LOSSES
from rankgrad.metrics import ndcg
from rankgrad.models import Members
from rankgrad.runs.folder import read_config, read_per_query
from rankgrad.runs.run import Epoch, Finished, Run, Step, train_run
from rankgrad.training.build import fit_to_data, losses_of, make_objectives, make_state, validate
from rankgrad.training.config import (
    Config,
    Loss,
    Members as MemberSettings,
    Model,
    Ranges,
    configure,
    dumps,
    loads,
    replaced,
    strong,
)
from rankgrad.training.loop import train
from rankgrad.training.members import MemberState, average, folds_of, held_out_values
from rankgrad.training.state import Progress, learning_rate

LOSS_NAMES = ("softmax", "query_rmse", "neural_ndcg@5", "lambdarank@5")
MEMBERS = dataclasses.replace(
    CONFIG,
    model=Model(kind="mlp", hidden=(8, 8), inputs="list"),
    loss=Loss(LOSS_NAMES),
    optimiser=dataclasses.replace(CONFIG.optimiser, name="adamw", schedule="cosine", warmup_epochs=1),
    members=MemberSettings(count=5, keep=3),
    train=dataclasses.replace(CONFIG.train, epochs=3),
)


def with_(config=MEMBERS, **changes):
    """Another count, ranges, patience ...: by the name of a key of [members], of its ranges, or of [train]."""
    for key, value in changes.items():
        if key in ("lr", "dropout", "weight_decay", "scale"):
            ranges = dataclasses.replace(config.members.ranges, **{key: value})
            config = dataclasses.replace(config, members=dataclasses.replace(config.members, ranges=ranges))
        else:
            section = "members" if hasattr(config.members, key) else "train"
            part = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section: part})
    return config


def state_of(config=MEMBERS, ids=None, train_set=TRAIN):
    tanh = [spec.tanh for spec, _ in losses_of(config).values()]
    if ids is None:
        return MemberState.build(config, train_set, tanh, CPU)
    bag = config.members.bag
    folds = folds_of(train_set, bag, config.train.seed) if bag > 1 else None
    return MemberState.of(config, ids, train_set.features.shape[1], folds, tanh, CPU)


def trained(config=MEMBERS, ids=None, train_set=TRAIN, vali_set=VALI, state=None):
    """Members after their last epoch."""
    state = state or state_of(config, ids, train_set)
    vali_set = train_set if config.members.bag > 1 else vali_set
    for _ in train(state, make_objectives(config), train_set, vali_set, config, CPU):
        pass
    return state


def padded(data):
    """All lists in one batch, in the dataset's order."""
    (batch,) = batches(data, len(data), list_size=None, shuffle=False)
    order = batch.queries.argsort()
    return batch._replace(**{name: getattr(batch, name)[order] for name in ("features", "labels", "mask", "queries")})


def scores_of(state, data=VALI):
    state.model.eval()
    batch = padded(data)
    return state.model(batch.features, batch.mask).detach()


def artefact(folder):
    return load_tensors(folder / "model.safetensors")[0]


def finished(folder, config=None):
    *_, last = train_run(folder, config)
    assert isinstance(last, Finished)
    return last.report


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- one of many is the one that trains alone --------------------------------------------------------------------------


def test_a_member_among_others_is_the_member_that_trains_alone(float64):
    together = trained(with_(count=9))
    for number in (0, 1, 2, 7):
        alone = trained(ids=[number])
        assert together.drawn.describe()[number] == alone.drawn.describe()[0]
        torch.testing.assert_close(scores_of(together)[number], scores_of(alone)[0], atol=1e-9, rtol=0)
        assert together.best_epoch[number] == alone.best_epoch[0]


@pytest.mark.slow
def test_a_member_does_not_depend_on_how_many_there_are(float64):
    few, many = trained(with_(count=8)), trained(with_(count=64))
    torch.testing.assert_close(scores_of(few), scores_of(many)[:8], atol=1e-9, rtol=0)


def test_numbering_may_begin_anywhere(float64):
    late = trained(with_(first=3, count=2))
    assert late.drawn.ids == [3, 4]
    torch.testing.assert_close(scores_of(late), scores_of(trained())[3:], atol=1e-9, rtol=0)


def test_members_differ_in_all_they_are_dealt():
    drawn = state_of(with_(count=16)).drawn
    ranges = Ranges()
    for name in ("lr", "dropout", "weight_decay"):
        low, high = getattr(ranges, name)
        values = getattr(drawn, name)
        assert len(set(values)) == 16
        assert all(low <= value <= high for value in values)
    assert drawn.loss == [*LOSS_NAMES] * 4
    assert [value > 0 for value in drawn.scale] == [name.startswith("neural") for name in drawn.loss]


# --- against plain code ------------------------------------------------------------------------------------------------


def by_hand(config, number, data):
    """One member trained by plain tensor code and torch's AdamW; gives how it scores one list."""
    state = state_of(config, [number], data)
    drawn, model = state.drawn.describe()[0], state.model
    parts = [part.detach().clone().requires_grad_() for part in model.weights[0].split(model.sizes)]
    matrices, biases = parts[0::2], parts[1::2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": drawn["weight_decay"]}, {"params": biases, "weight_decay": 0.0}],
        betas=(0.9, 0.99),
    )

    def score(x):
        x = x.double()
        spread = x.std(0, correction=0)
        away = torch.where(spread < 1e-6, 0.0, (x - x.mean(0)) / torch.where(spread < 1e-6, 1.0, spread))
        hidden = torch.cat([x, away], -1)
        for (before, after), matrix, bias in zip(model.shapes, matrices, biases):
            hidden = hidden @ matrix.view(before, after) + bias
            hidden = hidden if after == 1 else hidden.relu()
        found = hidden[:, 0]
        return drawn["scale"] * found.tanh() if drawn["scale"] else found

    spec, options = losses_of(config)[drawn["loss"]]
    seen = np.flatnonzero(data.weights) if data.weights is not None else np.arange(len(data))
    kept = data.select(seen)
    steps = -(-len(kept) // config.train.batch_size)
    for epoch in range(config.train.epochs):
        order = batches(kept, config.train.batch_size, list_size=240, seed=config.train.seed, epoch=epoch)
        for step, batch in enumerate(order):
            total, count = torch.zeros(()), torch.zeros(())
            for x, y, real, query in zip(batch.features, batch.labels, batch.mask, batch.queries.tolist()):
                if not (y[real] > 0).any() or (spec.name == "lambdarank" and len(y[real].unique()) == 1):
                    continue
                if state.folds is not None and state.folds[query] == drawn["fold"]:
                    continue
                weight = 1.0 if kept.weights is None else float(kept.weights[query])
                value = LOSSES[spec.name](score(x[real])[None], y[real][None].double(), reduction="sum", **options)
                total = total + weight * value
                count = count + weight * (int(real.sum()) if spec.name == "query_rmse" else 1)
            rate = learning_rate(
                dataclasses.replace(config.optimiser, lr=1.0), Progress(epoch, step), steps, config.train.epochs
            )
            for group in optimiser.param_groups:
                group["lr"] = rate * drawn["lr"]
            optimiser.zero_grad()
            (total / count).backward()
            optimiser.step()
    return score


@pytest.mark.parametrize("number", range(len(LOSS_NAMES)))
@pytest.mark.parametrize("case", ["plain", "weights", "bag"])
def test_a_member_is_what_plain_code_trains(float64, number, case):
    data = TRAIN
    if case == "weights":
        data = dataclasses.replace(TRAIN, weights=np.arange(len(TRAIN)) % 4 / 2)  # a quarter of them 0
    config = with_(count=8, epochs=2, dropout=(0.0, 0.0), bag=3 if case == "bag" else 1)
    found = scores_of(trained(config, train_set=data))[number]
    score = by_hand(config, number, data)
    for row in range(len(VALI)):
        documents = slice(*VALI.offsets[row : row + 2])
        expected = score(torch.from_numpy(np.array(VALI.features[documents])))
        torch.testing.assert_close(found[row, : len(expected)], expected, atol=1e-6, rtol=0)


def test_the_average_standardises_each_member_within_the_list():
    state = trained()
    found = average(state, [0, 2, 3])
    batch = padded(VALI)
    one = found(batch.features, batch.mask)[3][batch.mask[3]]
    own = scores_of(state)[[0, 2, 3], 3][:, batch.mask[3]]
    expected = ((own - own.mean(1, keepdim=True)) / own.std(1, correction=0, keepdim=True)).mean(0)
    torch.testing.assert_close(one, expected, atol=1e-5, rtol=0)


# --- a member that fails hurts nobody ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_a_member_with_an_absurd_rate_hurts_nobody(rate):
    healthy, state = trained(), state_of()
    state.drawn.lr[2] = rate
    state = trained(state=state)
    others = [0, 1, 3, 4]
    assert torch.equal(state.model.weights[others], healthy.model.weights[others])
    assert torch.equal(state.best[others], healthy.best[others])
    assert state.model.weights.isfinite().all()  # what is not finite is refused
    assert state.dropped.tolist() == [False, False, True, False, False]
    state.drawn.lr[2] = healthy.drawn.lr[2]  # `gathered` deals again
    _, facts, _ = state.result(MEMBERS, VALI, CPU)
    entry = facts["members"][2]
    assert entry["dropped"]
    assert not entry["kept"]
    json.dumps(facts, allow_nan=False)


def test_scores_that_overflow_only_in_validation_drop_a_member():
    state, last = state_of(), len(TRAIN) // 8 + 1
    events = train(state, make_objectives(MEMBERS), TRAIN, VALI, MEMBERS, CPU)
    for event in events:
        if isinstance(event, Step) and event.epoch == 2 and event.step == last:
            with torch.no_grad():
                state.model.weights[1] = 1e30
    assert state.dropped.tolist() == [False, True, False, False, False]
    _, facts, measured = state.result(MEMBERS, VALI, CPU)
    assert not facts["members"][1]["kept"]
    assert all(math.isfinite(member["validation"]) for member in facts["members"])
    assert np.isfinite(measured(["map"])["map"]).any()


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_when_all_diverge_the_error_says_what_to_do(tmp_path, nonfinite):
    with pytest.raises(NonFiniteError, match=r"every member.*members\.ranges\.lr"):
        list(train_run(tmp_path / "run", with_(lr=(1e30, 1e30), nonfinite=nonfinite)))


def test_a_member_that_stops_early_keeps_its_weights_from_then_on():
    config = with_(epochs=8, patience=1, lr=(0.03, 0.1))
    state, weights, active = state_of(config), [], []
    for event in train(state, make_objectives(config), TRAIN, VALI, config, CPU):
        if isinstance(event, Epoch):
            weights.append(state.model.weights.detach().clone())
            active.append(state.active.clone())
    stopped = [int((~torch.stack(active)[:, member]).float().argmax()) for member in range(5) if not active[-1][member]]
    assert len(set(stopped)) > 1  # not all at once
    for member in range(5):
        for epoch in range(1, len(weights)):
            assert torch.equal(weights[epoch][member], weights[epoch - 1][member]) == (not active[epoch - 1][member])
    assert state.best_epoch.tolist() == [int(row.argmax()) + 1 for row in state.values]


def test_each_member_keeps_its_own_best_epoch():
    config = with_(epochs=6, lr=(0.01, 0.1))
    state = state_of(config)
    events = train(state, make_objectives(config), TRAIN, VALI, config, CPU)
    weights = [state.model.weights.detach().clone() for event in events if isinstance(event, Epoch)]
    assert len(set(state.best_epoch.tolist())) > 1
    for member, epoch in enumerate(state.best_epoch.tolist()):
        assert torch.equal(state.best[member], weights[epoch - 1][member])
    with torch.no_grad():
        state.model.weights.copy_(state.best)
    batch = padded(VALI)
    for member in range(5):
        values = ndcg(scores_of(state)[member].double(), batch.labels, batch.mask, k=10)
        assert values.mean().item() == pytest.approx(state.values[member].max().item(), abs=1e-12)


def test_the_last_epoch_is_kept_where_nothing_is_to_be_chosen(tmp_path):
    config = with_(select="last", lr=(0.05, 0.2))
    state = trained(config)
    model, facts, _ = state.result(config, VALI, CPU)
    assert torch.equal(model.members.weights, state.model.weights)
    assert not torch.equal(state.best, state.model.weights)
    assert {member["best_epoch"] for member in facts["members"]} == {3}
    assert all(member["kept"] for member in facts["members"])
    assert facts["best_epoch"] == 3


# --- folds -------------------------------------------------------------------------------------------------------------


def test_every_query_is_in_one_fold_and_folds_are_equal():
    folds = folds_of(TRAIN, 4, seed=0)
    assert sorted(np.bincount(folds).tolist()) == [7, 7, 8, 8]
    assert not np.array_equal(folds, folds_of(TRAIN, 4, seed=1))
    shuffled = TRAIN.select(np.arange(30)[::-1])
    assert np.array_equal(folds_of(shuffled, 4, seed=0)[::-1], folds)  # of its id, not of its place


@pytest.mark.parametrize("bag", [2, 3, 4, 5])
def test_every_loss_meets_every_fold_and_few_members_have_different_folds(bag):
    drawn = state_of(with_(count=4 * bag, bag=bag)).drawn
    assert len(set(zip(drawn.loss, drawn.fold))) == 4 * bag
    assert sorted(drawn.fold[:bag]) == list(range(bag))


def test_a_member_never_learns_from_its_own_fold():
    config = with_(count=8, bag=2)
    state = trained(config)
    document_folds = np.repeat(state.folds, TRAIN.lengths)
    changed = np.where(document_folds == 0, np.roll(TRAIN.labels, 1), TRAIN.labels)
    other = trained(config, train_set=dataclasses.replace(TRAIN, labels=changed))
    for member, fold in enumerate(state.drawn.fold):
        assert torch.equal(other.model.weights[member], state.model.weights[member]) == (fold == 0)


def test_validation_is_by_members_that_did_not_learn_from_a_query():
    config = with_(count=8, bag=2, keep=4)
    state = trained(config)
    _, facts, measured = state.result(config, TRAIN, CPU)
    kept = [at for at, member in enumerate(facts["members"]) if member["kept"]]
    assert [facts["members"][at]["fold"] for at in kept].count(0) == 2
    values = measured(["ndcg@10"])["ndcg@10"]
    best = state.gathered(config, CPU)
    for fold in (0, 1):
        own = average(best, [at for at in kept if state.drawn.fold[at] == fold])
        part = TRAIN.select(np.flatnonzero(state.folds == fold))
        batch = padded(part)
        with torch.no_grad():
            expected = ndcg(own(batch.features, batch.mask).double(), batch.labels, batch.mask, k=10, empty=math.nan)
        np.testing.assert_allclose(values[state.folds == fold], expected, atol=1e-12)
    for member, of_fold in enumerate(state.drawn.fold):
        alone = held_out_values(best, [member], TRAIN, ["ndcg@10"], CPU)["ndcg@10"][state.folds == of_fold]
        assert np.where(np.isnan(alone), 1.0, alone).mean() == pytest.approx(facts["members"][member]["validation"])


def test_as_many_are_kept_as_there_should_be_where_a_fold_has_fewer():
    config = with_(count=5, bag=2, keep=5)
    state = state_of(config)
    state.values = torch.tensor([[0.1], [0.2], [0.3], [0.4], [0.5]], dtype=torch.float64)
    assert state.kept(config) == [0, 1, 2, 3, 4]
    assert [state.drawn.fold[at] for at in state.kept(with_(config, keep=2))] == [0, 1]
    state.dropped[4] = True
    assert state.kept(config) == [0, 1, 2, 3]


def test_a_bagged_run_takes_the_validation_queries_too(tmp_path):
    report = finished(tmp_path / "run", with_(count=2, keep=2, bag=3, epochs=1))
    assert report["splits"]["vali"]["queries"] == 40
    assert [member["fold"] for member in report["members"]] == [0, 1]
    assert read_config(tmp_path / "run").members.bag == 2  # a fold for each member at most


# --- resuming, processes, files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("members") / "run"
    finished(folder, with_(patience=2))
    return folder


@pytest.mark.parametrize("events", [3, 5, 9, 14])
def test_a_run_that_ends_anywhere_goes_on_to_the_same_weights(whole, tmp_path, events):
    run = train_run(tmp_path / "run", with_(patience=2))
    for _ in range(events):
        next(run)
    run.close()
    report = finished(tmp_path / "run")
    assert same(artefact(tmp_path / "run"), artefact(whole))
    assert report["members"] == json.loads((whole / "report.json").read_text())["members"]


@pytest.mark.slow
def test_a_run_stopped_within_an_epoch_goes_on_to_the_same_weights(whole, tmp_path):
    out = tmp_path / "run"
    process = children.start(children.train, out, Trap(6, at="step", what="SIGTERM"), with_(patience=2))
    assert children.code(process) == INTERRUPTED
    assert children.code(children.start(children.train, out)) == 0
    assert same(artefact(out), artefact(whole))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_train_the_members_of_one(whole, tmp_path, world):
    out = tmp_path / "run"
    group = children.group(children.train, world, out, None, with_(patience=2))
    assert [children.code(process) for process in group] == [0] * world
    ours, theirs = artefact(out), artefact(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=0)
    told, expected = (json.loads((folder / "report.json").read_text()) for folder in (out, whole))
    for name in ("kept", "best_epoch", "validation_of_best", "validation_of_average", "metrics"):
        assert told[name] == expected[name], name
    for own, member in zip(told["members"], expected["members"], strict=True):
        assert own == pytest.approx(member)


def test_the_report_says_what_was_kept_and_why(whole):
    report = json.loads((whole / "report.json").read_text())
    members = report["members"]
    assert [member["member"] for member in members] == [0, 1, 2, 3, 4]
    assert set(members[0]) == {
        "member", "loss", "lr", "dropout", "weight_decay", "scale", "fold", "best_epoch", "validation", "kept", "dropped",
    }  # fmt: skip
    kept = [member["validation"] for member in members if member["kept"]]
    assert report["kept"] == len(kept) == 3
    assert min(kept) >= max(member["validation"] for member in members if not member["kept"])
    assert report["validation_of_best"] == max(kept)
    assert report["validation_of_average"] == report["metrics"]["vali"]["ndcg@10"]["empty=1"]
    assert len(artefact(whole)["model.members.weights"]) == 3
    assert read_per_query(whole).split == "test"


def test_a_saved_run_scores_as_its_report_says(whole):
    run = Run.open(whole, "cpu")
    values = run.evaluate(synthetic("tiny", "test"), ("ndcg@10",))["ndcg@10"]
    report = json.loads((whole / "report.json").read_text())
    assert np.where(np.isnan(values), 1.0, values).mean() == pytest.approx(
        report["metrics"]["test"]["ndcg@10"]["empty=1"]
    )


# --- what is left to the data ------------------------------------------------------------------------------------------


def lists(queries, documents=2, features=3):
    rng = np.random.default_rng(0)
    labels = np.tile([0.0, 1.0], queries * documents // 2)
    return RankingDataset(
        rng.normal(size=(len(labels), features)), labels, np.arange(0, len(labels) + 1, documents), np.arange(queries)
    )


@pytest.mark.parametrize(
    ("queries", "expected"), [(999, (16, 60)), (1_000, (32, 60)), (5_000, (64, 30)), (15_000, (64, 20))]
)
def test_batches_grow_and_epochs_fall_with_the_queries(queries, expected):
    fitted = fit_to_data(strong(), lists(queries), CPU, validated=True).train
    assert (fitted.batch_size, fitted.epochs) == expected


def test_the_count_of_members_follows_the_device_and_the_data():
    small, gpu = lists(100), torch.device("cuda")
    assert fit_to_data(strong(), small, CPU, validated=True).members == MemberSettings(count=16, keep=16, bag=1)
    assert fit_to_data(strong(), small, gpu, validated=True).members == MemberSettings(count=64, keep=32, bag=1)
    wide = lists(20_000, features=200)
    few = fit_to_data(strong(), wide, CPU, validated=True).members
    assert few.count == few.keep == 4
    assert fit_to_data(strong(), small, CPU, validated=False).members.bag == 5
    assert fit_to_data(strong(), lists(9), CPU, validated=False).members.bag == 1
    given = dataclasses.replace(strong(), members=MemberSettings(count=7, keep=9, bag=2))
    assert fit_to_data(given, small, CPU, validated=True).members == MemberSettings(count=7, keep=7, bag=2)


@pytest.mark.parametrize("members", [0, 1])
def test_inputs_are_in_pieces_unless_there_are_very_many_features(members):
    config = replaced(strong(), "members.count", members)
    found = {
        features: fit_to_data(config, lists(4, features=features), CPU, validated=True).model.inputs
        for features in (3, 1_024, 1_025)
    }
    assert found == {3: "pieces", 1_024: "pieces", 1_025: "features"}
    given = replaced(config, "model.inputs", "list")
    assert fit_to_data(given, lists(4, features=1_025), CPU, validated=True).model.inputs == "list"
    own = replaced(replaced(config, "members.count", 1), "model.kind", "tower:Tower")
    assert fit_to_data(own, lists(4), CPU, validated=True).model.inputs == "features"


def test_a_configuration_and_a_file_keep_one_member():
    assert Config().members.count == 1
    assert loads("[train]\nepochs = 8").members == MemberSettings()
    assert loads(dumps(MEMBERS)) == MEMBERS
    assert configure("synthetic:tiny", {}, []).members.count == 0
    assert configure("synthetic:tiny", {}, [], "paper").members.count == 1
    assert configure("synthetic:tiny", {"model.kind": "mlp"}, []).members.count == 1
    assert not isinstance(make_state(Config(), TRAIN, CPU), MemberState)


def test_few_queries_without_validation_are_all_learned_from(tmp_path):
    lists(6, documents=4).save(tmp_path / "data")
    config = configure(
        str(tmp_path / "data"),
        {"members.count": 4, "train.epochs": 2},
        ["train.device=cpu", "model.hidden=[4]"],
        "strong",
    )
    report = finished(tmp_path / "run", config)
    assert report["splits"]["train"]["queries"] == 6
    assert report["kept"] == 4
    assert {member["best_epoch"] for member in report["members"]} == {2}
    assert read_config(tmp_path / "run").train.select == "last"


REFUSED = {
    "two losses, one member": (with_(count=1), "members.count is 1.*expected one loss"),
    "folds of one member": (dataclasses.replace(CONFIG, members=MemberSettings(bag=3)), "members.bag.*count above 1"),
    "a transformer": (
        dataclasses.replace(MEMBERS, model=Model(kind="transformer")),
        "mlp or linear.*transformer.*members.share",
    ),
    "last of folds": (with_(bag=2, select="last"), "train.select.*members.bag"),
    "several outputs": (dataclasses.replace(MEMBERS, loss=Loss("ordinal")), "ordinal.*several outputs"),
    "one end of a range": (with_(lr=(0.1,)), "members.ranges.lr.*two numbers"),
    "a range from high to low": (with_(lr=(0.1, 0.01)), "members.ranges.lr.*least to the most"),
    "all dropped": (with_(dropout=(0.0, 1.0)), "members.ranges.dropout"),
    "noise of one's own": (
        dataclasses.replace(MEMBERS, loss=Loss("neural_ndcg", {"samples": 2})),
        "neural_ndcg.*samples",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_members_cannot_do_is_refused_before_data_is_read(case):
    config, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        validate(config)


@pytest.mark.slow
def test_more_processes_than_members_are_refused(tmp_path):
    group = children.group(children.train, 3, tmp_path / "run", None, with_(count=2))
    assert children.REFUSED in [children.code(process) for process in group]
    assert "members.count" in next(tmp_path.glob("run.message-*")).read_text()


def test_names_of_members_are_as_many_as_their_rows():
    assert len(Members(3, ids=[4, 9], hidden=(2,)).weights) == 2


# --- members that share their weights ----------------------------------------------------------------------------------


SHARED = {
    kind: dataclasses.replace(
        MEMBERS,
        model=Model(kind=kind, hidden=(8,), width=8, layers=1, feedforward=8, dropout=0.2, inputs="list"),
        loss=Loss("query_rmse"),
        members=MemberSettings(count=3, share=True),
    )
    for kind in ("mlp", "transformer")
}
every_shared = pytest.mark.parametrize("kind", SHARED)


@every_shared
def test_the_loss_of_sharing_members_is_the_mean_of_theirs(kind):
    config = SHARED[kind]
    model = make_state(config, TRAIN, CPU).model
    batch = padded(VALI)
    output = model(batch.features, batch.mask)
    assert output.shape == (*batch.mask.shape, 3)
    objective = make_objectives(config)["query_rmse"]
    found = objective.values(output, batch.labels, batch.mask, torch.Generator())
    each = [LOSSES["query_rmse"](output[..., k], batch.labels, batch.mask, reduction="none") for k in range(3)]
    torch.testing.assert_close(found, torch.stack(each).mean(0))


@every_shared
def test_sharing_members_learn_are_kept_in_one_file_and_resumed_to_the_bit(kind, tmp_path):
    config = SHARED[kind]
    whole = finished(tmp_path / "whole", config)
    assert whole["selection"] == "best epoch by validation"
    losses = [json.loads(line)["loss"] for line in (tmp_path / "whole" / "history.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    run = train_run(tmp_path / "run", config)
    for _ in range(7):
        next(run)
    run.close()
    assert finished(tmp_path / "run")["metrics"] == whole["metrics"]
    assert same(artefact(tmp_path / "run"), artefact(tmp_path / "whole"))
    values = Run.open(tmp_path / "run", "cpu").evaluate(synthetic("tiny", "test"), ("map",))["map"]
    assert np.nan_to_num(values).mean() == pytest.approx(whole["metrics"]["test"]["map"]["empty=0"])


@every_shared
def test_sharing_members_learn_the_same_from_packed_lists(kind, tmp_path):
    config = dataclasses.replace(SHARED[kind], model=dataclasses.replace(SHARED[kind].model, dropout=0.0))
    padded_run, packed_run = (
        finished(tmp_path / str(pack), with_(config, pack=pack, epochs=2))["metrics"] for pack in (False, True)
    )
    for split, metrics in padded_run.items():
        for name in metrics:
            assert packed_run[split][name] == pytest.approx(metrics[name], abs=1e-6)


@pytest.mark.slow
def test_several_processes_train_the_sharing_members_of_one(tmp_path):
    config = dataclasses.replace(SHARED["mlp"], model=dataclasses.replace(SHARED["mlp"].model, dropout=0.0))
    group = children.group(children.train, 2, tmp_path / "two", None, config)
    assert [children.code(process) for process in group] == [0, 0]
    finished(tmp_path / "one", config)
    ours, theirs = artefact(tmp_path / "two"), artefact(tmp_path / "one")
    for name in set(theirs) - {"model.output.bias"}:  # whose gradient is rounding alone: the loss does not see a shift
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)


def test_sixteen_share_where_nothing_else_is_said_and_nothing_is_bagged():
    config = configure("synthetic:tiny", {"loss.name": "query_rmse"}, ["members.share=true"])
    fitted = fit_to_data(validate(config), lists(100), CPU, validated=False).members
    assert (fitted.count, fitted.bag) == (16, 1)


SHARED_REFUSED = {
    "several losses": (dataclasses.replace(SHARED["mlp"], loss=Loss(LOSS_NAMES)), "4 losses.*learn from one"),
    "folds": (with_(SHARED["mlp"], bag=2), "members.bag.*members.share"),
    "a linear model": (dataclasses.replace(SHARED["mlp"], model=Model(kind="linear")), "mlp and transformer.*linear"),
    "several outputs": (dataclasses.replace(SHARED["mlp"], loss=Loss("ordinal")), "ordinal.*several outputs"),
}


@pytest.mark.parametrize("case", SHARED_REFUSED)
def test_what_sharing_members_cannot_do_is_refused(case):
    config, message = SHARED_REFUSED[case]
    with pytest.raises(ValueError, match=message):
        validate(config)
