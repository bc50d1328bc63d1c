"""`azureml.data.dataset_type_definitions`: the treatment of header lines."""

from __future__ import annotations

import enum

__all__ = ["PromoteHeadersBehavior"]


class PromoteHeadersBehavior(enum.Enum):
    """Values for `header=` of `Dataset.Tabular.from_delimited_files`.

    NO_HEADERS means False; all others mean True.
    """

    NO_HEADERS = 0
    ONLY_FIRST_FILE_HAS_HEADERS = 1
    COMBINE_ALL_FILES_HEADERS = 2
    ALL_FILES_HAVE_SAME_HEADERS = 3
