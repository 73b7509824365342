"""A run that starts from another's weights: columns by name, the old scaling, new columns at weight zero."""

import dataclasses
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import children
import rankgrad
from children import Trap
from rankgrad.cli import main
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import read_lists
from rankgrad.data.scaling import Scaling, fit_scaling
from rankgrad.files import load_tensors
from rankgrad.runs.folder import read_config, read_report, read_start
from rankgrad.runs.run import Finished, Run, train_run
from rankgrad.training.config import Config, Data, Loss, Members, Model, Optimiser, Train
from rankgrad.training.data import shared_splits
from rankgrad.training.loop import Epoch

STILL = 1e-30  # a learning rate at which weights stay as they are
OLD = ["price", "clicks", "age", "text"]


def table(path, columns, *, seed=0, queries=14, holes=True):
    """Lists with named columns; `clicks` has missing values, `shop` holds categories."""
    rng, rows = np.random.default_rng(seed), queries * 5
    values = {
        "price": rng.normal(size=rows),
        "clicks": rng.lognormal(size=rows),
        "age": rng.uniform(size=rows),
        "text": rng.normal(size=rows),
        "stars": 10 * rng.normal(size=rows) + 3,
        "sales": rng.lognormal(size=rows),
        "shop": rng.choice([0.0, 1.0, 2.0], size=rows),
    }
    labels = (values["price"] + values["stars"] / 10 > 0.3).astype(int)
    if holes:
        values["clicks"][::6] = np.nan
        values["sales"][::7] = np.nan
    names = {"label": labels, "qid": np.repeat(np.arange(queries), 5)} | {name: values[name] for name in columns}
    path.parent.mkdir(exist_ok=True)
    if "shop" in columns:
        features = np.stack([values[name] for name in columns], 1)
        shops = ("a", "b", "c") if seed == 0 else ("c", "new", "a")  # codes stand for other texts there
        given = {"feature_names": tuple(columns), "categories": {columns.index("shop"): shops}}
        RankingDataset(features, labels, np.arange(0, rows + 1, 5), np.arange(queries), **given).save(
            path.parent / "train"
        )
    else:
        pq.write_table(pa.table(names), path)
    return str(path.parent)


def config(path, kind="mlp", *, epochs=2, lr=0.01, init=None, **model):
    settings = {"mlp": {"hidden": (5,)}, "transformer": {"width": 8, "layers": 1, "feedforward": 8}, "linear": {}}
    return Config(
        data=Data(path, scaling="quantile"),
        model=Model(kind, **settings[kind], dropout=0.0, **model),
        loss=Loss("softmax"),
        optimiser=Optimiser(lr=lr, schedule="constant"),
        train=Train(epochs=epochs, batch_size=4, device="cpu", threads=1, init=None if init is None else str(init)),
    )


def trained(out, settings, **own):
    *_, last = train_run(out, settings, **own)
    assert isinstance(last, Finished)
    return out


@pytest.fixture(scope="module")
def may(tmp_path_factory):
    return table(tmp_path_factory.mktemp("may") / "may" / "train.parquet", OLD)


@pytest.fixture(scope="module")
def old(may, tmp_path_factory):
    """The run to start from."""
    return trained(tmp_path_factory.mktemp("old") / "run", config(may))


def scores(run, source, **own):
    opened = Run.open(run, "cpu", *own.values())
    return opened.score(opened.read(source))


NEW = ["stars", "age", "sales", "text", "price", "clicks"]  # another order, two columns more, one of them with holes
KINDS = {
    "mlp": {},
    "mlp, list inputs": {"inputs": "list"},
    "mlp, pieces": {"inputs": "pieces"},
    "transformer": {"kind": "transformer"},
    "transformer, list inputs": {"kind": "transformer", "inputs": "list"},
    "linear": {"kind": "linear"},
    "linear, list inputs": {"kind": "linear", "inputs": "list"},
}


def several(settings, *, share):
    members = Members(count=3, keep=3, share=share)
    return dataclasses.replace(settings, members=members)


# --- the first scores are those of old --------------------------------------------------------------------------------


CASES = [  # every kind, every kind of inputs, every kind of members, numbers alone and with categories
    ("mlp", "one network", ()),
    ("mlp, list inputs", "shared", ("shop",)),
    ("mlp, list inputs", "members", ("shop",)),
    ("mlp, pieces", "members", ()),
    ("transformer", "shared", ()),
    ("transformer, list inputs", "one network", ("shop",)),
    ("linear", "one network", ("shop",)),
    ("linear, list inputs", "members", ()),
]


