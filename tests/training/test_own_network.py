"""A network of the caller's own trains, is kept, resumed and ranked with like one of ours; nothing is executed for a name in a file."""

import copy
import dataclasses
import functools
import json
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn

import rankgrad
from cases import without_seal
from rankgrad.cli import main
from rankgrad.estimator import NeuralRanker
from rankgrad.export import export_ranker
from rankgrad.files import load_tensors, save_tensors
from rankgrad.models import MLP
from rankgrad.ranker import Ranker
from rankgrad.runs.ensemble import Ensemble, open_run
from rankgrad.runs.folder import read_config, read_per_query, read_report
from rankgrad.runs.run import Finished, Run, train_run
from rankgrad.training.build import validate
from rankgrad.training.config import Config, Data, Loss, Members, Model, Optimiser, Train, configure, dumps, loads
from rankgrad.training.execution import expectations
from rankgrad.training.loop import Epoch
from rankgrad.training.network import check_network, import_network, network_name

NAME = f"{__name__}:Tower"
CONFIG = Config(
    Data("synthetic:tiny"),
    loss=Loss("softmax"),
    optimiser=Optimiser(lr=0.01, schedule="constant"),
    train=Train(epochs=3, batch_size=8, device="cpu", threads=1),
)
RNG = np.random.default_rng(0)
X, QID = RNG.normal(size=(60, 5)).astype(np.float32), np.repeat(np.arange(10), 6)
Y = (X[:, 0] > 0).astype(int)


class Tower(nn.Module):
    """What a list's documents say of each other, by a mean; with everything a state may hold: buffers, dropout, shared weights."""

    def __init__(self, features, width=6):
        super().__init__()
        self.first = nn.Linear(features, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.third.weight = self.second.weight
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(2 * width, 1)

    def forward(self, features, mask=None):
        mask = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device) if mask is None else mask
        hidden = self.first(features)
        hidden = self.dropout(self.third(self.second(self.norm(hidden.mT).mT).relu()).relu())
        real = mask[..., None].float()
        mean = (hidden * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        return self.output(torch.cat([hidden, mean.expand_as(hidden)], -1)).squeeze(-1)


def make(features, width=6):
    return Tower(features, width)


def trained(out, config=CONFIG, **own):
    *_, last = train_run(out, config, **own)
    assert isinstance(last, Finished)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("own") / "run", model=Tower)


# --- it trains --------------------------------------------------------------------------------------------------------


def test_a_network_like_ours_trains_to_the_same_bits_as_ours(tmp_path):
    """The caller's own MLP and ours draw the same weights from the same seed and see the same lists."""

    class Own(MLP):
        def packed(self):
            raise AssertionError

    config = dataclasses.replace(CONFIG, model=Model("mlp", hidden=(4,), dropout=0.1))
    ours = trained(tmp_path / "ours", config)
    own = trained(tmp_path / "own", CONFIG, model=functools.partial(Own, hidden=(4,), dropout=0.1))
    a, b = (read_per_query(folder).metrics["ndcg@10"] for folder in (ours, own))
    np.testing.assert_array_equal(a, b)
    assert read_report(own)["metrics"] == read_report(ours)["metrics"]


def test_it_learns_and_its_folder_names_it(run):
    report, config = read_report(run), read_config(run)
    assert config.model.kind == NAME and report["metrics"]["test"]["ndcg@10"]["empty=1"] > 0
    losses = [json.loads(line)["loss"] for line in (run / "history.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert report["execution"]["why_not"]["pack"].startswith("Tower has no method packed")


def test_an_instance_begins_with_its_own_weights_and_stays_as_it_is(tmp_path):
    torch.manual_seed(5)
    network = Tower(136)
    before = copy.deepcopy(network.state_dict())
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, epochs=1))
    one, other = (trained(tmp_path / name, config, model=network) for name in "ab")
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "given", [Tower, make, functools.partial(Tower, width=6)], ids=["class", "function", "partial"]
)
def test_what_makes_one_is_given_the_number_of_features(given, run, tmp_path):
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, epochs=1))
    out = trained(tmp_path / "run", config, model=given)
    assert read_config(out).model.kind == network_name(given)


def test_a_configuration_names_it_with_its_options(tmp_path):
    config = dataclasses.replace(CONFIG, model=Model(NAME, options={"width": 3}))
    assert loads(dumps(config)) == config
    out = trained(tmp_path / "run", config)
    assert rankgrad.load(out, "cpu", model=Tower).model.first.out_features == 3
    same = configure("synthetic:tiny", {"model.kind": NAME}, ["model.options.width=4", "model.options.width=3"])
    assert same.model.options == {"width": 3} and same.members.count == 1


