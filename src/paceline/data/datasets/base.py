"""The common base of file and table datasets."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from paceline.data.datasets import registered, steps
from paceline.data.datasets.registered import ContentCheck, compare
from paceline.data.datasets.sources import workspace_dir_of
from paceline.data.datasets.steps import Reading, Step, Steps
from paceline.errors import DataError
from paceline.job.data_reference import DataReference, Source

if TYPE_CHECKING:
    from paceline.data.transfer.listing import FileInfo

D = TypeVar("D", bound="AnyDataset")


# Generate no `__eq__`: the `__hash__` that comes with it would hash all fields, but the field `tags` is not hashable.
@dataclass(frozen=True, kw_only=True, eq=False)
class AnyDataset:
    """A dataset that reads its files when needed; `Dataset` creates it.

    Attributes:
        sources: The stores and paths of the files.
        steps: The selections of rows or files to apply in order, such as ("take", 100).
        workspace_dir: The folder of the workspace that has the datastores in `sources`, or None while unknown.
        name, version, id, description, tags, fingerprint: Values of a registered dataset; None or empty otherwise.
    """

    kind: ClassVar[str]

    sources: tuple[Source, ...]
    steps: Steps = ()
    workspace_dir: Path | None = field(default=None, repr=False)
    name: str | None = None
    version: int | None = None
    id: str | None = field(default=None, repr=False)
    description: str | None = field(default=None, repr=False)
    tags: Mapping[str, str] = field(default_factory=dict, repr=False)
    fingerprint: str | None = field(default=None, repr=False)
    #: How to read the files: the format and options of a table, or the partition_format of plain files.
    reading: Reading = field(default_factory=Reading, repr=False)
    #: Whether `sources` name the frozen copy of a registered version instead of the original files.
    is_frozen: bool = field(default=False, repr=False)
    #: "name:version" and fingerprint of the registered dataset from which this dataset selects files or rows.
    origin: tuple[str, str | None] | None = field(default=None, repr=False)

    @classmethod
    def from_folder(cls: type[D], reference: DataReference, path: str | os.PathLike[str]) -> D:
        """Create the dataset of a run's input (`reference`), whose files are at `path`."""
        # Dataset names contain no colon, so this splits "digits:3" into its name and version.
        name, _, version = (reference.dataset or "").rpartition(":")
        return cls(
            sources=(Source(path=os.path.abspath(path)),),
            name=name or None,
            version=int(version) if version else None,
            fingerprint=reference.fingerprint,
        )

    def take(self: D, count: int) -> D:
        """Return a dataset of at most the first `count` rows or files."""
        return self._with(steps.count_step("take", count))

    def skip(self: D, count: int) -> D:
        """Return a dataset without the first `count` rows or files."""
        return self._with(steps.count_step("skip", count))

    def take_sample(self: D, probability: float, seed: int | None = None) -> D:
        """Return a dataset that keeps each row or file with this probability.

        Equal seeds keep the same rows of equal data. Without a seed, Paceline draws one and stores it in the dataset.
        """
        return self._with(steps.sample_step(probability, seed))

    def random_split(self: D, percentage: float, seed: int | None = None) -> tuple[D, D]:
        """Split at random into two datasets that keep the original order.

        Equal seeds split equal data in the same way. Without a seed, Paceline draws one and stores it in both parts.

        Args:
            percentage: Share of the first part, between 0 and 1.
            seed: Seed of the split, or None.
        """
        first, second = steps.split_steps(percentage, seed)
        return self._with(first), self._with(second)

    def register(
        self: D,
        workspace: object,
        name: str,
        description: str | None = None,
        tags: Mapping[str, str] | None = None,
        create_new_version: bool = False,
    ) -> D:
        """Register this dataset as a version of `name`, and return the registered dataset.

        If the latest version has the same files and steps, return that version, unless create_new_version is True.

        Raises:
            DataError: The name is invalid, there are no files, or another dataset has this name and create_new_version is
                False.
            TransferError: A store can't be read.
        """
        from paceline.data.datasets.content import content_fingerprint, with_content

        folder = workspace_dir_of(workspace)
        # A datastore's name is unique only within its workspace, so refuse to register the dataset in another workspace.
        if self.workspace_dir not in (None, folder) and any(source.datastore for source in self.sources):
            raise DataError(
                f"the datastores of this dataset are of the workspace {str(self.workspace_dir)!r}, not of {str(folder)!r}. "
                "Register it there, or name datastores of this workspace."
            )
        registered.check_dataset_name(name)
        placed = replace(self, workspace_dir=folder)
        # Hash before `registered.add` takes the registry lock: large files take minutes.
        files = with_content(placed.list_files(), folder)
        if not files:
            raise DataError(f"dataset {name!r} needs files, but {placed._where()} has no file.")
        record = registered.DatasetRecord(
            name=name,
            kind=self.kind,
            sources=self.sources,
            reading=self._reading(),
            steps=self.steps,
            description=description,
            tags={str(tag): str(value) for tag, value in (tags or {}).items()},
            fingerprint=content_fingerprint(files),
        )
        return placed._of(registered.add(folder, record, files, create_new_version=create_new_version))

    def update(self: D, description: str | None = None, tags: Mapping[str, str] | None = None) -> D:
        """Set description and tags of this dataset version, and return the changed dataset.

        Args:
            description: New description; None keeps the current description.
            tags: New tags, which replace all current tags; None keeps the current tags.

        Raises:
            DataError: The dataset is not registered.
        """
        folder, name, version = self._registered("update()")
        changed = {str(key): str(value) for key, value in (self.tags if tags is None else tags).items()}
        record = registered.describe(folder, name, version, description, changed)
        return replace(self, description=record.description, tags=dict(record.tags))

    def freeze(self: D, target: str | None = None) -> D:
        """Copy this dataset version's files, so that changed originals do not change it.

        In a local folder, equal files are stored once. From now on, runs and `to_pandas_dataframe` read the copies, and
        Paceline refuses a run whose copies have changed. If this version is frozen already, only check its copies.

        Args:
            target: "STORE", "STORE:PATH", a URL or an absolute path; default: `frozen` in the default datastore.

        Raises:
            DataError: The dataset is not registered, its files have changed, or the copies would have another order.
            TransferError: A store can't be read or written.
        """
        from paceline.data.datasets.freeze import freeze

        folder, name, version = self._registered("freeze()")
        return self._of(freeze(folder, registered.load(folder, name, version), target))

    def unregister_all_versions(self) -> None:
        """Remove all versions of this dataset's name. The data files stay in place."""
        folder, name, _ = self._registered("unregister_all_versions()")
        registered.remove(folder, name)

    def check(self) -> ContentCheck:
        """Compare the dataset's current files with its files at registration.

        If the version is frozen, compare its frozen copies instead of the current files.

        Returns:
            The added, removed and changed paths. The result is true if there are no such paths.

        Raises:
            DataError: The dataset is not registered.
            TransferError: A store can't be read.
        """
        from paceline.data.datasets.content import with_content

        folder, name, version = self._registered("check()")
        if self.is_frozen:
            from paceline.data.datasets.freeze import check_frozen

            return check_frozen(folder, registered.load(folder, name, version))
        return compare(
            f"{name}:{version}",
            registered.files_then(folder, name, version),
            with_content(self._list_or_none(), folder),
        )

    def list_files(self) -> list[FileInfo]:
        """Return the dataset's current files in their stores, sorted by path.

        Raises:
            DataError: A datastore or path does not exist.
            TransferError: A store can't be read.
        """
        from paceline.data.transfer.listing import list_files

        return list_files(self.sources, self._workspace_dir())

    def as_named_input(self, name: str) -> DataReference:
        """Return a job's input that hands this dataset to the script.

        The script finds the dataset under `name` in `run.input_datasets`. Call `.as_mount()` or `.as_download()` on the input
        to give the script the path of a folder instead.
        """
        sources = self._reference_sources()
        dataset, fingerprint = self._identity or (None, None)
        return DataReference(
            name=name,
            sources=sources,
            mode="direct",
            dataset=dataset,
            # The fingerprint covers all files of this dataset, so leave it out for a reference to only some of the files.
            fingerprint=fingerprint if sources == self.sources or self.name is not None else None,
            table=self._reference_table(),
            frozen=self.is_frozen,
        )

    def as_reference(self) -> DataReference:
        """Return the dataset as a job's mounted input, the default for datasets."""
        return self.as_mount()

    def as_mount(self) -> DataReference:
        """Return a job's input that is read in place if possible, else downloaded."""
        return self.as_named_input(self._input_name()).as_mount()

    def as_download(self, path_on_compute: str | None = None) -> DataReference:
        """Return a job's input that is downloaded to each node."""
        return self.as_named_input(self._input_name()).as_download(path_on_compute)

    def as_partition(self, by: Literal["node", "rank"] = "node") -> DataReference:
        """Return a job's input whose files are divided among nodes or ranks (`by`)."""
        return self.as_named_input(self._input_name()).as_download().as_partition(by)

    def _with(self: D, step: Step) -> D:
        # Adding a step, such as a filter, to a registered dataset gives a new, unregistered dataset without a name.
        return replace(
            self,
            name=None,
            version=None,
            id=None,
            description=None,
            tags={},
            fingerprint=None,
            origin=self._identity,
            steps=(*self.steps, step),
        )

    @property
    def _identity(self) -> tuple[str, str | None] | None:
        return self.origin if self.name is None else (f"{self.name}:{self.version}", self.fingerprint)

    def _of(self: D, record: registered.DatasetRecord) -> D:
        return replace(
            self,
            name=record.name,
            version=record.version,
            id=record.id,
            description=record.description,
            tags=dict(record.tags),
            sources=record.sources if record.frozen is None else (record.frozen,),
            fingerprint=record.frozen_fingerprint or record.fingerprint,
            is_frozen=record.frozen is not None,
            origin=None,
        )

    def _reading(self) -> Reading | None:
        return self.reading or None

    def _reference_sources(self) -> tuple[Source, ...]:
        return self.sources

    def _reference_table(self) -> str | None:
        return None

    def _input_name(self) -> str:
        if self.name is not None:
            cleaned = re.sub(r"[^A-Za-z0-9_]", "_", self.name)
            # Dataset names may begin with a digit, but input names may not, so add a prefix.
            return cleaned if cleaned[0].isalpha() else f"input_{cleaned}"
        text = repr([(source.datastore, source.path) for source in self.sources] + list(self.steps))
        # Derive the name from a hash of files and steps, so that an unnamed dataset gets the same input name in every run.
        return f"input_{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"

    def _list_or_none(self) -> Sequence[FileInfo]:
        from paceline.data.transfer.listing import list_files

        files: dict[tuple[str, str], FileInfo] = {}
        folder = self._workspace_dir()
        # List each source separately: a missing folder must not hide the files of the other sources.
        for source in self.sources:
            try:
                for info in list_files([source], folder):
                    files[info.path, info.datastore or ""] = info
            except DataError:
                if source.datastore is not None:
                    list_files([Source(datastore=source.datastore)], folder)  # raises if the datastore is unknown
        return self._selected([files[key] for key in sorted(files)])

    def _selected(self, files: list[FileInfo]) -> list[FileInfo]:
        return files

    def _workspace_dir(self) -> Path:
        if self.workspace_dir is not None:
            return self.workspace_dir
        if named := sorted({source.datastore for source in self.sources if source.datastore is not None}):
            raise DataError(
                f"this dataset names the datastore {named[0]!r}, but not whose: give a Datastore instead of its name, or "
                "workspace=, or register the dataset first."
            )
        return Path()

    def _registered(self, what: str) -> tuple[Path, str, int]:
        if self.name is None or self.version is None or self.workspace_dir is None:
            raise DataError(f"{what} is for a registered dataset. Register it with register(workspace, name).")
        return self.workspace_dir, self.name, self.version

    def _where(self) -> str:
        return ", ".join(repr(f"{source.datastore or ''}:{source.path}".lstrip(":")) for source in self.sources)
