"""Datastores, datasets, and their distribution over ranks.

This package exports the public names. Most are imported on first use.
"""

from __future__ import annotations

# Import the function `partition` now: importing its module of the same name later would replace the function here.
from paceline.data.sampling.partition import partition
from paceline.system.lazy_import import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.data.datasets.base import AnyDataset
    from paceline.data.datasets.dataset import Dataset, FileDataset, TabularDataset
    from paceline.data.datasets.read import path_parts, path_pattern
    from paceline.data.datasets.sources import local_files
    from paceline.data.datasets.steps import Step
    from paceline.data.sampling.order import GlobalOrder
    from paceline.data.sampling.partition import split_by_size
    from paceline.data.sampling.sampler import DistributedSampler
    from paceline.data.sampling.tensorflow import tensorflow_dataset
    from paceline.data.stores.datastore import Datastore
    from paceline.job.data_reference import MODEL_LOCATION, PATH_VARIABLES, DataReference, Source

_HOMES = {
    "paceline.data.datasets.base": ("AnyDataset",),
    "paceline.data.datasets.read": ("path_parts", "path_pattern"),
    "paceline.data.datasets.sources": ("local_files",),
    "paceline.data.datasets.steps": ("Step",),
    "paceline.data.datasets.dataset": ("Dataset", "FileDataset", "TabularDataset"),
    "paceline.data.stores.datastore": ("Datastore",),
    "paceline.data.sampling.order": ("GlobalOrder",),
    "paceline.data.sampling.partition": ("split_by_size",),
    "paceline.job.data_reference": ("MODEL_LOCATION", "PATH_VARIABLES", "DataReference", "Source"),
    "paceline.data.sampling.sampler": ("DistributedSampler",),
    "paceline.data.sampling.tensorflow": ("tensorflow_dataset",),
}

__all__ = [
    "MODEL_LOCATION",
    "PATH_VARIABLES",
    "AnyDataset",
    "DataReference",
    "Dataset",
    "Datastore",
    "DistributedSampler",
    "FileDataset",
    "GlobalOrder",
    "Source",
    "Step",
    "TabularDataset",
    "local_files",
    "partition",
    "path_parts",
    "path_pattern",
    "split_by_size",
    "tensorflow_dataset",
]

__getattr__ = face(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
