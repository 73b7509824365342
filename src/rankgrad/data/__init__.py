"""From files to lists to batches.

In the order data flows: svmlight/ and tables/ read files, load finds them by name, grouping and dataset make lists of rows,
folder keeps them on disk, catalogue and prepare know public datasets, synthetic makes lists up; scaling fits features; order,
batches and packed deal lists out to training steps.
"""

from rankgrad.data.batches import Batch, Batches, batches
from rankgrad.data.catalogue import CATALOGUE, recognise
from rankgrad.data.dataset import Description, RankingDataset
from rankgrad.data.load import read_lists, read_splits
from rankgrad.data.prepare import prepare
from rankgrad.data.scaling import Scaling, fit_scaling
from rankgrad.data.svmlight.reader import read_svmlight
from rankgrad.data.synthetic import synthetic
from rankgrad.data.tables.reader import read_table

__all__ = [
    "CATALOGUE",
    "Batch",
    "Batches",
    "Description",
    "RankingDataset",
    "Scaling",
    "batches",
    "fit_scaling",
    "prepare",
    "read_lists",
    "read_splits",
    "read_svmlight",
    "read_table",
    "recognise",
    "synthetic",
]
