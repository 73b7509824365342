"""Load, small: reliability/load.py tries the whole of it."""

import numpy as np
import torch
from reliability.promise import Tally

from rankgrad import NeuralRanker
from reliability import load


def test_every_loss_of_a_long_list_ends_with_a_gradient():
    found = load.run_losses(300, 0)
    assert found.failures == []


def test_fits_leave_nothing_behind():
    assert load.try_fits(8, 0).failures == []


def test_scores_from_threads_are_those_of_one():
    (x, y, qid), threads = load.some_lists(0), torch.get_num_threads()
    ranker, counted = NeuralRanker(model="mlp", epochs=1, random_state=0, verbose=0).fit(x, y, qid=qid), Tally()
    parts = [load.some_lists(1 + number) for number in range(8)]
    load.count_threads(counted, "predict", lambda x, qid: ranker.predict(x, qid=qid), parts, 2, threads)
    assert (counted.tried, counted.failures) == (17, [])


def test_a_list_of_one_and_a_long_one_train_together(tmp_path):
    for split in ("train", "vali", "test"):
        load.save_lists(tmp_path / "data" / split, np.array([1, 2_000, 20, 1]), 4, 0)
    model = ("--model", "mlp", "--epochs", 1, "--device", "cpu", "--quiet", "--out", tmp_path / "run")
    found = load.tried([("train", tmp_path / "data", *model), ("evaluate", tmp_path / "run", tmp_path / "data")])
    assert found.failures == []
