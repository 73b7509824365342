"""What commands import, imported once by the server that forks them; and the compiled reader, called once."""

import encodings.unicode_escape
import encodings.utf_8_sig  # noqa: F401 (a user who may not read Python's own folder needs them)
import gc
import tempfile
from pathlib import Path

import matplotlib.figure
import matplotlib.style  # noqa: F401
import torch
import torch._dynamo

import rankgrad.cli.distil
import rankgrad.explain.explanation
import rankgrad.export.write
import rankgrad.report.page
import rankgrad.reproduce.tables
import rankgrad.runs.distil  # noqa: F401
from rankgrad.data import read_svmlight

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "lists.txt").write_text("1 qid:1 1:2\n0 qid:1 1:3\n")
    read_svmlight(Path(folder) / "lists.txt")

# A run of training ends with a full collection: in every process forked it would read, and so copy, all that was loaded here.
gc.collect()
gc.freeze()
