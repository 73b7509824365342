"""Configurations: read strictly, written completely, refused in one sentence before any data is read."""

import dataclasses
import tomllib

import pytest
import torch

from rankgrad.losses import LOSSES
from rankgrad.training.build import (
    losses_of,
    make_device,
    make_model,
    make_objectives,
    parse_loss,
    takes_gain,
    validate,
)
from rankgrad.training.config import RECIPES, Config, Data, Loss, Model, Optimiser, Train, configure, dumps, loads

FULL = Config(
    data=Data('Füße/"quoted" \\ back\tslash\x7f/😀', fold=3, scaling="quantile", list_size=50, validation=0.1),
    model=Model(
        kind="mlp", width=8, layers=1, heads=2, feedforward=16, hidden=(8, 4), dropout=0.0, input_noise=0.5, tanh=False
    ),
    loss=Loss("neural_ndcg@10", {"tau": 1e-07, "samples": 4, "log_scores": False, "perturb": "allrank"}),
    optimiser=Optimiser("adamw", 3e-4, 0.01, 1.5, "plateau", (3, 5), 0.5, 2, 10),
    train=Train(7, 16, 2**40, "map", "last", 3, "skip", "cpu", "bf16", 2, False, ("map", "err@5"), False, "auto", True),
)


@pytest.mark.parametrize("config", [Config(), FULL], ids=["defaults", "everything"])
def test_a_configuration_written_and_read_is_the_same(config):
    assert loads(dumps(config)) == config
    written = tomllib.loads(dumps(config))
    for section in dataclasses.fields(config):  # complete, so that a changed default never changes an old run
        for key in dataclasses.fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), key.name)
            assert key.name in written[section.name] or value in (None, {})


def test_what_a_file_leaves_out_is_the_paper_s_recipe():
    config = loads("[loss]\nname = 'listnet'\n[optimiser]\nlr = 1\nclip = 2")
    assert config == Config(loss=Loss("listnet"), optimiser=Optimiser(lr=1.0, clip=2.0))
    assert type(config.optimiser.lr) is float and type(config.optimiser.clip) is float


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[trian]\nepochs = 1", ["'trian'", "at the top", "'train'"]),
        ("[train]\nepoch = 1", ["'epoch'", "[train]", "'epochs'"]),
        ("[optimiser]\nzzz = 1", ["'zzz'", "[optimiser]", "name, lr, weight_decay, clip"]),
        ("[train]\nepochs = 8.0", ["train.epochs", "int", "8.0"]),
        ("[train]\nepochs = '8'", ["train.epochs", "int", "'8'"]),
        ("[train]\nepochs = true", ["train.epochs", "int", "True"]),
        ("[optimiser]\nlr = true", ["optimiser.lr", "float", "True"]),
        ("[optimiser]\nclip = 'no'", ["optimiser.clip", "float", "'no'"]),
        ("[train]\ntensorboard = 1", ["train.tensorboard", "bool", "1"]),
        ("[model]\nhidden = 8", ["model.hidden", "list", "8"]),
        ("[model]\nhidden = [8, 'x']", ["model.hidden", "int", "'x'"]),
        ("[loss]\noptions = 3", ["loss.options", "table", "3"]),
        ("[loss.options]\ntau = [1]", ["loss.options", "table", "[1]"]),
        ("train = 3", ["train", "[train]", "3"]),
        ("[train\nx", ["TOML"]),
    ],
)
def test_what_is_unknown_or_of_another_type_is_refused(text, facts):
    with pytest.raises(ValueError, match="run.toml") as caught:
        loads(text, "run.toml")
    assert all(fact in str(caught.value) for fact in facts), caught.value


def test_a_key_that_is_gone_is_refused_from_a_user_and_left_out_of_a_run(tmp_path):
    text = "[train]\ncompile = 'auto'\nepochs = 3"
    with pytest.raises(ValueError, match="unknown key 'compile'"):
        loads(text)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match="mine.toml.*unknown key 'compile'"):
        configure(str(tmp_path / "mine.toml"), {}, [])
    with pytest.raises(ValueError, match="unknown key 'compile'"):
        configure("synthetic", {}, ["train.compile=true"])
    with pytest.warns(UserWarning, match="run.toml.*train.compile") as warned:
        assert loads(text, "run.toml", of_run=True) == Config(
            data=Data(missing="all_zero", pandas_categories=False), train=Train(epochs=3)
        )
    assert len(warned) == 1
    with pytest.raises(ValueError, match="unknown key 'epoch'"):  # of a run or not
        loads("[train]\nepoch = 3", of_run=True)


