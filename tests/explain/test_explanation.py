"""Explanations of finished runs: what is written, what is chosen to be explained, and what is refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from rankgrad.data.dataset import RankingDataset
from rankgrad.explain import attributions, feature_importances
from rankgrad.explain.explanation import Explanation, Permuted, explain_runs, read_explanation
from rankgrad.runs.elsewhere import keep_scores
from rankgrad.runs.ensemble import Ensemble, open_run
from rankgrad.runs.folder import write_sealed
from rankgrad.runs.run import train_run
from rankgrad.training.config import Config, Data, Members, Model, Train

NAMES = ("bm25", "länge\x1b[31m", "<b>clicks</b>", "copy of bm25", "age")


def lists(queries, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, queries)
    x = rng.normal(size=(lengths.sum(), 5))
    x[:, 3] = np.exp(x[:, 0])
    labels = np.clip(np.rint(x[:, 0] + 0.5 * x[:, 2]), 0, 2)
    labels[: lengths[0]] = 0  # an empty query
    ids = [f"q{n}" for n in range(queries)]
    return RankingDataset(x, labels, np.concatenate([[0], np.cumsum(lengths)]), ids, feature_names=NAMES)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    for seed, (split, queries) in enumerate({"train": 40, "vali": 10, "test": 12}.items()):
        lists(queries, seed).save(folder / split)
    return str(folder)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    for seed, name in enumerate(("a", "b")):
        train = Train(epochs=4, batch_size=8, threads=1, device="cpu", seed=seed)
        model = Model(kind="mlp", hidden=(4,))
        list(train_run(folder / name, Config(data=Data(data), model=model, train=train)))
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    """Two finished runs to write into."""
    return [shutil.copytree(trained / name, tmp_path / name) for name in ("a", "b")]


def explained(folders, data, **options):
    *events, last = explain_runs(folders, data, **{"repeats": 1, **options})
    assert isinstance(last, Explanation)
    assert events == [Permuted(n, len(events)) for n in range(1, len(events) + 1)]
    return last


def test_a_run_keeps_what_the_functions_find(runs, data):
    found = explained(runs[:1], data, repeats=2, seed=3)
    assert read_explanation(runs[0]) == found
    run = open_run(runs[0], "cpu")
    test = run.read(data)
    for way in ("within", "across"):
        expected = {one.features: one for one in feature_importances(run, test, permute=way, repeats=2, seed=3)}
        assert {one.features: getattr(one, way) for one in found.features} == expected
        together = feature_importances(run, test, permute=way, repeats=2, seed=3, correlated=0.8)
        assert [getattr(one, way) for one in found.groups] == [one for one in together if len(one.features) > 1]
    assert [one.features for one in found.groups] == [("bm25", "copy of bm25")]
    losses = [one.within.loss for one in found.features]
    assert losses == sorted(losses, reverse=True)
    assert found.queries == (~np.isnan(run.evaluate(test)["ndcg@10"])).sum()
    values = run.evaluate(test)["ndcg@10"]
    assert (found.metric, found.value) == ("ndcg@10", pytest.approx(np.nanmean(values)))
    of_mean, of_pair = found.examples
    assert of_mean.query == of_pair.query == test.query_ids[np.nanargmin(values)]
    assert (of_mean.place, of_mean.against, of_mean.against_place) == (1, "", 0)
    one, other = int(of_pair.document) - 1, int(of_pair.against) - 1
    assert of_mean.attribution == attributions(run.ranker, test, one)
    assert of_pair.attribution == attributions(run.ranker, test, one, other)
    query = int(np.nanargmin(values))
    rows = range(test.offsets[query], test.offsets[query + 1])
    scores = run.score(test)
    assert one == max(rows, key=lambda row: scores[row])
    assert test.labels[other] == max(test.labels[row] for row in rows if row != one)


def test_the_query_and_documents_that_are_named_are_explained(runs, data):
    test = open_run(runs[0], "cpu").read(data)
    row = int(test.offsets[4])
    found = explained(runs[:1], data, query="q4", document=str(row + 2), above=str(row + 1)).examples
    assert [(one.query, one.document, one.against) for one in found] == [
        ("q4", str(row + 2), ""),
        ("q4", str(row + 2), str(row + 1)),
    ]
    assert explained(runs[:1], data, document=str(row + 2)).examples[0].query == "q4"
    assert explained(runs[:1], data, query="q0").examples[0].query == "q0"  # the empty one too
    for options, fact in (
        ({"query": "q99"}, "no query 'q99'"),
        ({"query": "q5", "document": str(row + 1)}, f"no document '{row + 1}'"),
        ({"document": "999"}, "no document '999'"),
        ({"document": str(row + 1), "above": "1"}, "query 'q4' has no document '1'"),
        ({"above": "1"}, "without --document"),
        ({"document": str(row + 1), "above": str(row + 1)}, "cannot be set against each other"),
    ):
        with pytest.raises(ValueError, match=fact):
            explained(runs[:1], data, **options)


def test_several_runs_are_explained_together_and_keep_nothing(runs, data):
    found = explained(runs, data)
    ensemble = Ensemble.open(runs)
    test = ensemble.read(data)
    expected = {one.features: one for one in feature_importances(ensemble, test, repeats=1)}
    assert {one.features: one.within for one in found.features} == expected
    scores = ensemble.score(test)
    for one in found.examples:
        assert one.attribution.score == pytest.approx(scores[int(one.document) - 1], abs=1e-5)
    assert read_explanation(runs[0]) is None


def test_trees_have_importances_and_no_attributions(runs, data, tmp_path):
    pytest.importorskip("lightgbm")
    from rankgrad.runs.trees import grow_run

    config = Config(
        data=Data(data), model=Model(kind="lightgbm"), members=Members(keep=1), train=Train(epochs=5, threads=1, seed=0)
    )
    config = dataclasses.replace(config, loss=dataclasses.replace(config.loss, name="native"))
    list(grow_run(tmp_path / "trees", config))
    found = explained([tmp_path / "trees"], data)
    assert len(found.features) == 5 and found.examples == () and "trees have no gradients" in found.note
    assert read_explanation(tmp_path / "trees") == found
    mixed = explained([runs[0], tmp_path / "trees"], data)
    assert mixed.examples == () and mixed.note
    with pytest.raises(ValueError, match="trees have no gradients.*--document"):
        explained([tmp_path / "trees"], data, query="q4")


def test_at_most_so_many_queries_are_permuted_those_that_count(runs, data):
    found = explained(runs[:1], data, queries=5)
    assert found.queries == 5
    assert explained(runs[:1], data, queries=5) == found
    assert explained(runs[:1], data, queries=5, seed=1).value != found.value


def test_an_explanation_goes_when_the_run_is_trained_further(runs, data):
    explained(runs[:1], data)
    list(train_run(runs[0], epochs=5))
    assert read_explanation(runs[0]) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"features": 3}', "null"])
def test_a_damaged_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "explanation.json").write_text(content)
    with pytest.raises(ValueError, match=r"explanation\.json is damaged.*explain the run again"):
        read_explanation(tmp_path)


def test_a_file_has_no_number_that_json_does_not_know(runs, data):
    found = explained(runs[:1], data)
    example = found.examples[0]
    missing = dataclasses.replace(example.attribution.contributions[0], value=float("nan"))
    odd = dataclasses.replace(example.attribution, contributions=(missing,))
    changed = dataclasses.replace(found, examples=(dataclasses.replace(example, attribution=odd),))
    write_sealed(runs[0], "explanation.json", dataclasses.asdict(changed))
    known = json.loads((runs[0] / "explanation.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert known["examples"][0]["attribution"]["contributions"][0]["value"] is None
    assert np.isnan(read_explanation(runs[0]).examples[0].attribution.contributions[0].value)


def test_what_is_no_run_is_refused(runs, data, tmp_path):
    test = lists(3, 1)
    keep_scores(tmp_path / "other", "other", np.arange(len(test.labels)), test, split="test")
    for folder, fact in ((tmp_path / "other", "no model"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(ValueError, match=fact):
            explained([folder], data)
    with pytest.raises(ValueError, match="queries must be"):
        explained(runs[:1], data, queries=0)