def test_a_frozen_part_stays_frozen_and_lazy_layers_are_made(tmp_path):
    class Lazy(nn.Module):
        def __init__(self, features):
            super().__init__()
            self.frozen = nn.Linear(features, 4).requires_grad_(False)
            self.lazy = nn.LazyLinear(1)

        def forward(self, features, mask):
            return self.lazy(self.frozen(features).relu()).squeeze(-1)

    torch.manual_seed(1)
    network = Lazy(136)
    out = trained(tmp_path / "run", model=network)
    kept = rankgrad.load(out, "cpu", model=Lazy).model
    assert torch.equal(kept.frozen.weight, network.frozen.weight) and kept.lazy.weight.shape == (1, 4)


def test_a_loss_with_several_outputs_asks_for_them(tmp_path):
    class Units(nn.Module):
        def __init__(self, features, units=4):
            super().__init__()
            self.output = nn.Linear(features, units)

        def forward(self, features, mask):
            return self.output(features)

    config = dataclasses.replace(CONFIG, loss=Loss("ordinal"))
    out = trained(tmp_path / "run", config, model=Units)
    assert rankgrad.load(out, "cpu", model=Units).units == 4
    with pytest.raises(ValueError, match=r"\[2, 3, 4\].*4 per document"):
        list(train_run(tmp_path / "one", config, model=Tower))
    assert not (tmp_path / "one").exists()


# --- it is resumed, extended, loaded ----------------------------------------------------------------------------------


def test_it_is_resumed_with_the_network_given_again(run, tmp_path):
    events = train_run(tmp_path / "cut", CONFIG, model=Tower)
    next(event for event in events if isinstance(event, Epoch))
    events.close()
    with pytest.raises(ValueError, match=rf"{NAME}.*no code.*model=Tower.*--model {NAME}"):
        list(train_run(tmp_path / "cut"))
    list(train_run(tmp_path / "cut", model=Tower))
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_it_is_extended(run, tmp_path):
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, epochs=2))
    out = trained(tmp_path / "run", config, model=Tower)
    with pytest.raises(ValueError, match="no code"):
        list(train_run(out, epochs=3))
    list(train_run(out, epochs=3, model=Tower))
    assert (out / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_loading_executes_nothing_and_asks_for_the_network(run, monkeypatch):
    load = rankgrad.load
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    for opened in (load, Run.open, open_run, lambda folder: Ranker.load(folder / "model.safetensors")):
        with pytest.raises(ValueError, match=f"{NAME}.*no code.*model=Tower"):
            opened(run)
    with pytest.raises(ValueError, match=NAME):
        Ensemble.open([run])


def test_a_name_in_a_file_is_never_imported(run, tmp_path, monkeypatch):
    """A folder from elsewhere that names a module with side effects: whoever opens it is asked, and nothing happens."""
    (tmp_path / "evil.py").write_text("open('was-here', 'w').close()\nclass Tower: pass\n")
    for path in run.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = without_seal(tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text(text.replace(NAME, "evil:Tower"))
    tensors, facts = load_tensors(tmp_path / "model.safetensors")
    facts |= {"config": facts["config"].replace(NAME, "evil:Tower"), "parameters": {"model": "evil:Tower"}}
    save_tensors(tmp_path / "saved.safetensors", tensors, facts)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for attempt in (
        lambda: rankgrad.load("."),
        lambda: rankgrad.load("saved.safetensors"),
        lambda: NeuralRanker.load("."),
        lambda: NeuralRanker.load("saved.safetensors"),
        lambda: open_run(Path(".")),
        lambda: list(train_run(Path("."), epochs=9)),
        lambda: list(train_run(Path("new"), dataclasses.replace(CONFIG, train=Train(init=".")))),
    ):
        with pytest.raises(ValueError, match=r"evil:Tower|do not fit"):
            attempt()
    (tmp_path / "report.json").unlink()
    with pytest.raises(ValueError, match="evil:Tower"):
        list(train_run(Path(".")))
    assert "evil" not in sys.modules and not (tmp_path / "was-here").exists()


@pytest.mark.parametrize("given", [Tower, Tower(136)], ids=["class", "instance"])
def test_it_ranks_alone_and_with_others(run, given, tmp_path):
    ranker = rankgrad.load(run, "cpu", model=given)
    lists = Run.open(run, "cpu", given).read("synthetic:tiny")
    together = ranker.score_lists(lists)
    alone = ranker.score(lists.features[: lists.lengths[0]])
    np.testing.assert_allclose(together[: lists.lengths[0]], alone, atol=1e-5)
    values = ranker.evaluate(lists, ("ndcg@10",))["ndcg@10"]
    np.testing.assert_array_equal(values, read_per_query(run).metrics["ndcg@10"])
    other = trained(tmp_path / "mlp", dataclasses.replace(CONFIG, model=Model("linear")))
    both = Ensemble.open([run, other], [given])
    assert both.score(lists).shape == together.shape


def test_another_network_does_not_fit(run):
    for other in (Tower(7), lambda features: nn.Linear(features, 1)):
        with pytest.raises(ValueError, match=rf"weights in .*do not fit.*{NAME}"):
            rankgrad.load(run, "cpu", model=other)
    with pytest.raises(ValueError, match="Linear could not be made"):
        rankgrad.load(run, "cpu", model=nn.Linear)


def test_a_run_of_ours_takes_no_network(tmp_path):
    out = trained(tmp_path / "run", dataclasses.replace(CONFIG, model=Model("linear")))
    with pytest.raises(ValueError, match="linear, a network of rankgrad.*leave it out"):
        rankgrad.load(out, "cpu", model=Tower)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "scaling"), [("torch", "standard"), ("onnx", "auto")])
