"""Datastores, what a run takes from them and leaves there, and who gets which part of it.

The public names, loaded on first use.
"""

from __future__ import annotations

# At once, for it bears its module's name: Python would put the module in its place when that is first loaded.
from paceline.data.partition import partition
from paceline.lazy import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.data.dataset import Dataset, FileDataset, TabularDataset
    from paceline.data.datastore import Datastore
    from paceline.data.order import GlobalOrder
    from paceline.data.partition import split_by_size
    from paceline.data.reference import DataReference, Source
    from paceline.data.sampler import DistributedSampler
    from paceline.data.tensorflow import tensorflow_dataset

_HOMES = {
    "paceline.data.dataset": ("Dataset", "FileDataset", "TabularDataset"),
    "paceline.data.datastore": ("Datastore",),
    "paceline.data.order": ("GlobalOrder",),
    "paceline.data.partition": ("split_by_size",),
    "paceline.data.reference": ("DataReference", "Source"),
    "paceline.data.sampler": ("DistributedSampler",),
    "paceline.data.tensorflow": ("tensorflow_dataset",),
}

__all__ = [
    "DataReference",
    "Dataset",
    "Datastore",
    "DistributedSampler",
    "FileDataset",
    "GlobalOrder",
    "Source",
    "TabularDataset",
    "partition",
    "split_by_size",
    "tensorflow_dataset",
]

__getattr__ = face(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
