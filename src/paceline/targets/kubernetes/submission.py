"""Create a run's objects in the cluster.

Run as a program, this module uploads a run's files that are too large for Secrets, and outlives the submitting program.
"""

from __future__ import annotations

import functools
import gzip
import io
import os
import secrets
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import paceline
from paceline.errors import PacelineError, TargetError
from paceline.job.job import Job
from paceline.remote.foreign_python import library_digest, packed_library
from paceline.remote.staging.packing import add_run, add_tree, pack_run
from paceline.remote.staging.stage_out_local import expect
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import engine
from paceline.system import detached_process
from paceline.system.files import PRIVATE, read_json, write_whole
from paceline.targets.kubernetes import boot, manifests
from paceline.targets.kubernetes.settings import KubernetesSettings, Manifest, read_settings
from paceline.targets.kubernetes.ticket import PodTicket, archive_name, message

if TYPE_CHECKING:
    from paceline.targets.kubernetes.api import Cluster

#: The folder of the library, which runs and services in the cluster get.
LIBRARY = Path(paceline.__file__).resolve().parents[1]
#: Maximum number of Secrets for a run's source code. A larger source is uploaded to the run's pod.
_SOURCE_PARTS = 3
_PAUSE_S = 1.0
#: Modification time of packed files (1980): a script may zip these files, and zip archives can't store an earlier time.
_TIME = 315532800
#: Maximum number of Secrets for the run folders of a Job that has many runs.
_MOST_PARTS = 16
#: The most bytes of run folders in one Secret. The other 32 KiB are for the pod's settings and the pod's first program.
_RUN_BYTES = manifests.SECRET_BYTES - (32 << 10)


def submit(
    cluster: Cluster,
    job: Job,
    settings: KubernetesSettings,
    folders: Sequence[RunFolder],
    workspace: str,
    *,
    live: bool,
    at_once: int,
) -> Mapping[str, object]:
    """Create the objects of a run, or of several similar runs. A repeated call creates the missing ones.

    live: Whether the pod writes the run's changes into its log. Users who may not forward ports need this.
    at_once: How many of the runs may run at the same time.

    Returns:
        Values for `engine.json`: the Job's uid, the Secrets of the source, which only runs of this workspace use, and the
        number of bytes that `start_upload` has to upload.

    Raises:
        EngineError, TargetError: The cluster does not answer or refuses an object, or files are too large for Secrets.
        DataError, EnvironmentSpecError, TransferError: A file that the job names is missing here or can't be sent.
    """
    if settings.queue is None and (queue := _only_queue(cluster)):
        settings = replace(settings, queue=queue)
    code = SharedSecrets(cluster, settings, workspace)
    first, run_ids, is_many = folders[0], [folder.run_id for folder in folders], len(folders) > 1
    snapshot = first.snapshot.resolve() if first.snapshot.exists() else None
    source_parts: int | None = 0
    if snapshot is not None:
        # Include the workspace in the name, so that no other workspace uses these Secrets, and this workspace can delete them.
        name = f"paceline-source-{workspace[:10]}-{snapshot.name[:20].lower()}"
        source_parts = code.add(name, functools.partial(_packed_snapshot, snapshot), most=_SOURCE_PARTS)
    unsent = snapshot if source_parts is None else None
    archives = {archive_name(index): _packed_run(folder, unsent) for index, folder in enumerate(folders)}
    groups, upload_bytes = list(_grouped(archives)), 0
    if max(map(len, archives.values())) > _RUN_BYTES or len(groups) > _MOST_PARTS:
        if is_many:
            raise TargetError(
                f"{settings.title}: the source or the files of {len(folders)} runs are too large for Secrets, from which the "
                "pods of one Job read them. Submit the runs one by one (a sweep without array_size), or store files in a "
                "datastore."
            )
        (archive,) = archives.values()
        upload_path(first).write_bytes(archive)
        groups, upload_bytes = [{}], len(archive)
    job_name = manifests.many_name(run_ids)
    names = manifests.ObjectNames(
        job=job_name,
        run_id=first.run_id,
        workspace=workspace,
        secrets=code.names,
        count=len(folders) if is_many else 0,
        at_once=at_once,
        parts=[f"{job_name}-part-{number}" for number in range(1, len(groups))],
    )
    ticket = PodTicket(
        run_id=first.run_id,
        job=job_name,
        port=manifests.port_of(first.run_id),
        workspace="/".join(first.path.parts[-4 if first.path.parts[-3] == ".paceline" else -3 : -2]),
        key=first.exec_key.read_text("ascii") if first.exec_key.exists() else secrets.token_hex(32),
        library=code.library,
        node_count=job.node_count,
        source_parts=source_parts or 0,
        upload_bytes=upload_bytes,
        volume=settings.volume or "",
        live=live,
        runs=run_ids if is_many else (),
        gang_wait_s=settings.gang_wait_s,
        silence_s=settings.silence_s,
    )
    for folder in folders:
        write_whole(folder.exec_key, ticket.key, mode=PRIVATE)
    uid = create(cluster, job, settings, names, groups[0], ticket)
    for part, files in zip(names.parts, groups[1:], strict=True):
        cluster.ensure("secrets", manifests.start_manifest(settings, names, uid, files, part))
    if not is_many:
        cluster.ensure("services", manifests.service_manifest(settings, names, uid))
    code.restore()
    _packed_run.cache_clear()
    for folder in folders:
        folder.secrets.unlink(missing_ok=True)  # not needed any more, because the pod's archive contains the secrets
    source = sorted(name for path, name in code.names.items() if path.startswith("source."))
    return {"uid": uid, "secrets": source, "upload": upload_bytes}


