"""Exported rankers score as the rankers do, whatever they are made of; a file that does not is not left behind."""

import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from export_cases import KINDS, lists, ranker_of

import rankgrad
from rankgrad.export import FORMATS, export_ranker, read_export
from rankgrad.export.check import LISTS, agreement, difficult_lists, own_scores
from rankgrad.export.graph import ScoringGraph
from rankgrad.export.onnx import onnx_scores
from rankgrad.export.program import program_scores
from rankgrad.export.solr import solr_model, solr_scores

FIXTURES = Path(__file__).parents[1] / "fixtures" / "b0f1ce3"
SCALINGS = ("quantile", "auto", "symlog", "standard", "none")
LOSSES = ("rmse", "neural_ndcg@5", "ordinal")
BRANDS = ("blue", "red", "acme")
NAMES = ("price", "größe", "clicks", "constant", "e", "f", "g")


def graph_scores(ranker):
    graph = ScoringGraph(ranker)

    def scores(features, sizes):
        with torch.no_grad():
            return graph(torch.from_numpy(features), torch.from_numpy(np.asarray(sizes))).numpy()

    return scores


def cases():
    """Every kind of model with every scaling and, in turn, every loss family and kind of inputs."""
    losses, inputs = itertools.cycle(LOSSES), itertools.cycle(("features", "list", "features", "pieces"))
    for kind, scaling in itertools.product(KINDS, SCALINGS):
        loss = next(losses)
        yield kind, "softmax" if loss == "ordinal" and "+" in kind else loss, scaling, next(inputs)


@pytest.mark.parametrize(("kind", "loss", "scaling", "inputs"), [*cases()])
def test_the_graph_scores_as_the_ranker(kind, loss, scaling, inputs):
    ranker = ranker_of(kind, loss, scaling, inputs)
    assert len(ranker.scaling.indicators) > 3
    found = agreement(ranker, graph_scores(ranker))
    assert found.lists == LISTS and found.documents > 4_000 and found.largest <= 1e-5


def test_the_lists_are_what_they_are_said_to_be():
    parts = [part for rows, sizes in difficult_lists(ranker_of()) for part in np.split(rows, np.cumsum(sizes)[:-1])]
    assert len(parts) == LISTS and {1, 1_000} <= {len(part) for part in parts}
    assert any(np.isnan(part).any() for part in parts) and any((part > 1e38).any() for part in parts)
    assert any(len(part) > 1 and np.array_equal(part, part[:1].repeat(len(part), 0)) for part in parts)
    assert all((np.abs(rows) < 1e30).all() for rows, _ in difficult_lists(ranker_of(), missing=False))


@pytest.mark.parametrize("kind", KINDS)
def test_categories_are_inside(kind):
    ranker = ranker_of(kind, inputs="list", data=lists(names=NAMES, brands=BRANDS))
    assert ranker.scaling.levels == {6: tuple(sorted(BRANDS))}
    assert agreement(ranker, graph_scores(ranker)).documents > 4_000
    known, scores = lists(seed=2).features[:5], graph_scores(ranker)
    known[:, 6] = [0, 1, 2, -1, np.nan]
    frame = pandas.DataFrame(known[:, :6], columns=NAMES[:6]).assign(g=[*sorted(BRANDS), "other", None])
    np.testing.assert_allclose(scores(known, [5]), ranker.score(frame), atol=1e-6)
    known[3, 6] = 77  # any number that is no level's
    np.testing.assert_allclose(scores(known, [5]), ranker.score(frame), atol=1e-6)


def test_a_network_of_ones_own_is_exported_where_torch_can(tmp_path):
    class Tower(torch.nn.Module):
        def __init__(self, features):
            super().__init__()
            self.layer = torch.nn.Linear(features, 1)

        def forward(self, features, mask):
            return self.layer(features).squeeze(-1).sigmoid()

    ranker = ranker_of("linear")
    ranker = dataclasses.replace(ranker, model=Tower(ranker.scaling.inputs).eval())
    assert export_ranker(ranker, tmp_path / "x.pt2", "torch")["model"] == "Tower"