def test_it_is_exported_where_torch_can(form, scaling, tmp_path):
    """As a run that saw no missing value: every table of the graph that is then empty is written and read again."""
    pytest.importorskip("onnxruntime" if form == "onnx" else "torch")
    given = dataclasses.replace(CONFIG.train, epochs=1)
    config = dataclasses.replace(CONFIG, data=Data("synthetic:tiny", scaling=scaling), train=given)
    ranker = rankgrad.load(trained(tmp_path / "run", config, model=Tower), "cpu", model=Tower)
    assert not len(ranker.scaling.indicators)
    written = export_ranker(ranker, tmp_path / "tower", form)
    assert written["checked"]["largest"] <= 1e-5 and written["model"] == "Tower"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_torch_cannot_export_is_told(tmp_path):
    class Deciding(Tower):
        def forward(self, features, mask=None):
            scores = super().forward(features, mask)
            return scores if scores.mean().item() < 1e9 else 2 * scores

    ranker = rankgrad.load(trained(tmp_path / "run", model=Deciding), "cpu", model=Deciding)
    with pytest.raises(ValueError, match="cannot carry the model Deciding"):
        export_ranker(ranker, tmp_path / "x.pt2", "torch")
    assert not (tmp_path / "x.pt2").exists()


# --- what is missing is named -----------------------------------------------------------------------------------------


