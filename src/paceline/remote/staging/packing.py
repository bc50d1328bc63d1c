"""A job -> the trees of files of this machine that it needs elsewhere. Files are read to name them, and not copied."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.stores.names import clean_path
from paceline.data.stores.record import StoreRecord
from paceline.errors import EnvironmentSpecError, TransferError
from paceline.job.data_reference import DataReference, Source
from paceline.job.environment import EnvironmentSpec
from paceline.job.job import Job
from paceline.runs.folder import RunFolder
from paceline.runs.store import stored
from paceline.runs.work_dir import place
from paceline.system import linked
from paceline.system.files import read_json
from paceline.system.linked import NotCopied
from paceline.system.serialization import known_fields

if TYPE_CHECKING:
    from paceline.data.transfer.listing import FileInfo


#: Below a workspace, or below `paceline/` of a datastore.
FOLDER = "carried"


@dataclass(frozen=True, kw_only=True)
class Packed:
    """files: tree -> (relative name -> file), of trees that have to be brought."""

    manifest: Manifest
    files: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)

    def size(self, tree: str) -> tuple[int, int]:
        """(number of files, bytes in them)."""
        return len(self.files[tree]), sum(path.stat().st_size for path in self.files[tree].values())


def pack_run(folder: RunFolder, *, reached: str | None = None) -> Packed | None:
    """What the job of a run needs beside its snapshot; None where that is nothing. For the arguments and errors: `pack`."""
    job = stored(folder).job
    if job is None or not (job.inputs or job.environment.needs_build or any(_sent(folder))):
        return None
    return pack(job, folder, reached=reached)


def pack(job: Job, folder: RunFolder, *, reached: str | None = None) -> Packed:
    """What a job needs beside its snapshot.

    A run that has been brought itself, and now goes on to nodes of their own, hands on what came with it.
    reached: a datastore that both sides have, though it is a folder.

    Raises:
        DataError, EnvironmentSpecError: what the job names is not on this machine.
        TransferError: it can't be read.
    """
    workspace = folder.path.parent.parent
    # On a machine to which the run was brought the job's own paths mean nothing: what came with it is handed on.
    if (told := read_json(folder.carried)) is not None:
        manifest = Manifest.from_json(told)
        # Trees in a datastore are read from there by the next nodes, too, and need not be sent.
        trees = manifest.trees if manifest.store is None else []
        return Packed(manifest=manifest, files={tree: tree_files(workspace, tree) for tree in trees})
    packing = _Packing(workspace, reached)
    for reference in job.inputs:
        if reference.is_output:
            packing.add_output(reference)
        else:
            packing.add_input(reference)
    if job.environment.needs_build:
        for path in local_places(job.environment):
            packing.add_package(path)
    source = Path(place(read_json(folder.record)).source)
    for one in _sent(folder):
        packing.add_linked(source, one, named=linked.is_named(one.path, job.send))
    manifest = Manifest(
        places=packing.places,
        stores=packing.stores,
        linked=packing.linked,
        programs=packing.programs,
        contents=packing.contents,
        home=tuple(packing.home),
    )
    return Packed(manifest=manifest, files=packing.files)


def _sent(folder: RunFolder) -> Iterator[NotCopied]:
    """Yield what was not copied, and is sent; nothing of a run that has been brought here, whose manifest has it."""
    return (one for one in linked.read(folder.linked) if one.is_sent)


def add_json(archive: tarfile.TarFile, name: str, value: Any) -> None:
    """Put a small JSON file into an archive."""
    data = (json.dumps(value) + "\n").encode()
    item = tarfile.TarInfo(name)
    item.size, item.mode = len(data), 0o644
    archive.addfile(item, io.BytesIO(data))


def local_places(environment: EnvironmentSpec) -> Iterator[Path]:
    """The archives, folders and channels of this machine that an environment is made from.

    Raises:
        EnvironmentSpecError: one is not there.
    """
    from paceline.environments.local_sources import paths_of

    for path in paths_of(environment):
        if not path.exists():
            raise EnvironmentSpecError(
                f"there is no {str(path)!r}, from which the environment is to be made. Give the path of a folder or a file."
            )
        yield path


class _Packing:
    # With all that reading data takes, which is loaded here alone: most runs take nothing along.

    def __init__(self, workspace: Path, reached: str | None) -> None:
        self._workspace, self._reached = workspace, reached
        self.places: dict[str, tuple[str, str]] = {}
        self.linked: dict[str, tuple[str, str]] = {}
        self.programs: dict[str, tuple[str, ...]] = {}
        self.stores: dict[str, dict[str, Any]] = {}
        self.contents: dict[str, str] = {}
        self.files: dict[str, dict[str, Path]] = {}
        self.home: list[str] = []

    def add_output(self, reference: DataReference) -> None:
        (source,) = reference.sources
        record, _ = self._place(source)
        # A datastore that both sides have is written to from there.
        if record.kind == "local" and (source.datastore is None or source.datastore != self._reached):
            self.home.append(reference.name)

    def add_input(self, reference: DataReference) -> None:
        from paceline.data.datasets.content import content_fingerprint, with_content
        from paceline.data.transfer.listing import fingerprint, is_single_file, list_files, path_in_store

        found: list[FileInfo] = []
        is_whole = True
        for source in reference.sources:
            record, path = self._place(source)
            # A store that is no folder can be reached from there as from here; only its record travels.
            if record.kind != "local":
                is_whole = False
                continue
            infos = list_files([source], self._workspace)
            found += infos
            top = Path(record.root or "/")
            # A path that names one file: its place is the file's name in the tree, not the tree's top.
            name = infos[0].relative if is_single_file(infos, [source], self._workspace) else ""
            self._add(place_in(record, path), {info.relative: top / path_in_store(info) for info in infos}, name)
        if is_whole:
            # Of a dataset's files the content is what counts, as when it was registered.
            self.contents[reference.name] = (
                content_fingerprint(with_content(found, self._workspace)) if reference.dataset else fingerprint(found)
            )

    def add_package(self, path: Path) -> None:
        from paceline.environments.key import source_files

        if path.is_dir():
            self._add(str(path), dict(source_files(path)), "")
        else:
            self._add(str(path), {path.name: path}, path.name)

    def add_linked(self, source: Path, one: NotCopied, *, named: bool) -> None:
        """Add what a run's working folder links to on this machine. What is gone by now is left out, as a link would be."""
        try:
            files = dict(linked.sent_files(source, one.path, named=named))
        except OSError as error:
            raise TransferError(f"{str(source / one.path)!r} can't be sent: {error.strerror}.") from error
        if not os.path.exists(source / one.path):
            return
        tree = self._tree(files) if files else ""
        self.linked[one.path] = (tree, "" if one.is_folder else os.path.basename(one.path))

    def _place(self, source: Source) -> tuple[StoreRecord, str]:
        from paceline.data.stores.filesystem import place_of

        record, path = place_of(source, self._workspace)
        if source.datastore is not None:
            self.stores[source.datastore] = record.to_json()
        return record, path

    def _add(self, place: str, files: dict[str, Path], name: str) -> None:
        self.places[place] = (self._tree(files), name)

    def _tree(self, files: dict[str, Path]) -> str:
        tree = tree_name(files, self._workspace)
        self.files[tree] = files
        if programs := tuple(sorted(name for name, path in files.items() if os.access(path, os.X_OK))):
            self.programs[tree] = programs
        return tree