@pytest.mark.parametrize("kind", ["mlp", "transformer", "mlp+members"])
def test_any_number_of_lists_and_documents_and_sizes_that_do_not_fit(kind):
    ranker = ranker_of(kind, inputs="list")
    scores, rows = graph_scores(ranker), lists().features
    for sizes in ([1], [5], [1, 1, 1], [0, 3, 0, 4, 0], [0]):
        some = rows[: sum(sizes)]
        np.testing.assert_allclose(scores(some, sizes), ranker.score(some, sizes), atol=1e-6)
    for sizes in ([3, 3], [8], [-1, 8], [2**40], [7, 0, 1]):
        assert np.isnan(scores(rows[:7], sizes)).all()


def test_the_ranker_is_left_as_it_was():
    ranker = ranker_of("mlp")
    before = {name: tensor.clone() for name, tensor in ranker.model.state_dict().items()}
    agreement(ranker, graph_scores(ranker))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in ranker.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in ranker.model.state_dict().items())


def test_scores_that_differ_or_stand_in_another_order_are_refused():
    ranker = ranker_of("mlp")
    good = graph_scores(ranker)
    with pytest.raises(ValueError, match="scores a document .* and the ranker .*at most 1e-05"):
        agreement(ranker, lambda x, sizes: good(x, sizes) + 3e-5)
    with pytest.raises(ValueError, match="scores a document nan"):
        agreement(ranker, lambda x, sizes: np.where(np.isnan(x).any(1), np.nan, good(x, sizes)))
    with pytest.raises(ValueError, match="expected one each"):
        agreement(ranker, lambda x, sizes: good(x, sizes)[:-1])

    def swapped(x, sizes):  # each within the tolerance, both together not
        scores = good(x, sizes).astype(np.float64)
        own = ranker.score(x, sizes)
        for rows in np.split(np.arange(len(x)), np.cumsum(sizes)[:-1]):
            order = rows[np.argsort(-own[rows], kind="stable")]
            for a, b in itertools.pairwise(order):
                if 1e-6 < own[a] - own[b] < 8e-6:
                    scores[a] -= 9.5e-6
                    scores[b] += 9.5e-6
                    return scores
        return scores

    with pytest.raises(ValueError, match="orders documents differently"):
        agreement(ranker, swapped)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """One ranker as ONNX and as a torch program."""
    folder = tmp_path_factory.mktemp("exported")
    ranker = ranker_of("mlp+members", "neural_ndcg@5", "standard", "pieces", lists(names=NAMES, brands=BRANDS))
    facts = {form: export_ranker(ranker, folder / f"ranker{FORMATS[form].suffix}", form) for form in ("onnx", "torch")}
    return ranker, folder, facts


@pytest.mark.slow
def test_a_file_holds_its_facts_and_scores_without_rankgrad(exported, tmp_path):
    ranker, folder, facts = exported
    assert sorted(path.name for path in folder.iterdir()) == ["ranker.onnx", "ranker.pt2"]
    for form, suffix in (("onnx", ".onnx"), ("torch", ".pt2")):
        assert facts[form]["checked"]["lists"] == LISTS and facts[form]["bytes"] > 10_000
        found = read_export(folder / f"ranker{suffix}")
        assert found["feature_names"] == list(NAMES) and found["features"] == 7 and len(found["checksum"]) == 64
        assert (found["model"], found["loss"], found["scaling"]) == ("AveragedMembers", "neural_ndcg@5", "standard")
        assert found["categories"] == {"g": sorted(BRANDS)}
        assert {"rankgrad", "torch"} <= set(found["versions"]) and found["ranker"] == facts["onnx"]["ranker"]
    assert read_export(folder / "ranker.onnx")["opset"] == 18
    rows, sizes = lists(seed=1, brands=BRANDS).features, lists(seed=1).lengths
    np.save(tmp_path / "rows.npy", rows)
    code = (
        "import sys, numpy, onnxruntime\n"
        f"session = onnxruntime.InferenceSession({str(folder / 'ranker.onnx')!r})\n"
        "print([(i.name, i.shape, i.type) for i in session.get_inputs()], sorted(session.get_modelmeta().custom_metadata_map))\n"
        f"rows, sizes = numpy.load({str(tmp_path / 'rows.npy')!r}), numpy.array({sizes.tolist()})\n"
        f"numpy.save({str(tmp_path / 'scores.npy')!r}, session.run(None, dict(features=rows, sizes=sizes))[0])\n"
        "assert 'torch' not in sys.modules and 'rankgrad' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "('features', ['documents', 7], 'tensor(float)'), ('sizes', ['lists'], 'tensor(int64)')" in done.stdout
    assert "'rankgrad', 'rankgrad.sha256'" in done.stdout
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), own_scores(ranker, rows, sizes), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_files_of_both_formats_take_any_lists(exported):
    ranker, folder, _ = exported
    rows = lists(brands=BRANDS).features
    for scores in (onnx_scores(folder / "ranker.onnx"), program_scores(folder / "ranker.pt2")):
        for sizes in ([1], [6], [1, 1], [0, 3, 0, 4, 0]):
            some, real = rows[: sum(sizes)], [size for size in sizes if size]
            np.testing.assert_allclose(scores(some, sizes), own_scores(ranker, some, real), atol=1e-5)
        assert scores(rows[:0], [0]).shape == (0,)
        assert np.isnan(scores(rows[:5], [4])).all()


