"""The common part of file and table datasets: sources, steps, a registered name, and the references that a run takes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from paceline.data.datasets import registered, steps
from paceline.data.datasets.registered import ContentCheck, compare
from paceline.data.datasets.sources import workspace_dir_of
from paceline.data.datasets.steps import Step, Steps
from paceline.errors import DataError
from paceline.job.data_reference import DataReference, Source

if TYPE_CHECKING:
    from paceline.data.transfer.listing import FileInfo

D = TypeVar("D", bound="AnyDataset")


# With eq, a hash would be made of all fields, and `tags`, a mapping, has none.
@dataclass(frozen=True, kw_only=True, eq=False)
class AnyDataset:
    """A reference to files, and what is taken of them. Made by `Dataset`; nothing is read before it is asked for.

    sources: where the files lie. steps: what is taken of them. workspace_dir: where the datastores among the sources are
    registered; None until that is known. name, version, id, description, tags, fingerprint: of a registered one.
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
    #: The options with which the files are read, beside the steps: of a table its "format", of files what their paths say.
    reading: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: "name:version" and fingerprint of the registered one that steps were taken of.
    origin: tuple[str, str | None] | None = field(default=None, repr=False)

    def take(self: D, count: int) -> D:
        """The first `count`; all, if there are fewer."""
        return self._with(steps.count_step("take", count))

    def skip(self: D, count: int) -> D:
        """All but the first `count`."""
        return self._with(steps.count_step("skip", count))

    def take_sample(self: D, probability: float, seed: int | None = None) -> D:
        """Each one by chance, with this probability. The same seed takes the same of the same data; without one, one is drawn."""
        return self._with(steps.sample_step(probability, seed))

    def random_split(self: D, percentage: float, seed: int | None = None) -> tuple[D, D]:
        """Two parts, each one in its order as before. percentage: the first one's share, between 0 and 1.

        The same seed splits the same data in the same way; without one, one is drawn and kept with the two parts.
        """
        first, second = steps.split_steps(percentage, seed)
        return self._with(first), self._with(second)

    def register(
        self: D,
        workspace: Any,
        name: str,
        description: str | None = None,
        tags: Mapping[str, str] | None = None,
        create_new_version: bool = False,
    ) -> D:
        """The same, as a version under this name in the workspace, with the fingerprint of its files as they are now.

        Registered again with the same files and steps as the latest version, it is that version.

        Raises:
            DataError: a wrong name, no files, or another dataset of this name and no create_new_version.
            TransferError: a store can't be read.
        """
        from paceline.data.datasets.content import content_fingerprint, with_content

        folder = workspace_dir_of(workspace)
        # A datastore's name means something in its own workspace alone.
        if self.workspace_dir not in (None, folder) and any(source.datastore for source in self.sources):
            raise DataError(
                f"the datastores of this dataset are of the workspace {str(self.workspace_dir)!r}, not of {str(folder)!r}. "
                "Register it there, or name datastores of this workspace."
            )
        registered.check_dataset_name(name)
        placed = replace(self, workspace_dir=folder)
        # Before `registered.add` takes the registry's lock: to hash large files may take minutes, in which others could
        # register nothing.
        files = with_content(placed.list_files(), folder)
        if not files:
            raise DataError(f"dataset {name!r} would have no files: there are none at {placed._where()}.")
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

    def unregister_all_versions(self) -> None:
        """Forget all versions of the name; the files stay where they are."""
        folder, name, _ = self._registered("unregister_all_versions()")
        registered.remove(folder, name)

    def check(self) -> ContentCheck:
        """The paths that were added, removed and changed since this version was registered; true if there are none.

        Raises:
            DataError: not registered. TransferError: a store can't be read.
        """
        from paceline.data.datasets.content import with_content

        folder, name, version = self._registered("check()")
        return compare(
            f"{name}:{version}",
            registered.files_then(folder, name, version),
            with_content(self._list_or_none(), folder),
        )

    def list_files(self) -> list[FileInfo]:
        """The files, sorted by path, as they lie in their stores now.

        Raises:
            DataError: no such store or place. TransferError: a store can't be read.
        """
        from paceline.data.transfer.listing import list_files

        return list_files(self.sources, self._workspace_dir())

    def as_named_input(self, name: str) -> DataReference:
        """An input of this dataset under a name, for a job's `inputs=` or arguments.

        The run finds it under `name` in `run.input_datasets`.

        `.as_mount()` and `.as_download()` of it give the script a folder's path instead of the dataset.
        """
        taken: dict[str, Any] = {"name": name, "sources": self._reference_sources(), "mode": "direct"}
        reading = self._reference_reading()
        if reading is not None:
            # As text, for a reference has plain fields alone and goes into the job's JSON.
            taken["table"] = json.dumps(reading, sort_keys=True)
        if self.name is not None:
            taken["dataset"], taken["fingerprint"] = f"{self.name}:{self.version}", self.fingerprint
        elif self.origin is not None:
            # A part of it: whose fingerprint is that of the whole only where all files are read.
            taken["dataset"] = self.origin[0]
            taken["fingerprint"] = self.origin[1] if self._reference_sources() == self.sources else None
        return DataReference(**taken)

    def as_reference(self) -> DataReference:
        """The reference that the dataset itself means as an argument or an input: its files in a folder, `as_mount`."""
        return self.as_mount()

    def as_mount(self) -> DataReference:
        """The files in a folder: the place itself where that is one of this machine, else a download."""
        return self.as_named_input(self._input_name()).as_mount()

    def as_download(self, path_on_compute: str | None = None) -> DataReference:
        """A copy of the files on each node."""
        return self.as_named_input(self._input_name()).as_download(path_on_compute)

    def as_partition(self, by: Literal["node", "rank"] = "node") -> DataReference:
        """A part of the files for each node, or each rank."""
        return self.as_named_input(self._input_name()).as_download().as_partition(by)

    def _with(self: D, step: Step) -> D:
        # What is taken of a registered dataset is another one.
        origin = self.origin if self.name is None else (f"{self.name}:{self.version}", self.fingerprint)
        nameless = replace(
            self, name=None, version=None, id=None, description=None, tags={}, fingerprint=None, origin=origin
        )
        return replace(nameless, steps=(*self.steps, step))

    def _of(self: D, record: registered.DatasetRecord) -> D:
        return replace(
            self,
            name=record.name,
            version=record.version,
            id=record.id,
            description=record.description,
            tags=dict(record.tags),
            fingerprint=record.fingerprint,
            origin=None,
        )

    def _reading(self) -> Mapping[str, Any] | None:
        """The options as they are kept; None where there are none."""
        return dict(self.reading) or None

    def _reference_sources(self) -> tuple[Source, ...]:
        return self.sources

    def _reference_reading(self) -> Mapping[str, Any] | None:
        return None

    def _input_name(self) -> str:
        if self.name is not None:
            cleaned = re.sub(r"[^A-Za-z0-9_]", "_", self.name)
            # Datasets may begin with a digit, inputs may not.
            return cleaned if cleaned[0].isalpha() else f"input_{cleaned}"
        text = repr([(source.datastore, source.path) for source in self.sources] + list(self.steps))
        # A hash, so that the same files taken in the same way have the same name in every run.
        return f"input_{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"

    def _list_or_none(self) -> Sequence[FileInfo]:
        """The files now; none where a place itself is gone."""
        from paceline.data.transfer.listing import list_files

        found: dict[tuple[str, str], FileInfo] = {}
        folder = self._workspace_dir()
        # One place after another: one that is gone must not hide what the others still have.
        for source in self.sources:
            try:
                for info in list_files([source], folder):
                    found[info.path, info.datastore or ""] = info
            except DataError:
                if source.datastore is not None:
                    list_files([Source(datastore=source.datastore)], folder)  # an unknown store is still an error
        return self._selected([found[key] for key in sorted(found)])

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


def fields_of(reference: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of the dataset of a direct input whose files lie at `path`. reference: `DataReference.to_json()`."""
    # "digits:3": no dataset's name has a colon.
    name, _, version = str(reference.get("dataset") or "").rpartition(":")
    return {
        "sources": (Source(path=os.path.abspath(path)),),
        "name": name or None,
        "version": int(version) if version else None,
        "fingerprint": reference.get("fingerprint"),
    }