@pytest.mark.parametrize(("kind", "members", "categories"), CASES)
def test_before_it_learns_it_scores_as_the_old_run_did(kind, members, categories, tmp_path):
    model = KINDS[kind]
    may = table(tmp_path / "may" / "train.parquet", [*OLD, *categories])
    june = table(tmp_path / "june" / "train.parquet", ["stars", *categories, *NEW[1:]], seed=1)
    before, after = config(may, **model), config(june, lr=STILL, epochs=1, init=tmp_path / "old", **model)
    if members != "one network":
        share = members == "shared"
        before, after = several(before, share=share), several(after, share=share)
        if not share:
            still = dataclasses.replace(after.members.ranges, lr=(STILL, STILL))
            after = dataclasses.replace(after, members=dataclasses.replace(after.members, ranges=still))
    trained(tmp_path / "old", before)
    trained(tmp_path / "new", after)
    new = Run.open(tmp_path / "new", "cpu")
    assert new.names[: len(OLD) + len(categories)] == (*OLD, *categories) and {*new.names} > {"stars", "sales"}
    here = table(tmp_path / "here" / "train.parquet", [*OLD, *categories], seed=1)  # saved lists are not taken by name
    there = table(tmp_path / "there" / "train.parquet", [*OLD, *categories, "stars", "sales"], seed=1)
    np.testing.assert_allclose(scores(tmp_path / "new", there), scores(tmp_path / "old", here), atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("share", [None, True, False], ids=["one network", "shared", "members"])
def test_on_a_gpu_it_starts_from_the_same_scores(share, may, tmp_path):
    june = table(tmp_path / "june" / "train.parquet", NEW, seed=1)
    before, after = config(may), config(june, lr=STILL, epochs=1, init=tmp_path / "old")
    if share is not None:
        before, after = several(before, share=share), several(after, share=share)
        still = dataclasses.replace(after.members.ranges, lr=(STILL, STILL))
        after = dataclasses.replace(after, members=dataclasses.replace(after.members, ranges=still))
    trained(tmp_path / "old", before)
    trained(tmp_path / "new", dataclasses.replace(after, train=dataclasses.replace(after.train, device="cuda")))
    np.testing.assert_allclose(scores(tmp_path / "new", june), scores(tmp_path / "old", june), atol=1e-5)


def test_it_learns_on_and_new_columns_gain_weight(old, tmp_path):
    june = table(tmp_path / "june" / "train.parquet", NEW, seed=1)
    out = trained(tmp_path / "new", config(june, init=old))
    start, end = (load_tensors(folder / "model.safetensors")[0]["model.layers.0.weight"] for folder in (old, out))
    columns = Run.open(out, "cpu").names
    assert columns == (*OLD, "stars", "sales")
    # inputs: four old columns, two new ones, the indicator of clicks, that of sales
    assert start.shape == (5, 5) and end.shape == (5, 8)
    assert (end[:, [4, 5, 7]] != 0).any(0).all() and not torch.equal(end[:, :4], start[:, :4])
    assert (end[:, :4] - start[:, :4]).abs().max() < 0.5  # it has gone on, not begun anew
    report = read_report(out)
    assert report["init"] == str(old.resolve()) and read_config(out).data.scaling == "quantile"


def test_vectors_of_members_that_share_their_weights_learn_of_new_columns(tmp_path):
    may, june = (table(tmp_path / name / "train.parquet", columns) for name, columns in (("may", OLD), ("june", NEW)))
    trained(tmp_path / "old", several(config(may), share=True))
    out = trained(tmp_path / "new", several(config(june, init=tmp_path / "old"), share=True))
    weights = load_tensors(out / "model.safetensors")[0]
    assert (weights["model.layers.0.weight"][:, [4, 5, 7]] != 0).all(0).any()
    assert set(weights["model.layers.0.r"][:, [4, 5, 7]].abs().round().flatten().tolist()) == {1.0}


def test_the_scaling_of_old_is_kept_to_the_bit(old, tmp_path):
    june = table(tmp_path / "june" / "train.parquet", NEW, seed=3)
    out = trained(tmp_path / "new", config(june, init=old))
    ours, theirs = Run.open(out, "cpu").ranker.scaling, Run.open(old, "cpu").ranker.scaling
    rows = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    rows[::3, 1] = np.nan
    a, b = ours.apply(rows), theirs.apply(rows[:, :4])
    np.testing.assert_array_equal(a[:, [0, 1, 2, 3, 6]], b)


@pytest.mark.parametrize("kind", ["quantile", "standard", "auto", "symlog", "none"])
def test_two_scalings_beside_each_other_are_each_as_alone(kind):
    rng = np.random.default_rng(0)
    left, right = rng.lognormal(size=(40, 3)), rng.normal(size=(40, 2))
    left[3, 1] = right[5, 0] = np.nan
    offsets, labels = [0, 20, 40], np.zeros(40)
    one, other = (fit_scaling(RankingDataset(part, labels, offsets, [1, 2]), kind) for part in (left, right))
    both = Scaling.from_state(one.beside(other).to_state())
    found = both.apply(np.hstack([left, right]))
    assert found.shape == (40, 7) and both.indicators.tolist() == [1, 3]
    np.testing.assert_array_equal(found[:, [0, 1, 2, 5]], one.apply(left))
    np.testing.assert_array_equal(found[:, [3, 4, 6]], other.apply(right))


# --- what does not fit ------------------------------------------------------------------------------------------------


def refused(tmp_path, settings, *words, **own):
    with pytest.raises(ValueError, match=words[0]) as caught:
        list(train_run(tmp_path / "new", settings, **own))
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "new").exists()


