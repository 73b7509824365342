"""What the tests of `rankgrad reproduce` share: the command called in this process, and lists in text files."""

import sys

import numpy as np
import pytest

from rankgrad.cli import main
from rankgrad.data.synthetic import synthetic


@pytest.fixture
def call(monkeypatch, capfd):
    """`rankgrad reproduce ...`: exit code, stdout, stderr."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["rankgrad", "reproduce", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capfd.readouterr()

    return called


@pytest.fixture(scope="session")
def write_letor():
    """A function that writes splits of made-up lists as text, with all features or the first few."""

    def written(folder, splits=("train", "vali", "test"), features=None):
        folder.mkdir(parents=True)
        for split in splits:
            data = synthetic("tiny", split)
            query = np.repeat(data.query_ids, data.lengths)
            width = features or data.features.shape[1]
            lines = (
                f"{int(y)} qid:{q} {' '.join(f'{i}:{v:.6g}' for i, v in enumerate(x[:width], 1))}\n"
                for y, q, x in zip(data.labels, query, data.features)
            )
            (folder / f"{split}.txt").write_text("".join(lines))

    return written
