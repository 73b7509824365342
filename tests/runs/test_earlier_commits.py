"""What commit b0f1ce3 wrote still opens, scores the same to the bit, and resumes to the same weights.

tests/fixtures/b0f1ce3 holds lists as text (data/) and prepared, two finished runs with the scores they gave, a run stopped after
epoch 2 of 4 with the weights it must end with, and a saved NeuralRanker with its predictions. The bits are those of one kind of
CPU and of one torch; elsewhere the same numbers are asked for to rounding.
"""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from rankgrad import NeuralRanker
from rankgrad.cli.rank import rank
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import read_lists, read_splits
from rankgrad.files import load_tensors
from rankgrad.ranker import Ranker
from rankgrad.runs.compare import compare_runs
from rankgrad.runs.ensemble import Ensemble
from rankgrad.runs.folder import read_history, read_per_query, read_report
from rankgrad.runs.run import Finished, Run, train_run
from rankgrad.training.config import configure
from rankgrad.training.evaluate import summarise

FIXTURE = Path(__file__).parents[1] / "fixtures" / "b0f1ce3"
WRITTEN_BY = json.loads((FIXTURE / "finished" / "report.json").read_text())
CPU = Path("/proc/cpuinfo")
SAME_BITS = (
    torch.__version__ == WRITTEN_BY["versions"]["torch"]
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and CPU.exists()
    and "GenuineIntel" in CPU.read_text()  # for others MKL, which multiplies torch's matrices, has other code
)
RUNS = ["finished", "ordinal"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A copy to work in: the configurations name their lists relative to it."""
    shutil.copytree(FIXTURE, tmp_path / "b0f1ce3")
    monkeypatch.chdir(tmp_path / "b0f1ce3")


def warned_once(function, *arguments):
    """What a function gives, after exactly one warning, about the key that is gone."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*arguments)
    (warning,) = caught
    assert "train.compile" in str(warning.message)
    return result


def assert_equal(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if SAME_BITS:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_ranks_the_same(name):
    warned_once(rank, [Path(name)], "data", "again.txt")
    expected = Path(f"{name}.scores.txt").read_text()
    if SAME_BITS:
        assert Path("again.txt").read_text() == expected
    numbers = [np.array(text.split(), np.float32) for text in (Path("again.txt").read_text(), expected)]
    assert_equal(*numbers)
    assert len(numbers[0]) == len(read_lists("data", split="test").labels)


@pytest.mark.parametrize("name", RUNS)
def test_its_report_history_and_values_per_query_are_read(name):
    report, kept = read_report(Path(name)), read_per_query(Path(name))
    assert report["versions"] == WRITTEN_BY["versions"] and report["epochs"] == 3 == len(read_history(Path(name)))
    test = read_lists("data", split="test")
    assert (kept.split, kept.query_ids) == ("test", test.query_ids.tolist())
    assert kept.documents.tolist() == test.lengths.tolist() and len(kept.curve) == 23
    assert summarise(kept.metrics) == report["metrics"]["test"]
    opened = warned_once(Run.open, Path(name))
    for metric, values in opened.evaluate(test).items():
        np.testing.assert_allclose(values, kept.metrics[metric], rtol=0, atol=0 if SAME_BITS else 1e-6)


def test_runs_are_compared_and_rank_together():
    found = compare_runs(Path("finished"), Path("ordinal"), "ndcg@10")
    assert found["queries"] == 5 and found["split"] == "test"
    with pytest.warns(UserWarning, match="train.compile") as caught:
        together = Ensemble.open([Path(name) for name in RUNS])
    assert len(caught) == len(RUNS)
    assert np.isfinite(together.score(together.read("data"))).all()


def test_prepared_data_is_the_text():
    text, prepared = read_splits("data"), read_splits("prepared")
    assert text.keys() == prepared.keys() == {"train", "vali", "test"}
    for name, split in text.items():
        opened = RankingDataset.open(Path("prepared") / name)
        for field in ("features", "labels", "offsets", "query_ids"):
            np.testing.assert_array_equal(getattr(prepared[name], field), getattr(split, field))
            np.testing.assert_array_equal(getattr(opened, field), getattr(split, field))


def test_an_interrupted_run_ends_in_the_same_weights():
    assert len(read_history(Path("interrupted"))) == 2
    *_, last = warned_once(list, train_run(Path("interrupted")))
    assert isinstance(last, Finished) and last.report["epochs"] == 4
    found, facts = load_tensors(Path("interrupted/model.safetensors"))
    expected, _ = load_tensors(Path("interrupted.model.safetensors"))
    assert found.keys() == expected.keys() and (facts["units"], facts["tanh"]) == (1, False)
    if SAME_BITS:
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    opened = warned_once(Run.open, Path("interrupted"))  # its config.toml is as it was
    lists = opened.read("data")
    ended = Ranker.load(Path("interrupted.model.safetensors"), config=opened.config).score_lists(lists)
    np.testing.assert_allclose(opened.score(lists) - ended, (opened.score(lists) - ended).mean(), atol=1e-3)


def test_a_saved_estimator_predicts_the_same():
    ranker = warned_once(NeuralRanker.load, "ranker.safetensors")
    with np.load("ranker.expected.npz") as expected:
        assert_equal(ranker.predict(expected["X"], qid=expected["qid"]), expected["scores"])
    assert ranker.loss == "lambdarank@5" and len(ranker.history_) == 3


def test_a_configuration_of_the_user_s_own_is_not_forgiven():
    shutil.copy("finished/config.toml", "mine.toml")
    with pytest.raises(ValueError, match=r"mine.toml.*unknown key 'compile' in \[train\]"):
        configure("mine.toml", {}, [])
