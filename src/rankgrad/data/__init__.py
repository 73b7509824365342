"""Room 1, data: from files to batches. Imports nothing else of rankgrad.

The names below are loaded on first use, so that importing this package costs neither torch nor numba nor
pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankgrad.data._published import CATALOGUE as CATALOGUE
    from rankgrad.data.batching import Batch as Batch
    from rankgrad.data.batching import Batches as Batches
    from rankgrad.data.batching import batches as batches
    from rankgrad.data.catalogue import prepare as prepare
    from rankgrad.data.catalogue import recognise as recognise
    from rankgrad.data.dataset import Description as Description
    from rankgrad.data.dataset import RankingDataset as RankingDataset
    from rankgrad.data.scaling import Scaling as Scaling
    from rankgrad.data.scaling import fit_scaling as fit_scaling
    from rankgrad.data.sources import read_lists as read_lists
    from rankgrad.data.sources import read_splits as read_splits
    from rankgrad.data.svmlight import read_svmlight as read_svmlight
    from rankgrad.data.synthesis import synthetic as synthetic
    from rankgrad.data.tables import read_table as read_table

_HOMES = {
    "Batch": "batching",
    "Batches": "batching",
    "batches": "batching",
    "CATALOGUE": "_published",
    "prepare": "catalogue",
    "recognise": "catalogue",
    "Description": "dataset",
    "RankingDataset": "dataset",
    "Scaling": "scaling",
    "fit_scaling": "scaling",
    "read_lists": "sources",
    "read_splits": "sources",
    "read_svmlight": "svmlight",
    "synthetic": "synthesis",
    "read_table": "tables",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
