"""The common base of file and tabular datasets (`azureml.data.abstract_dataset`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.abstract_dataset.abstractdataset
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from paceline.compat.azureml.data.data_reference import DatasetConsumptionConfig
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.data import AnyDataset, DataReference, path_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AbstractDataset"]

D = TypeVar("D", bound="AbstractDataset")


class AbstractDataset(AnyDataset):
    """A dataset whose inputs are DatasetConsumptionConfigs."""

    @classmethod
    def of(cls: type[D], native: AnyDataset) -> D:
        """Return Paceline's dataset with the SDK's methods."""
        return cls(**{field.name: getattr(native, field.name) for field in dataclasses.fields(native)})

    def as_named_input(self, name: str) -> DatasetConsumptionConfig:  # type: ignore[override]
        """Return the dataset as an input of this name.

        `.as_mount()` and `.as_download()` turn it into a folder.
        """
        return DatasetConsumptionConfig(name, self)

    def as_mount(self, path_on_compute: str | None = None) -> DatasetConsumptionConfig:  # type: ignore[override]
        """Return the dataset's files as a folder."""
        return self.as_named_input(self._input_name()).as_mount(path_on_compute)

    def as_download(self, path_on_compute: str | None = None) -> DatasetConsumptionConfig:  # type: ignore[override]
        """Return the dataset's files as a copy on each node."""
        return self.as_named_input(self._input_name()).as_download(path_on_compute)

    def as_reference(self) -> DataReference:
        """Return the reference for the dataset as a script argument."""
        return self.as_mount().as_reference()

    def native_input(self, name: str) -> DataReference:
        """Return the reference through which a run receives the dataset itself."""
        return super().as_named_input(name)

    @property
    def partition_keys(self) -> list[str]:
        """The names of the partition_format, or the columns of partition_by."""
        reading = self._reading() or {}
        if form := reading.get("partition_format"):
            return [*re.compile(path_pattern(form)[0]).groupindex]
        return [*reading.get("partition_keys", ())]

    def checked_keys(self, keys: str | Sequence[str] | None) -> list[str]:
        """Return the keys, by default all partition keys.

        Raises:
            UserErrorException: A name is not a partition key.
        """
        own = self.partition_keys
        found = own if keys is None else [keys] if isinstance(keys, str) else [*keys]
        if unknown := [key for key in found if key not in own]:
            raise UserErrorException(f"the dataset is not partitioned by {unknown[0]!r}; its partition_keys are {own}.")
        return found

    def add_tags(self: D, tags: Mapping[str, str] | None = None) -> D:
        """Add tags to the registered dataset, and return it."""
        return self.update(tags={**self.tags, **(tags or {})})

    def remove_tags(self: D, tags: list[str] | None = None) -> D:
        """Remove tags from the registered dataset, and return it."""
        return self.update(tags={name: value for name, value in self.tags.items() if name not in (tags or ())})

    def _input_name(self) -> str:
        # Derive the name from a registered dataset's id, otherwise from its definition.
        own = self.id.replace("-", "")[:8] if self.id else super()._input_name().rpartition("_")[2]
        return f"input__{own}"