def network(forward, **attributes):
    """A network with one weight and a forward of its own."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    Network.forward = forward
    made = Network()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def scored(self, features, mask=None):
    return features @ self.weight


MISSING = {
    "no mask": (lambda self, features: features @ self.weight, "mask", "TypeError"),
    "mask=None": (lambda self, features, mask: (features @ self.weight).masked_fill(~mask, 0.0), "mask None"),
    "last dimension": (lambda self, features, mask: (features @ self.weight)[..., None], r"\[2, 3, 1\]", "squeeze"),
    "one per list": (lambda self, features, mask: (features @ self.weight).sum(-1), r"\[2\]", r"\[2, 3\]"),
    "a tuple": (lambda self, features, mask: (features @ self.weight, None), "tuple", "tensor"),
    "whole numbers": (lambda self, features, mask: (features @ self.weight).long(), "int64", "floating"),
    "detached": (lambda self, features, mask: (features @ self.weight).detach(), "gradient", "detach"),
    "not finite": (lambda self, features, mask: (features @ self.weight) / 0, "not finite"),
    "padding": (
        lambda self, features, mask: features @ self.weight + features.mean((1, 2))[:, None],
        "padding",
        "mask",
    ),
    "random": (lambda self, features, mask: features @ self.weight * torch.rand(1), "eval mode|padding"),
    "another width": (lambda self, features, mask: features[..., :3] @ self.weight, "4 features", "RuntimeError"),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_from_its_interface_is_named(case):
    forward, *words = MISSING[case]
    made = network(forward)
    with pytest.raises(ValueError, match=words[0]) as caught:
        check_network(made, 4, 1)
    assert "Network" in str(caught.value) and all(re.search(word, str(caught.value)) for word in words), caught.value
    check_network(network(scored), 4, 1)


def test_the_trial_leaves_no_trace():
    made = Tower(4).train()
    before, state = copy.deepcopy(made.state_dict()), torch.get_rng_state()
    check_network(made, 4, 1)
    assert made.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def test_a_state_that_is_no_tensor_is_refused():
    made = network(scored)
    type(made).get_extra_state = lambda self: {"code": print}
    type(made).set_extra_state = lambda self, state: None
    with pytest.raises(ValueError, match="_extra_state.*no tensor"):
        check_network(made, 4, 1)


def test_mistakes_are_told_before_data_are_read(tmp_path):
    options = dataclasses.replace(CONFIG, model=Model(options={"width": 3}))
    for config, own, words in (
        (CONFIG, "tower", "of type str.*nn.Module"),
        (CONFIG, 3, "of type int.*nn.Module"),
        (options, Tower(136), "model.options.*width.*made already"),
        (options, None, "model.options are for a network of your own"),
        (dataclasses.replace(CONFIG, members=Members(count=4)), Tower, "members.*members.count = 1"),
        (dataclasses.replace(CONFIG, model=Model(tanh=True)), Tower, "model.tanh.*your own"),
        (dataclasses.replace(CONFIG, model=Model(inputs="list")), Tower, "model.inputs.*your own"),
        (dataclasses.replace(CONFIG, model=Model("absent_module:Tower")), None, "no module absent_module"),
        (dataclasses.replace(CONFIG, model=Model(f"{__name__}:Absent")), None, "has no Absent"),
        (dataclasses.replace(CONFIG, model=Model("json:JSONDecoder")), None, "not a class of networks"),
        (dataclasses.replace(CONFIG, model=Model("x:a.<locals>.B")), None, "MODULE:CLASS"),
        (dataclasses.replace(CONFIG, model=Model(":")), None, "MODULE:CLASS"),
        (dataclasses.replace(CONFIG, model=Model(f"{__name__}:Tower", options={"depth": 3})), None, "depth"),
        (CONFIG, nn.LazyBatchNorm1d(), "cannot be copied.*class"),
        (CONFIG, lambda features: "network", "gave str.*nn.Module"),
        (CONFIG, nn.ReLU, "ReLU.*could not be made|parameters|gradient|fails"),
    ):
        with pytest.raises(ValueError, match=words):
            list(train_run(tmp_path / "run", config, model=own))
        assert not (tmp_path / "run").exists()


def test_on_a_gpu_its_steps_are_not_recorded_unless_asked_for():
    on_gpu = torch.device("cuda")
    assert "your own" in expectations(Tower(4), on_gpu)["graph"] and not expectations(MLP(4), on_gpu)["graph"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graph", ["auto", True])
def test_on_a_gpu_it_trains_and_scores_as_on_the_cpu(graph, tmp_path):
    train = dataclasses.replace(CONFIG.train, device="cuda", graph=graph, epochs=2)
    out = trained(tmp_path / "run", dataclasses.replace(CONFIG, train=train), model=Tower)
    assert read_report(out)["execution"]["graph"] is (graph is True)
    lists = Run.open(out, "cpu", Tower).read("synthetic:tiny")
    rows = lists.features[: lists.lengths[0]]
    on_cpu, on_gpu = (rankgrad.load(out, device, model=Tower) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(on_gpu.score_lists(lists), on_cpu.score_lists(lists), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(on_gpu.score(rows), on_cpu.score(rows), rtol=1e-3, atol=1e-4)


def test_validate_accepts_the_name():
    assert validate(dataclasses.replace(CONFIG, model=Model(NAME))).model.kind == NAME
    assert import_network(NAME).__name__ == "Tower"


# --- the estimator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Tower, Tower(5), NAME], ids=["class", "instance", "name"])
def test_the_estimator_takes_it(model, tmp_path):
    ranker = NeuralRanker(model=model, loss="softmax", epochs=3, random_state=0, device="cpu")
    assert clone(ranker).get_params()["epochs"] == 3
    fitted = clone(ranker).fit(X, Y, qid=QID)
    again = clone(ranker).fit(X, Y, qid=QID)
    scores = fitted.predict(X, qid=QID)
    np.testing.assert_array_equal(scores, again.predict(X, qid=QID))
    assert fitted.config_.model.kind == NAME and type(fitted.model_).__name__ == "Tower"
    with pytest.raises(ValueError, match="predict needs qid"):
        fitted.predict(X)
    fitted.save(tmp_path / "ranker.safetensors")
    with pytest.raises(ValueError, match="no code.*model=Tower"):
        NeuralRanker.load(tmp_path / "ranker.safetensors")
    for given in (Tower, Tower(5)):
        loaded = NeuralRanker.load(tmp_path / "ranker.safetensors", model=given)
        np.testing.assert_array_equal(loaded.predict(X, qid=QID), scores)
        np.testing.assert_array_equal(
            rankgrad.load(tmp_path / "ranker.safetensors", "cpu", model=given).score(X, np.full(10, 6)), scores
        )
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict(X, qid=QID), scores)
    np.testing.assert_array_equal(copy.deepcopy(fitted).predict(X, qid=QID), scores)


def test_a_file_cannot_make_a_copy_import_what_it_names(tmp_path):
    NeuralRanker(model="linear", epochs=1, device="cpu").fit(X, Y, qid=QID).save(tmp_path / "ranker.safetensors")
    tensors, facts = load_tensors(tmp_path / "ranker.safetensors")
    facts["parameters"]["model"] = "evil:Tower"  # which copying and pickling would import
    save_tensors(tmp_path / "ranker.safetensors", tensors, facts)
    with pytest.raises(ValueError, match="'evil:Tower'.*was it changed"):
        NeuralRanker.load(tmp_path / "ranker.safetensors")


def test_a_run_s_folder_becomes_an_estimator(run):
    with pytest.raises(ValueError, match="no code.*model=Tower"):
        NeuralRanker.load(run)
    ranker = NeuralRanker.load(run, model=Tower)
    rows = np.zeros((3, 136), np.float32)
    np.testing.assert_array_equal(
        ranker.predict(rows, qid=[1, 1, 1]), rankgrad.load(run, "cpu", model=Tower).score(rows)
    )


def test_missing_values_add_indicators_and_an_instance_of_another_width_is_told():
    holes = X.copy()
    holes[::7, 2] = np.nan
    fitted = NeuralRanker(model=Tower, epochs=1, random_state=0, device="cpu").fit(holes, Y, qid=QID)
    assert fitted.model_.first.in_features == 6
    with pytest.raises(ValueError, match="Tower fails.*6 features, indicators of missing values among them"):
        NeuralRanker(model=Tower(5), epochs=1, device="cpu").fit(holes, Y, qid=QID)


def test_the_estimator_refuses_what_it_cannot_do():
    for parameters, words in (
        ({"recipe": "strong"}, "members.*expected members = 1"),
        ({"tanh": True}, "tanh"),
        ({"share": True, "members": 4}, "members"),
    ):
        with pytest.raises(ValueError, match=words):
            NeuralRanker(model=Tower, **parameters).fit(X, Y, qid=QID)
    with pytest.raises(ValueError, match="of type int"):
        NeuralRanker(model=3).fit(X, Y, qid=QID)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capfd):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rankgrad", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capfd.readouterr()

    return call


@pytest.mark.slow
def test_the_command_line_imports_what_is_named_there_alone(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_networks.py").write_text(Path(__file__).read_text().split("def make")[0].replace("__name__", "'x'"))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as an installed command has it
    train = ("train", "synthetic:tiny", "--model", "my_networks:Tower", "--loss", "softmax", "--epochs", 1, "--quiet")
    assert command(*train, "--out", "a") == (0, "", "")
    config = Path("a/config.toml").read_text()
    assert 'kind = "my_networks:Tower"' in config
    code, out, err = command("evaluate", "a", "synthetic:tiny")
    assert code == 2 and "no code" in err and "--model my_networks:Tower" in err
    code, out, err = command("evaluate", "a", "synthetic:tiny", "--model", "my_networks:Tower")
    assert (code, err) == (0, "") and "ndcg@10" in out
    code, scores, err = command("rank", "a", "synthetic:tiny", "--model", "my_networks:Tower")
    assert (code, err) == (0, "") and len(scores.splitlines()) > 9
    code, _, err = command("train", "--resume", "a", "--epochs", 2, "--quiet")
    assert code == 2 and "--model my_networks:Tower" in err
    assert command("train", "--resume", "a", "--epochs", 2, "--model", "my_networks:Tower", "--quiet") == (0, "", "")
    assert command("train", "a/config.toml", "--epochs", 1, "--quiet", "--out", "b") == (0, "", "")
    assert command("compare", "a", "b")[0] == 0 and command("report", "a", "b", "--out", "page.html")[0] == 0
    code, _, err = command("rank", "a", "synthetic:tiny", "--model", "absent:Tower")
    assert code == 2 and "no module absent" in err