def test_columns_that_have_gone_are_named(old, tmp_path):
    june = table(tmp_path / "june" / "train.parquet", ["age", "stars", "text"])
    refused(tmp_path, config(june, init=old), "columns that the data lack: price, clicks")


def test_new_columns_of_categories_are_named(old, tmp_path):
    june = table(tmp_path / "june" / "train.parquet", [*OLD, "shop"])
    refused(tmp_path, config(june, init=old), "shop hold categories", "data.ignore")


def test_text_has_no_names_and_needs_as_many_columns(tmp_path):
    for name, count in (("a", 3), ("b", 4)):
        lines = (
            f"{d % 2} qid:{q} " + " ".join(f"{f + 1}:{(q * d + f) % 7}" for f in range(count))
            for q in range(9)
            for d in range(4)
        )
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    trained(tmp_path / "old", config(str(tmp_path / "a.txt")))
    refused(tmp_path, config(str(tmp_path / "b.txt"), init=tmp_path / "old"), "4 features", "trained on 3")
    same = config(str(tmp_path / "a.txt"), init=tmp_path / "old", lr=STILL, epochs=1)
    trained(tmp_path / "same", same)
    source = str(tmp_path / "a.txt")
    np.testing.assert_array_equal(scores(tmp_path / "same", source), scores(tmp_path / "old", source))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"kind": "linear"}, "of another kind"),
        ({"kind": "transformer"}, "of another kind"),
        ({"inputs": "list"}, "do not fit"),
    ],
)
def test_another_model_is_refused(old, may, tmp_path, other, words):
    refused(tmp_path, config(may, init=old, **other), words, "config.toml")


def test_members_and_one_network_do_not_mix(old, may, tmp_path):
    refused(tmp_path, several(config(may, init=old), share=False), "one network, and the new run has members")
    many = trained(tmp_path / "many", several(config(may), share=False))
    refused(tmp_path, config(may, init=many), "3 members, and the new run is of one network")
    four = dataclasses.replace(config(may, init=many), members=Members(count=4, keep=2))
    refused(tmp_path, four, "3 members, and the new run 4")
    for path in many.glob("checkpoint*"):
        path.unlink()
    refused(tmp_path, several(config(may, init=many), share=False), "checkpoint.safetensors")


def test_what_is_no_run_is_refused(may, tmp_path):
    refused(tmp_path, config(may, init=tmp_path / "absent"), "absent")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.toml").write_text("")
    refused(tmp_path, config(may, init=tmp_path / "unfinished"), "has not finished")
    (tmp_path / "damaged").write_bytes(b"damaged")
    refused(tmp_path, config(may, init=tmp_path / "damaged"), "damaged")


def test_lists_of_the_caller_s_own_are_refused(old, may, tmp_path):
    refused(tmp_path, config(may, init=old), "scaled already", read=lambda *given: shared_splits(*given))


# --- the run is whole -------------------------------------------------------------------------------------------------


def test_it_is_resumed_extended_and_needs_the_old_run_no_more(old, tmp_path):
    june = table(tmp_path / "june" / "train.parquet", NEW, seed=1)
    gone = Path(shutil.copytree(old, tmp_path / "gone"))
    settings = config(june, init=gone, epochs=3)
    whole = trained(tmp_path / "whole", settings)
    short = trained(
        tmp_path / "short", dataclasses.replace(settings, train=dataclasses.replace(settings.train, epochs=1))
    )
    for name in ("cut", "begun"):
        events = train_run(tmp_path / name, settings)
        next(event for event in events if isinstance(event, Epoch) or name == "begun")
        events.close()
    shutil.rmtree(gone)
    list(train_run(tmp_path / "cut"))
    list(train_run(tmp_path / "begun"))
    list(train_run(short, epochs=3))
    for out in (tmp_path / "cut", tmp_path / "begun", short):
        assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes(), out
    (tmp_path / "short" / "init.safetensors").unlink()
    with pytest.raises(ValueError, match="init.safetensors is gone"):
        list(train_run(short, epochs=4))


