"""Every artefact opens at every door: a run's folder, a file of `Ranker.save`, a file of `NeuralRanker.save`."""

import subprocess
import sys

import numpy as np
import pytest

import rankgrad
from rankgrad import NeuralRanker
from rankgrad.data.synthetic import synthetic
from rankgrad.runs.compare import compare_runs, evaluate_runs
from rankgrad.runs.ensemble import Ensemble
from rankgrad.runs.run import train_run
from rankgrad.training.config import configure

LISTS = synthetic("tiny", "test")
QUERIES = np.repeat(np.arange(len(LISTS)), LISTS.lengths)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    """The same ranker as a run and as two files."""
    folder = tmp_path_factory.mktemp("artefacts")
    config = configure(
        "synthetic:tiny", {"train.epochs": 2, "members.count": 3, "train.device": "cpu"}, ["members.keep=2"]
    )
    *_, _ = train_run(folder / "run", config)
    rankgrad.load(folder / "run").save(folder / "ranker.safetensors")
    NeuralRanker.load(folder / "run").save(folder / "estimator.safetensors")
    return folder


FORMS = ["run", "ranker.safetensors", "estimator.safetensors"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_scores_the_same_through_load_and_the_command_line(artefacts, form):
    expected = rankgrad.load(artefacts / "run", "cpu").score_lists(LISTS)
    ranker = rankgrad.load(str(artefacts / form), "cpu")
    assert np.array_equal(ranker.score(LISTS.features, LISTS.lengths), expected)
    together = Ensemble.open([artefacts / form])
    assert np.array_equal(together.runs[0].score(LISTS), expected) and together.runs[0].folder == artefacts / form
    found = evaluate_runs([artefacts / form], "synthetic:tiny", "test", ["ndcg@10"])
    assert found["metrics"] == evaluate_runs([artefacts / "run"], "synthetic:tiny", "test", ["ndcg@10"])["metrics"]


@pytest.mark.parametrize("form", FORMS)
def test_where_a_ranker_comes_from_goes_with_it(artefacts, form):
    known = rankgrad.load(artefacts / form, "cpu").provenance
    assert (known["data"], known["seed"]) == ("synthetic:tiny", 0) and "softmax" in known["loss"]
    assert known["versions"]["rankgrad"] == rankgrad.__version__ and "torch" in known["versions"]
    assert {"commit", "machine"} <= set(known)


def test_a_ranker_without_its_report_still_loads(artefacts, tmp_path):
    for name in ("config.toml", "model.safetensors"):
        (tmp_path / name).write_bytes((artefacts / "run" / name).read_bytes())
    assert rankgrad.load(tmp_path, "cpu").provenance["versions"]["rankgrad"] == rankgrad.__version__
    (tmp_path / "report.json").write_text("{")
    with pytest.warns(UserWarning, match=r"report\.json is damaged.*without"):
        assert rankgrad.load(tmp_path, "cpu").features == 136


def test_the_estimator_opens_a_run_and_can_be_fitted_again(artefacts):
    ranker = NeuralRanker.load(artefacts / "run")
    expected = rankgrad.load(artefacts / "run", "cpu").score_lists(LISTS)
    assert np.array_equal(ranker.predict(LISTS.features, qid=QUERIES), expected)
    assert len(ranker.history_) == 2 and len(ranker.members_) == 3 and 0 < ranker.best_score_ <= 1
    assert 1 <= ranker.best_epoch_ <= 2 and ranker.n_features_in_ == 136
    parameters = ranker.get_params()
    assert (parameters["recipe"], parameters["members"], parameters["keep"]) == ("strong", 3, 2)
    model = ranker.config_.model
    assert (parameters["model"], parameters["hidden"], parameters["inputs"]) == (model.kind, model.hidden, model.inputs)
    assert (parameters["device"], parameters["random_state"], parameters["lr"]) == ("auto", 0, None)
    train = synthetic("tiny")
    rows = np.repeat(np.arange(len(train)), train.lengths)
    again = ranker.set_params(epochs=1, bag=2).fit(train.features, train.labels, qid=rows)
    assert again.config_.members.count == 3 and again.config_.loss.name == ranker.config_.loss.name


@pytest.mark.slow
def test_loading_needs_neither_scikit_learn_nor_the_training_loop(artefacts):
    code = (
        "import sys\n"
        "sys.modules['sklearn'] = None\n"
        "import rankgrad, numpy\n"
        f"for form in {FORMS}:\n"
        f"    ranker = rankgrad.load({str(artefacts)!r} + '/' + form, 'cpu')\n"
        "    assert ranker.score(numpy.zeros((3, 136)), sizes=[2, 1]).shape == (3,)\n"
        "found = {'rankgrad.training.loop', 'rankgrad.runs.run', 'rankgrad.estimator', 'numba', 'pickle5'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_results_are_asked_of_a_folder(artefacts):
    with pytest.raises(ValueError, match="ranker.safetensors is a file.*rankgrad evaluate"):
        compare_runs(artefacts / "run", artefacts / "ranker.safetensors", "ndcg@10")


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
@pytest.mark.parametrize("form", ["run/model.safetensors", "estimator.safetensors"])
def test_damage_is_one_sentence_that_names_the_file(artefacts, tmp_path, form, damage):
    content = (artefacts / form).read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "empty": b"",
        "text": b"weights",
    }[damage]
    path = tmp_path / "mine.safetensors"
    path.write_bytes(damaged)
    for door in (rankgrad.load, NeuralRanker.load):
        with pytest.raises(ValueError, match=r"mine\.safetensors (is cut short or damaged|was damaged)"):
            door(path)
