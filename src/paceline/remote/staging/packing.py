"""Find the local files that a job needs on other machines, as trees named by content."""

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


#: Name of a folder with file trees that were sent with runs. It is in a workspace, or in a datastore's folder `paceline/`.
FOLDER = "carried"
#: Names of files in a run's folder that are sent to a cluster.
_SENT = ("job.json", "state.json", "events.jsonl", "notes.jsonl", "target.json", "ballast", "secrets.json")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The files to send for a job, {folder ("tree"): {name: path}}, and their manifest."""

    manifest: Manifest
    files: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)

    def size(self, tree: str) -> tuple[int, int]:
        """Return (number, total bytes) of the files in the tree with this name."""
        return len(self.files[tree]), sum(path.stat().st_size for path in self.files[tree].values())


def pack_run(folder: RunFolder, *, reached: str | None = None) -> Packed | None:
    """Find the local files that another machine needs for a run; None without files."""
    job = stored(folder).job
    if job is None or not (job.inputs or job.environment.needs_build or any(_sent(folder))):
        return None
    return pack(job, folder, reached=reached)


def pack(job: Job, folder: RunFolder, *, reached: str | None = None) -> Packed:
    """Find all local files that a job needs besides its snapshot.

    reached: A datastore whose folder the other machine also sees, or None. Files in this folder are not sent.

    Raises:
        DataError, EnvironmentSpecError: A file that the job names is missing on this machine.
        TransferError: A file can't be read.
    """
    workspace = folder.path.parent.parent
    # If this run itself came from another machine, the job's paths are valid only there: forward the trees sent with the run.
    if (told := read_json(folder.carried)) is not None:
        manifest = Manifest.from_json(told)
        # Don't forward file trees that are in a datastore, because the next nodes can read these trees from the datastore.
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
    source = Path(place(read_json(folder.job)).source)
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
    return (one for one in linked.read(folder.linked) if one.is_sent)


def add_json(archive: tarfile.TarFile, name: str, value: Any) -> None:
    data = (json.dumps(value) + "\n").encode()
    item = tarfile.TarInfo(name)
    item.size, item.mode = len(data), 0o644
    archive.addfile(item, io.BytesIO(data))


def add_tree(archive: tarfile.TarFile, tree: str, files: Mapping[str, Path]) -> None:
    """Add `files` to an archive, in the folder carried/<tree>."""
    top = tarfile.TarInfo(f"{FOLDER}/{tree}")
    top.type, top.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(top)
    for name, path in sorted(files.items()):
        # Add each file's content even if the file is a hard link: `TarFile.add` would write a link instead.
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            item = tarfile.TarInfo(f"{FOLDER}/{tree}/{name}")
            item.size, item.mtime = found.st_size, int(found.st_mtime)
            item.mode = 0o555 if found.st_mode & 0o100 else 0o444
            archive.addfile(item, file)


def add_run(archive: tarfile.TarFile, folder: RunFolder, packed: Packed | None, *, engine: str) -> None:
    """Add a new run's folder to an archive, with a link to its snapshot.

    packed: The files that the job names, whose manifest is added too; None without such files.
    engine: The name of the cluster's engine, such as "ray", which will start the run.
    """
    top = f"runs/{folder.run_id}"
    for name in ("logs", "outputs", "metrics", "checkpoints"):
        item = tarfile.TarInfo(f"{top}/{name}")
        item.type, item.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(item)
    # A run that continues another run has that run's checkpoints from the beginning.
    if any(folder.checkpoints.iterdir()):
        archive.add(folder.checkpoints, f"{top}/checkpoints")
    for name in _SENT:
        if (folder.path / name).is_file():
            archive.add(folder.path / name, f"{top}/{name}")
    if folder.snapshot.is_symlink():
        link = tarfile.TarInfo(f"{top}/snapshot")
        link.type, link.linkname = tarfile.SYMTYPE, f"../../snapshots/{folder.snapshot.resolve().name}"
        archive.addfile(link)
    # This file shows the supervisor and all readers on the cluster that an engine such as Slurm manages the run.
    add_json(archive, f"{top}/{folder.engine.name}", {"engine": engine})
    if packed is not None:
        add_json(archive, f"{top}/{folder.carried.name}", packed.manifest.to_json())


def local_places(environment: EnvironmentSpec) -> Iterator[Path]:
    """Yield the paths of an environment's local archives, folders and channels."""
    from paceline.environments.key import paths_of

    for path in paths_of(environment):
        if not path.exists():
            raise EnvironmentSpecError(
                f"there is no {str(path)!r}, from which the environment is to be made. Give the path of a folder or a file."
            )
        yield path