@pytest.mark.parametrize("facts", ["[" * 100_000, "[]", "no JSON", None])
def test_forged_facts_are_refused_by_name(tmp_path, facts):
    onnx = pytest.importorskip("onnx")
    path, model = tmp_path / "mine.onnx", onnx.ModelProto()
    entries = {"rankgrad.sha256": "0" * 64} | ({} if facts is None else {"rankgrad": facts})
    for key, value in entries.items():
        model.metadata_props.add(key=key, value=value)
    content = model.SerializeToString()
    path.write_bytes(content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode()))
    with pytest.raises(ValueError, match=r"mine.onnx is cut short, damaged.*export it again"):
        read_export(path)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_damaged_file_is_refused_by_name(exported, tmp_path, suffix):
    content = (exported[1] / f"ranker{suffix}").read_bytes()
    path = tmp_path / f"mine{suffix}"
    middle = len(content) // 2
    for damaged in (
        content[:-40],
        content[:middle],
        b"",
        content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
        b"hello" * 100,
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"mine{suffix} is cut short, damaged.*export it again"):
            read_export(path)
    path.write_bytes(content)
    assert read_export(path)["features"] == 7
    with pytest.raises(ValueError, match="absent.onnx does not exist"):
        read_export(tmp_path / "absent.onnx")
    (tmp_path / "x.txt").touch()
    with pytest.raises(ValueError, match=r"x.txt is neither .onnx nor .pt2"):
        read_export(tmp_path / "x.txt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*train.compile")
@pytest.mark.parametrize("name", ["finished", "ordinal"])  # a Transformer; quantiles and many units
def test_what_an_earlier_commit_trained_is_exported(tmp_path, name):
    ranker = rankgrad.load(FIXTURES / name, "cpu")
    done = export_ranker(ranker, tmp_path / "x.onnx")
    assert done["checked"]["largest"] <= 1e-5 and (tmp_path / "x.onnx").stat().st_size == done["bytes"]


@pytest.mark.filterwarnings("ignore:.*train.compile")
def test_what_an_earlier_commit_saved_scores_the_same():
    ranker = rankgrad.load(FIXTURES / "ranker.safetensors", "cpu")
    agreement(ranker, graph_scores(ranker))


def test_a_file_that_differs_is_not_left_behind_and_nothing_is_replaced_unasked(tmp_path, monkeypatch):
    ranker = ranker_of("linear", scaling="standard", data=lists(missing=0))
    wrong = FORMATS["solr"]._replace(scores=lambda path: lambda x, sizes: solr_scores(path)(x, sizes) + 1e-3)
    monkeypatch.setitem(FORMATS, "solr", wrong)
    with pytest.raises(ValueError, match="nothing was written"):
        export_ranker(ranker, tmp_path / "x.json", "solr")
    assert [*tmp_path.iterdir()] == []
    monkeypatch.undo()
    (tmp_path / "x.json").write_text("mine")
    with pytest.raises(ValueError, match=r"x.json exists already.*--overwrite"):
        export_ranker(ranker, tmp_path / "x.json", "solr")
    assert (tmp_path / "x.json").read_text() == "mine"
    export_ranker(ranker, tmp_path / "x.json", "solr", overwrite=True)
    assert json.loads((tmp_path / "x.json").read_text())["name"] == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    os.mkfifo(tmp_path / "pipe.json")  # as /dev/null: it would be replaced by a file
    with pytest.raises(ValueError, match=r"pipe.json exists already"):
        export_ranker(ranker, tmp_path / "pipe.json", "solr", overwrite=True)
    with pytest.raises(ValueError, match=r"absent is not a folder.*make it first"):
        export_ranker(ranker, tmp_path / "absent" / "x.json", "solr")
    with pytest.raises(ValueError, match=r"form must be one of .*'onnx'"):
        export_ranker(ranker, tmp_path / "x.pmml", "pmml")