BAD = {
    "data": {
        "scaling": ["standart", "", "Auto"],
        "fold": [0, -1],
        "list_size": [1, 0, -5],
        "validation": [0.0, 1.0, -0.1, 1.5, float("nan")],
        "gain": ["exp", "", (), (1.0,), (0.0, -1.0), (0.0, float("inf"))],
    },
    "model": {
        "kind": ["tranformer", ""],
        "width": [0, -1],
        "layers": [0],
        "heads": [0, 5],  # 96 is not divisible by 5
        "feedforward": [0],
        "hidden": [(0,), (8, -1)],
        "dropout": [1.5, 1.0, -0.1, float("nan")],
        "input_noise": [-0.1, float("nan"), float("inf")],
    },
    "loss": {
        "name": ["neural_ndgc", "neural_ndcg@0", "neural_ndcg@x", "listnet@5", ""],
        "options": [{"tua": 1.0}, {"tau": 0.0}, {"tau": -1.0}, {"tau": "warm"}, {"log_scores": "no"}, {"perturb": "x"}],
    },
    "optimiser": {
        "name": ["sgd", "Adam"],
        "lr": [0.0, -1e-3, float("inf"), float("nan")],
        "weight_decay": [-0.1, float("nan")],
        "clip": [0.0, -1.0],
        "schedule": ["linear"],
        "milestones": [(0,), (3, -1)],
        "gamma": [0.0, -1.0],
        "plateau": [0],
        "warmup": [-1],
    },
    "train": {
        "epochs": [0, -3],
        "batch_size": [0],
        "seed": [-1, 2**63],
        "metric": ["ndgc@10", "ndcg@0", ""],
        "metrics": [("ndcg@5", "mapp"), ()],
        "patience": [0, -1],
        "nonfinite": ["ignore"],
        "device": ["gpu", "cuda:99", "meta", "tpu", "cuda:x"],
        "precision": ["fp16", "float64"],
        "threads": [-1],
    },
}


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [(section, key, value) for section, keys in BAD.items() for key, values in keys.items() for value in values],
)
def test_bad_values_are_refused_before_data_is_read(section, key, value):
    config = Config()
    broken = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{key: value})})
    named = {"device": "device|GPU", "name": "loss|optimiser", "options": "|".join(value) if key == "options" else ""}
    with pytest.raises(ValueError, match=named.get(key, key.removesuffix("s"))) as caught:
        validate(broken)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["transformer", "mlp", "linear"])
@pytest.mark.parametrize("bad", [{"width": 0}, {"heads": 0}, {"hidden": (0,)}, {"dropout": 1.0}, {"input_noise": -1.0}])
def test_a_value_that_this_kind_of_model_does_not_read_is_checked_too(kind, bad):
    with pytest.raises(ValueError, match="|".join(bad)):
        validate(Config(model=Model(kind=kind, **bad)))


@pytest.mark.parametrize(("section", "key"), [("train", "epochs"), ("model", "width"), ("optimiser", "lr")])
def test_none_and_other_types_from_python_are_refused(section, key):
    for value in (None, "8", [1]):
        part = dataclasses.replace(getattr(Config(), section), **{key: value})
        with pytest.raises(ValueError, match=f"{section}.{key}"):
            validate(dataclasses.replace(Config(), **{section: part}))


def test_every_choice_named_in_the_comments_is_taken():
    for kind in ("transformer", "mlp", "linear"):
        validate(Config(model=Model(kind=kind)))
    for scaling in ("auto", "web30k", "symlog", "standard", "quantile", "none"):
        validate(Config(data=Data(scaling=scaling)))
    for name in ("adam", "adamw"):
        for schedule in ("constant", "step", "cosine", "plateau"):
            validate(Config(optimiser=Optimiser(name=name, schedule=schedule)))
    for precision in ("float32", "tf32", "bf16"):
        validate(Config(train=Train(precision=precision)))
    for name in LOSSES:
        validate(Config(loss=Loss(name)))


def test_validate_writes_down_what_the_machine_decides():
    random = torch.get_rng_state()
    checked = validate(Config(model=Model(hidden=[4, 2])))
    assert checked.train.threads == 0  # what a step is worth is known when the data is
    assert validate(Config(model=Model(kind="lightgbm"))).train.threads == torch.get_num_threads()
    assert checked.train.device in ("cpu", "cuda")
    assert checked.model.hidden == (4, 2)
    assert validate(checked) == checked and loads(dumps(checked)) == checked
    assert validate(Config(train=Train(threads=3, device="cpu"))).train.threads == 3
    assert torch.equal(torch.get_rng_state(), random)


def test_a_missing_tensorboard_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        validate(Config(train=Train(tensorboard=True)))


def named(text):
    spec, options = parse_loss(text)
    return spec.name, options


def test_losses_by_name():
    assert named("neural_ndcg@10") == ("neural_ndcg", {"k": 10})
    assert named("neural_ndcg@max") == named("neural_ndcg") == ("neural_ndcg", {})
    with pytest.raises(ValueError, match="'lamdarank@5'.*'lambdarank'"):
        parse_loss("lamdarank@5")
    with pytest.raises(ValueError, match="None.*neural_ndcg, "):
        parse_loss(None)
    with pytest.raises(ValueError, match="listnet has no cut-off"):
        parse_loss("listnet@5")
    assert named("Neural_NDCG@Max") == named("NEURAL_NDCG") == ("neural_ndcg", {})
    for written, ours in {"ndcg@10": "neural_ndcg", "MAP": "neural_map", "rank_xendcg": "xe_ndcg"}.items():
        with pytest.raises(ValueError, match=f"did you mean '{ours}'"):
            parse_loss(written)