def _grouped(archives: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Divide files into groups, each small enough for a Secret."""
    group: dict[str, bytes] = {}
    for name, data in archives.items():
        if group and sum(map(len, group.values())) + len(data) > _RUN_BYTES:
            yield group
            group = {}
        group[name] = data
    yield group


def _only_queue(cluster: Cluster) -> str | None:
    """Return the namespace's only LocalQueue of Kueue, or None."""
    try:
        (queue,) = cluster.items("localqueues")
    except (TargetError, ValueError):
        return None
    return queue["metadata"]["name"]


def create(
    cluster: Cluster,
    job: Job,
    settings: KubernetesSettings,
    names: manifests.ObjectNames,
    files: Mapping[str, bytes],
    ticket: PodTicket,
) -> str:
    """Create a Job, and its Secret with start files. Return the Job's uid."""
    # Create the Job first. The Job then owns its Secret, so that Kubernetes deletes the Secret together with the Job.
    # The Job exists if the API or a later request of an earlier try failed.
    found = cluster.ensure("jobs", manifests.job_manifest(job, settings, names)) or cluster.get("jobs", names.job)
    if found is None or found["metadata"].get("annotations", {}).get(manifests.RUN_ANNOTATION) != names.run_id:
        raise TargetError(
            f"{settings.title}: Job {names.job!r} was deleted, or is not of run {names.run_id}. Submit again."
        )
    uid, all_files = found["metadata"]["uid"], {**files, **start_files(ticket.to_json())}
    cluster.ensure("secrets", manifests.start_manifest(settings, names, uid, all_files))
    return uid


def start_files(ticket: Mapping[str, object]) -> dict[str, bytes]:
    """Return the files that start a pod: a program and its `ticket`."""
    return {"boot.py": Path(boot.__file__).read_bytes(), "ticket.json": message(ticket)}


def upload_path(folder: RunFolder) -> Path:
    """Return the path of the archive with a run's files for the upload."""
    return folder.path / ".upload.tar.gz"


def preview(job: Job, settings: KubernetesSettings) -> list[Manifest]:
    """Return a run's manifests for --dry-run, with placeholders in capitals."""
    names = manifests.ObjectNames(job="JOB", run_id="RUN_ID", workspace="WORKSPACE", secrets={"library.0": "LIBRARY"})
    return [manifests.job_manifest(job, settings, names), manifests.service_manifest(settings, names, "UID")]


def refuse_insecure(settings: KubernetesSettings, warnings: Sequence[str]) -> None:
    """Raise TargetError if the API warns that it will refuse the pods."""
    for warning in warnings:
        # The API accepts a Job whose pods it will refuse later, and reports the violation only in this warning.
        if "would violate PodSecurity" in warning:
            raise TargetError(
                f"{settings.title}: the namespace {settings.namespace!r} would refuse the pods: {warning}. Change "
                "user_id or pod_template of the compute target."
            )


class SharedSecrets:
    """Secrets that several Jobs or Deployments use: Paceline's library, and other packed data.

    Attributes:
        names: Name of a file in the pod -> name of the Secret that holds it.
        library: The digest of the library.
    """

    def __init__(self, cluster: Cluster, settings: KubernetesSettings, workspace: str) -> None:
        self._cluster, self._settings, self._workspace = cluster, settings, workspace
        self._contents: dict[str, Callable[[], bytes]] = {}
        self.names: dict[str, str] = {}
        self.library = library_digest(LIBRARY)
        self.add(f"paceline-library-{self.library}", lambda: packed_library(LIBRARY), most=100)

    def add(self, name: str, pack: Callable[[], bytes], *, most: int) -> int | None:
        """Store packed data in Secrets `name`-0, `name`-1, ... unless they exist. Return their number.

        Return None if the data need more than `most` Secrets.
        """
        found = self._cluster.get("secrets", f"{name}-0", only_metadata=True)
        about = {} if found is None else found["metadata"].get("annotations", {})
        if (listed := about.get(manifests.PARTS_ANNOTATION, "")).isdecimal():
            count = int(listed)
        else:
            parts = manifests.parts_of(pack())
            if (count := len(parts)) > most:
                return None
            self._create(name, parts)
        self._contents[name] = pack
        self.names |= {f"{name.split('-')[1]}.{number}": f"{name}-{number}" for number in range(count)}
        return count

    def restore(self) -> None:
        """Create the missing Secrets again.

        A cleanup by another program may have deleted a Secret that no Job or Deployment named yet.
        """
        if any(self._cluster.get("secrets", name, only_metadata=True) is None for name in self.names.values()):
            for name, pack in self._contents.items():
                self._create(name, manifests.parts_of(pack()))

    def _create(self, name: str, parts: Sequence[bytes]) -> None:
        # Create the Secret of the first part last, so that its existence proves that all others exist.
        for number in reversed(range(len(parts))):
            about = (f"{name}-{number}", name.split("-")[1], self._workspace, parts[number], len(parts))
            self._cluster.ensure("secrets", manifests.content_manifest(self._settings, *about))


def packed_tree(folder: Path, name: str) -> bytes:
    """Return a tar.gz of a folder as `name`. Equal files give equal bytes."""

    def without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = _TIME
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w|") as archive:
        archive.add(folder, name, filter=without_origin)
    return data.getvalue()


@functools.lru_cache(maxsize=2)
def _packed_snapshot(snapshot: Path) -> bytes:
    return packed_tree(snapshot, f"snapshots/{snapshot.name}")


@functools.cache  # a repeated submission needs the same bytes: some may be in Secrets
def _packed_run(folder: RunFolder, snapshot: Path | None) -> bytes:
    """Return an archive of a run's folder, and of the source unless Secrets hold it.

    Raises:
        DataError, EnvironmentSpecError, TransferError: A file that the job names is missing here or can't be sent.
    """
    packed = pack_run(folder)
    expect(folder, packed.manifest.home if packed else ())
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=1) as archive:
        if snapshot is not None:
            archive.add(snapshot, f"snapshots/{snapshot.name}")
        for tree, files in (packed.files if packed else {}).items():
            add_tree(archive, tree, files)
        add_run(archive, folder, packed, engine="kubernetes")
    return data.getvalue()


def start_upload(run_dir: Path, library_dir: Path, python: str) -> None:
    """Start a background process that uploads a run's large files to its pod."""
    with open(os.devnull, "r+b") as null:
        detached_process.start(
            __name__, run_dir, null.fileno(), python=python, library_dir=library_dir, cwd="/", stdout=null, stderr=null
        )


def main(argv: list[str]) -> int:
    from paceline.targets.kubernetes import api, look, readers

    folder = RunFolder(Path(argv[0]))
    archive, described = upload_path(folder), read_json(folder.target)
    _, settings = read_settings(described["name"], described["settings"])
    while archive.exists() and not store.has_ended(folder):
        try:
            connection = look.connected(api.cluster_of(*settings.place), folder, engine(folder))
            if connection is not None:
                with connection:
                    readers.send_archive(connection, archive)
                archive.unlink()
        except (PacelineError, OSError, EOFError):
            pass  # the pod has not begun, or the connection broke: the next round sends the bytes that are missing
        time.sleep(_PAUSE_S)
    archive.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