def test_without_the_extra_the_install_line_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'rankgrad\[onnx\]'"):
        export_ranker(ranker_of("linear"), tmp_path / "x.onnx")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_is_named(tmp_path):
    ranker = ranker_of("linear")
    ranker.model.forward = types.MethodType(
        lambda self, x, mask: x.sum(-1) if float(x.sum()) > 0 else x[..., 0], ranker.model
    )
    with pytest.raises(ValueError, match="torch.export cannot carry the model Linear"):
        export_ranker(ranker, tmp_path / "x.pt2", "torch")
    assert [*tmp_path.iterdir()] == []


# --- Solr -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["standard", "none"])
@pytest.mark.parametrize(("kind", "loss"), [("mlp", "rmse"), ("mlp", "neural_ndcg@5"), ("linear", "ordinal")])
def test_solr_scores_as_the_ranker(tmp_path, kind, loss, scaling):
    ranker = ranker_of(kind, loss, scaling, data=lists(names=NAMES, missing=0))
    done = export_ranker(ranker, tmp_path / "shop.json", "solr")
    assert done["checked"]["documents"] > 5_000
    written = json.loads((tmp_path / "shop.json").read_text())
    assert written["class"] == "org.apache.solr.ltr.model.NeuralNetworkModel" and written["name"] == "shop"
    assert [feature["name"] for feature in written["features"]] == list(NAMES)
    row = np.nan_to_num(lists(seed=3).features[5], nan=1.0)
    x = [
        (value - float(f["norm"]["params"]["avg"])) / float(f["norm"]["params"]["std"]) if "norm" in f else value
        for value, f in zip(row.tolist(), written["features"])
    ]
    functions = {
        "relu": lambda v: max(v, 0.0),
        "tanh": np.tanh,
        "identity": float,
        "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    }
    for layer in written["params"]["layers"]:
        f = functions[layer["activation"]]
        x = [f(bias + sum(w * v for w, v in zip(line, x))) for line, bias in zip(layer["matrix"], layer["bias"])]
        assert all(isinstance(w, float) for line in layer["matrix"] for w in line)  # Solr casts them to Double
    assert x == pytest.approx(ranker.score(row[None])[:1].tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "scaling", "inputs", "reason"),
    [
        ("mlp", "quantile", "features", "scaling 'quantile'"),
        ("mlp", "auto", "features", "scaling 'auto'"),
        ("mlp", "standard", "list", "relative to the list"),
        ("transformer", "standard", "features", "Transformer"),
        ("mlp+members", "standard", "features", "AveragedMembers"),
        ("mlp+share", "standard", "features", "share weights"),
        ("mlp", "standard", "features", "indicators of missing values"),
        ("mlp", "standard", "features", "categories"),
    ],
)
def test_what_solr_has_no_form_for_is_refused_with_the_reason(tmp_path, kind, scaling, inputs, reason):
    brands = BRANDS if reason == "categories" else ()
    data = lists(brands=brands, missing=0.03 if reason.startswith("indicators") else 0)
    of_data = {
        "categories": "data.ignore",
        "indicators of missing values": "fill them",
    }  # what is distilled has them too
    with pytest.raises(ValueError, match=rf"{reason}.*{of_data.get(reason, 'rankgrad distil')}"):
        export_ranker(ranker_of(kind, "rmse", scaling, inputs, data), tmp_path / "x.json", "solr")
    assert [*tmp_path.iterdir()] == []


def test_columns_without_names_have_numbers_in_solr():
    assert [f["name"] for f in solr_model(ranker_of("linear", scaling="none", data=lists(missing=0)), "x")["features"]][
        :2
    ] == [
        "feature_1",
        "feature_2",
    ]
