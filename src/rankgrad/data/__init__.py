"""From files to lists to batches.

In the order data flows: svmlight/ and tables/ read files, grouping and dataset make lists of their rows, folder saves
them, catalogue and prepare know public datasets, synthetic generates lists, write makes files of lists, load finds all of
these by name; scaling transforms features, feature_rows does so only when rows are asked for, where memory (memory) is too
small for a copy; order plans an epoch, batches and packed are its steps with and without padding, prefetch makes them ahead
of time.
"""

from rankgrad.data.batches import Batch, Batches, batches
from rankgrad.data.catalogue import CATALOGUE, recognise
from rankgrad.data.dataset import Description, RankingDataset
from rankgrad.data.load import Columns, read_lists, read_splits
from rankgrad.data.prepare import prepare
from rankgrad.data.scaling import Scaling, fit_scaling
from rankgrad.data.svmlight.reader import read_svmlight
from rankgrad.data.synthetic import synthetic
from rankgrad.data.tables.reader import read_table

__all__ = [
    "CATALOGUE",
    "Batch",
    "Batches",
    "Columns",
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