def test_names_are_written_down_as_they_are_here():
    written = Config(loss=Loss("LambdaRank@10"), train=Train(metric="NDCG@5", metrics=("MAP", "ndcg@5")))
    checked = validate(written)
    assert (checked.loss.name, checked.train.metric, checked.train.metrics) == (
        "lambdarank@10",
        "ndcg@5",
        ("map", "ndcg@5"),
    )


def test_a_gain_reaches_the_losses_that_take_one_and_a_loss_s_own_comes_first():
    worth = Data(gain=(0.0, 1.0, 5.0))
    for name in LOSSES:
        (spec, options) = losses_of(Config(data=worth, loss=Loss(name)))[name]
        assert options == ({"gain": worth.gain} if "gain" in spec.parameters else {})
    own = Config(data=worth, loss=Loss("lambdarank@3", {"gain": "linear"}))
    assert losses_of(own)["lambdarank@3"][1] == {"k": 3, "gain": "linear"}
    table = loads("[data]\ngain = [0, 1, 5]\n[loss.options]\ngain = [0, 2, 3]")
    assert (table.data.gain, table.loss.options["gain"]) == ((0, 1, 5), (0, 2, 3))
    assert loads(dumps(validate(table))) == validate(table)
    assert not takes_gain(table) and takes_gain(Config())


@pytest.mark.parametrize("name", LOSSES)
def test_an_objective_is_the_loss_list_by_list_and_takes_no_lists_too(name):
    (objective,) = make_objectives(Config(loss=Loss(name))).values()
    units = (3,) if name == "ordinal" else ()
    labels = torch.tensor([[2.0, 0, 1], [0, 0, 0], [1, 2, 0]])
    mask = torch.tensor([[True] * 3, [True] * 3, [True, True, False]])
    scores = torch.randn(3, 3, *units, generator=torch.Generator().manual_seed(1)).requires_grad_()
    values = objective.values(scores, labels, mask, torch.Generator().manual_seed(2))
    extra = {"generator": torch.Generator().manual_seed(2)} if name == "xe_ndcg" else {}
    expected = LOSSES[name](scores, labels, mask, reduction="none", **extra)
    assert torch.equal(values, expected)
    counts = objective.counts(labels, mask)
    count = mask[counts].sum() if objective.by_document else counts.sum()
    assert torch.allclose(values.sum() / count, LOSSES[name](scores, labels, mask, **_fresh(extra)), atol=1e-6)
    nothing = objective.values(scores[:0], labels[:0], mask[:0], torch.Generator())
    nothing.sum().backward()
    assert nothing.shape == (0,) and objective.counts(labels[:0], mask[:0]).shape == (0,)


def _fresh(extra):
    return {"generator": torch.Generator().manual_seed(2)} if extra else {}


def test_the_threshold_of_a_binary_metric_decides_which_lists_count():
    (objective,) = make_objectives(Config(loss=Loss("neural_map", {"threshold": 2.0}))).values()
    labels, mask = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert objective.counts(labels, mask).tolist() == [False, True]


def test_tanh_is_the_relaxed_sorts_unless_told():
    for loss, expected in {"neural_ndcg": True, "neural_mrr@5": True, "listnet": False}.items():
        spec, _ = losses_of(Config(loss=Loss(loss)))[loss]
        assert make_model(Model(), 3, 1, tanh=spec.tanh).tanh is expected
        assert make_model(Model(kind="linear", tanh=not expected), 3, 1, tanh=spec.tanh).tanh is not expected


def test_devices():
    assert make_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert make_device("auto") == torch.device("cpu")
        with pytest.raises(ValueError, match="'cuda'.*no usable GPU.*'cpu'"):
            make_device("cuda")
    with pytest.raises(ValueError, match="'gpu'.*auto, cpu, cuda"):
        make_device("gpu")


def test_recipes_are_valid_and_what_they_say():
    assert list(RECIPES) == ["strong", "paper", "small", "dasalc"]
    strong = RECIPES["strong"]()
    assert (strong.members.count, strong.members.bag, strong.model.inputs) == (0, 0, "auto") and len(
        strong.loss.names
    ) == 4
    for recipe in RECIPES.values():
        validate(recipe())
    assert RECIPES["paper"]() == Config()
    small = RECIPES["small"]()
    assert (small.model.width, small.model.feedforward, small.train.epochs) == (32, 64, 30)
    assert small.train.patience is not None
    dasalc = RECIPES["dasalc"]()
    assert (dasalc.data.scaling, dasalc.loss.name) == ("symlog", "softmax")
    assert dasalc.model.input_noise > 0 and dasalc.model.width > Config().model.width


def test_missing_values_of_text_need_no_quotes():
    assert configure("data", {}, ["data.missing=nan"]).data.missing == "nan"