@pytest.mark.slow
def test_killed_in_its_first_moments_it_goes_on(old, may, tmp_path):
    settings = config(may, init=old)
    whole = trained(tmp_path / "whole", settings)
    for number in (3, 5, 7):
        out = tmp_path / f"run{number}"
        assert children.code(children.start(children.train, out, Trap(number), settings)) == -signal.SIGKILL
        list(train_run(out))
        assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.slow
def test_several_processes_start_from_it(may, tmp_path):
    june = table(tmp_path / "june" / "train.parquet", NEW, seed=1)
    before, after = several(config(may), share=False), config(june, init=tmp_path / "old", lr=STILL, epochs=1)
    after = several(after, share=False)
    still = dataclasses.replace(after.members.ranges, lr=(STILL, STILL))
    after = dataclasses.replace(after, members=dataclasses.replace(after.members, ranges=still))
    trained(tmp_path / "old", before)
    processes = children.group(children.train, 2, tmp_path / "new", None, after)
    assert [children.code(process) for process in processes] == [0, 0]
    np.testing.assert_allclose(scores(tmp_path / "new", june), scores(tmp_path / "old", june), atol=2e-6)


def test_a_saved_ranker_will_do(old, may, tmp_path):
    rankgrad.load(old, "cpu").save(tmp_path / "ranker.safetensors")
    trained(tmp_path / "new", config(may, init=tmp_path / "ranker.safetensors", lr=STILL, epochs=1))
    np.testing.assert_array_equal(scores(tmp_path / "new", may), scores(old, may))


class Tower(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.output = nn.Linear(features, 1)

    def forward(self, features, mask):
        return self.output(features).squeeze(-1)


def test_a_network_of_one_s_own_starts_from_its_weights(may, tmp_path):
    trained(tmp_path / "old", config(may, "linear"), model=Tower)
    same = config(may, "linear", init=tmp_path / "old", lr=STILL, epochs=1)
    trained(tmp_path / "same", same, model=Tower)
    a, b = (scores(tmp_path / name, may, model=Tower) for name in ("old", "same"))
    np.testing.assert_array_equal(a, b)
    june = table(tmp_path / "june" / "train.parquet", NEW)
    refused(tmp_path, config(june, "linear", init=tmp_path / "old"), "network of your own", model=Tower)


def test_a_run_of_an_earlier_commit_will_do(tmp_path, monkeypatch):
    shutil.copytree(Path(__file__).parents[1] / "fixtures" / "b0f1ce3", tmp_path / "b0f1ce3")
    monkeypatch.chdir(tmp_path / "b0f1ce3")
    with pytest.warns(UserWarning, match="train.compile"):
        before = read_config(Path("finished"))
    still = dataclasses.replace(before.optimiser, lr=STILL)
    train = dataclasses.replace(before.train, epochs=1, init="finished")
    trained(Path("new"), dataclasses.replace(before, optimiser=still, train=train))
    with pytest.warns(UserWarning, match="train.compile"):
        expected = Run.open(Path("finished"), "cpu")
    lists = read_lists("data", split="test", features=expected.features)
    np.testing.assert_array_equal(Run.open(Path("new"), "cpu").score(lists), expected.score(lists))
    assert read_start(Path("finished")).scaling.columns == expected.features


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line_follows_the_old_run(old, tmp_path, monkeypatch, capfd):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rankgrad", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capfd.readouterr()

    june = table(tmp_path / "june" / "train.parquet", NEW, seed=1)
    code, _, err = call("train", june, "--init", old, "--lr", 0.001, "--out", tmp_path / "new")
    assert code == 0 and "keeps its scaling (quantile)" in err and "weight 0: stars, sales" in err
    found, before = read_config(tmp_path / "new"), read_config(old)
    assert found.model == before.model and found.loss == before.loss and found.train.epochs == before.train.epochs
    assert found.optimiser.lr == 0.001 and found.data.path == june
    for mistake, words in (
        (("--recipe", "small"), "two configurations"),
        (("--scaling", "auto"), "leave it out"),
        (("--set", "data.scaling=auto"), "leave it out"),
        (("--model", "lightgbm"), "--init is for networks"),
        (("--init", tmp_path / "absent"), "absent"),
    ):
        code, _, err = call("train", june, "--init", old, *mistake, "--out", tmp_path / "wrong")
        assert code == 2 and words in err, err
    code, _, err = call("train", "--resume", tmp_path / "new", "--init", old)
    assert code == 2 and "--resume" in err
