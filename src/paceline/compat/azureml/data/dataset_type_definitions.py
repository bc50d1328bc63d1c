"""`azureml.data.dataset_type_definitions`: how the first lines of files are read."""

from __future__ import annotations

import enum

__all__ = ["PromoteHeadersBehavior"]


class PromoteHeadersBehavior(enum.Enum):
    """For `header=` of `Dataset.Tabular.from_delimited_files`: NO_HEADERS is False, each other one True."""

    NO_HEADERS = 0
    ONLY_FIRST_FILE_HAS_HEADERS = 1
    COMBINE_ALL_FILES_HEADERS = 2
    ALL_FILES_HAVE_SAME_HEADERS = 3