def tree_name(files: Mapping[str, Path], workspace: Path) -> str:
    """Equal for equal files of equal names."""
    from paceline.data.datasets.content import with_content
    from paceline.data.transfer.listing import FileInfo

    infos = [
        FileInfo(datastore=None, path=f"{path}", size=path.stat().st_size, version="", relative=name)
        for name, path in sorted(files.items())
    ]
    # With a version, so that trees of another make-up would get other names.
    digest = hashlib.sha256(b"paceline carried 1\0")
    for info in with_content(infos, workspace):
        # The executable bit is all that is kept of a file's mode, so it counts as content.
        runs = os.access(info.path, os.X_OK)
        digest.update(f"{info.relative}\0{info.version}\0{runs:d}\0\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """places: a path (or pattern) of the submitting machine -> (tree, name in it; "" for all of it).
    stores: datastore -> its record, of all that the job names.
    linked: a path relative to the source folder -> likewise, of what was not copied and is sent; "" for an empty folder's tree.
    programs: tree -> the names in it of files that can be executed, which a datastore forgets.
    contents: input -> fingerprint of its files, for those that are carried as a whole.
    home: the outputs that go to folders of the submitting machine, in order.
    store: the record of the datastore in which the trees lie; None where they lie in the workspace.
    """

    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    linked: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    home: Sequence[str] = ()
    store: Mapping[str, Any] | None = None

    @property
    def trees(self) -> list[str]:
        """The names of all trees, sorted."""
        return sorted({tree for tree, _ in (*self.places.values(), *self.linked.values()) if tree})

    def record(self, datastore: str) -> StoreRecord:
        """A datastore that the job names, as it is registered where the run was submitted."""
        return StoreRecord.from_json(datastore, self.stores[datastore])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        values = known_fields(cls, data)
        for part in ("places", "linked"):
            values[part] = {path: (tree, name) for path, (tree, name) in values.get(part, {}).items()}
        values["programs"] = {tree: tuple(names) for tree, names in values.get("programs", {}).items()}
        values["home"] = tuple(values.get("home", ()))
        return cls(**values)


def place_in(record: StoreRecord, path: str) -> str:
    """The name of a place of a local store among `Manifest.places`."""
    return f"{record.root.rstrip('/')}/{clean_path(path, record.title).strip('/')}"


def tree_files(workspace: Path, tree: str) -> dict[str, Path]:
    """Relative name -> file, of a tree that lies in a workspace."""
    top = workspace / FOLDER / tree
    return {str(path.relative_to(top)): path for path in sorted(top.rglob("*")) if path.is_file()}