class _Packing:
    # The methods import modules only when they are called, because most runs send no files.

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
        # The submitting machine must store the output, unless the machine that runs the job can reach the same datastore.
        if record.kind == "local" and (source.datastore is None or source.datastore != self._reached):
            self.home.append(reference.name)

    def add_input(self, reference: DataReference) -> None:
        from paceline.data.datasets.content import content_fingerprint, with_content
        from paceline.data.transfer.listing import fingerprint, is_single_file, list_files, path_in_store

        found: list[FileInfo] = []
        is_whole = True
        for source in reference.sources:
            record, path = self._place(source)
            # Leave out the files of a remote store, because the machine that runs the job reads them with the store's record.
            if record.kind != "local":
                is_whole = False
                continue
            infos = list_files([source], self._workspace)
            found += infos
            top = Path(record.root or "/")
            # If the path is a single file, translate it to this file in the tree. If it is a folder, translate it to the top.
            name = infos[0].relative if is_single_file(infos, [source], self._workspace) else ""
            self._add(place_in(record, path), {info.relative: top / path_in_store(info) for info in infos}, name)
        if is_whole:
            # Fingerprint the files of a dataset by content, because the dataset's registration did so too.
            self.contents[reference.name] = (
                content_fingerprint(with_content(found, self._workspace)) if reference.dataset else fingerprint(found)
            )

    def add_package(self, path: Path) -> None:
        from paceline.environments.key import source_files

        if path.is_dir():
            # Leave out broken links, such as an editor's lock file, and pipes: they have no content to send.
            self._add(str(path), {name: file for name, file in source_files(path) if file.is_file()}, "")
        else:
            self._add(str(path), {path.name: path}, path.name)

    def add_linked(self, source: Path, one: NotCopied, *, named: bool) -> None:
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
    """Return the name of a tree: a hash of its files' names and contents."""
    from paceline.data.datasets.content import with_content
    from paceline.data.transfer.listing import FileInfo

    infos = [
        FileInfo(datastore=None, path=f"{path}", size=path.stat().st_size, version="", relative=name)
        for name, path in sorted(files.items())
    ]
    digest = hashlib.sha256(b"paceline carried 1\0")
    for info in with_content(infos, workspace):
        # Only the executable bit of the mode is sent, so hash only this bit.
        runs = os.access(info.path, os.X_OK)
        digest.update(f"{info.relative}\0{info.version}\0{runs:d}\0\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a job's trees, stored as `carried.json` in a run's folder.

    Attributes:
        places: Path or pattern on the submitting machine -> (tree, path in the tree; "" for the whole tree).
        stores: Datastore -> its record, for all datastores that the job names.
        linked: For files and folders outside the snapshot: path in the source folder -> (tree, path in the tree). The
            tree is "" for an empty folder.
        programs: Tree -> names of its executable files, since datastores do not store modes.
        contents: Input -> fingerprint of its files. Only for inputs whose files are all sent.
        home: Names of outputs that the submitting machine will store in its own folders, in the order of the job.
        store: Record of the datastore that has the trees; None if the trees are in the workspace.
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
        """The names of all trees of files to send, sorted."""
        return sorted({tree for tree, _ in (*self.places.values(), *self.linked.values()) if tree})

    def record(self, datastore: str) -> StoreRecord:
        """Return the record of a datastore, as registered on the submitting machine."""
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
    """Return the absolute path of a file or folder in a local datastore."""
    return f"{record.root.rstrip('/')}/{clean_path(path, record.title).strip('/')}"


def tree_files(workspace: Path, tree: str) -> dict[str, Path]:
    """Return {name: path} of the files in a tree that a workspace has received."""
    top = workspace / FOLDER / tree
    return {str(path.relative_to(top)): path for path in sorted(top.rglob("*")) if path.is_file()}
