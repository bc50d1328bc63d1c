"""Translate the paths of a run's job for a machine that does not see the submitting machine's files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.data.stores.record import StoreRecord, write_record
from paceline.errors import TransferError
from paceline.job.data_reference import DataReference, Source
from paceline.job.environment import EnvironmentSpec
from paceline.remote.staging.packing import FOLDER, Manifest, place_in
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json

#: Name prefix of datastores that stand for file trees which were sent with the run. Only this run sees them.
_PREFIX = "carried-"


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """The files that were sent to this machine with a run, and their paths.

    stores_dir: The folder with the records of datastores: the run's folder if files were sent, otherwise the workspace.
    """

    manifest: Manifest
    workspace: Path
    stores_dir: Path

    def reference(self, reference: DataReference) -> DataReference:
        """Return an input with its files' paths on this machine, or an output unchanged."""
        if reference.is_output or not self.manifest.places:
            return reference
        sources = tuple(self._source(source) for source in reference.sources)
        mode = reference.mode
        if all(_is_tree(source) for source in sources):
            # A tree in the workspace is already a local, read-only copy, so mount it instead of copying it again.
            mode = "mount" if self.manifest.store is None else "download"
        return replace(reference, sources=sources, mode=mode)

    def is_carried(self, reference: DataReference) -> bool:
        """Return whether some files of an input were sent with the run."""
        return any(_is_tree(source) for source in self.reference(reference).sources)

    def goes_home(self, reference: DataReference) -> bool:
        """Return whether this is an output that the submitting machine will store."""
        return reference.is_output and reference.name in self.manifest.home

    def environment(self, environment: EnvironmentSpec) -> EnvironmentSpec:
        """Return the environment with the paths of its packages on this machine.

        Packages that were sent through a datastore are fetched first.
        """
        from paceline.environments.key import moved

        return moved(environment, self._path) if self.manifest.places else environment

    def linked(self) -> dict[str, Path | None]:
        """Return {path in the source folder: local path} of sent files outside the snapshot.

        The local path of an empty folder is None. Files that were sent through a datastore are fetched first.
        """
        found: dict[str, Path | None] = {}
        for path, (tree, name) in self.manifest.linked.items():
            if tree and self.manifest.store is not None:
                self._fetch(tree)
            found[path] = self._folder(tree) / name if tree else None
        return found

    def as_submitted(self, value: Any) -> Any:
        """Return JSON with this machine's paths replaced by the submitting machine's paths."""
        if isinstance(value, Mapping):
            return {name: self.as_submitted(one) for name, one in value.items()}
        # Exclude strings: each character of a string is a string, and so a sequence too, and the recursion would never end.
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self.as_submitted(one) for one in value]
        if isinstance(value, str):
            for path, (tree, name) in self.manifest.places.items():
                here = str(self._folder(tree) / name)
                # Paths also occur in URLs, where a space is %20.
                value = value.replace(here, path).replace(quote(here), quote(path))
        return value

    def _source(self, source: Source) -> Source:
        record, path = _place_of(source, self.manifest)
        if record is None or record.kind != "local":
            return source
        place = place_in(record, path)
        if place not in self.manifest.places:
            return source
        tree, name = self.manifest.places[place]
        return Source(datastore=f"{_PREFIX}{tree}", path=name)

    def _path(self, path: Path) -> Path:
        if str(path) not in self.manifest.places:
            return path
        tree, name = self.manifest.places[str(path)]
        if self.manifest.store is not None:
            self._fetch(tree)
        return self._folder(tree) / name

    def _folder(self, tree: str) -> Path:
        return self.workspace / FOLDER / tree

    def _fetch(self, tree: str) -> None:
        """Fetch a tree of files from a datastore, completely or not at all."""
        from paceline.data.stores.filesystem import Store
        from paceline.data.transfer.listing import list_source
        from paceline.data.transfer.transfer import download_files
        from paceline.remote.staging.packing import tree_name

        top = self._folder(tree)
        if top.is_dir():
            return
        # Let the temporary name include the pid, because two runs may fetch the same tree at the same time.
        beside = top.with_name(f".{top.name}.{os.getpid()}")
        try:
            with Store(tree_record(self.manifest, tree, self.workspace)) as store:
                infos = list_source(store, Source(datastore=f"{_PREFIX}{tree}", path=""), "")
                download_files(store, infos, beside, overwrite=True, progress=None)
                for name in self.manifest.programs.get(tree, ()):
                    if (beside / name).is_file():
                        (beside / name).chmod(0o755)
                files = {info.relative: beside / info.path for info in infos}
                # Check the content, because other users may write to the datastore, and the run imports or unpickles these files.
                if tree_name(files, self.workspace) != tree:
                    raise TransferError(
                        f"{store.title} has other files than were sent. Remove that folder, find out who has written to it, and "
                        "submit again."
                    )
            try:
                os.rename(beside, top)
            except OSError:
                if not top.is_dir():  # another run may have fetched the tree meanwhile, so that the rename fails
                    raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def as_here(folder: RunFolder) -> Arrived:
    """Return the files that were sent with a run, after recording their datastores."""
    told, workspace = read_json(folder.carried), folder.path.parent.parent
    if told is None:
        return Arrived(manifest=Manifest(), workspace=workspace, stores_dir=workspace)
    manifest = Manifest.from_json(told)
    # Write the records into the run's own folder: this workspace may have another datastore of the same name.
    for name in manifest.stores:
        write_record(folder.path, manifest.record(name))
    for tree in manifest.trees:
        write_record(folder.path, tree_record(manifest, tree, workspace))
    return Arrived(manifest=manifest, workspace=workspace, stores_dir=folder.path)


def tree_record(manifest: Manifest, tree: str, workspace: Path) -> StoreRecord:
    """Return the record of a datastore whose root is a folder of sent files."""
    name = f"{_PREFIX}{tree}"
    if manifest.store is None:
        return StoreRecord(name=name, url=str(workspace / FOLDER / tree))
    return StoreRecord.from_json(
        name, {**manifest.store, "url": f"{manifest.store['url'].rstrip('/')}/paceline/{FOLDER}/{tree}"}
    )


def _place_of(source: Source, manifest: Manifest) -> tuple[StoreRecord | None, str]:
    if source.datastore is None:
        path = source.path.removeprefix("file://")
        return (StoreRecord(name=None, url="/"), path) if path.startswith("/") else (None, path)
    return manifest.record(source.datastore), source.path


def _is_tree(source: Source) -> bool:
    return (source.datastore or "").startswith(_PREFIX)
