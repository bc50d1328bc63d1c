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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

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
    from paceline.targets.kubernetes.objects import ObjectMeta

#: Maximum number of Secrets for a run's source code. A larger source is uploaded to the run's pod.
_SOURCE_PARTS = 3
_PAUSE_S = 1.0
#: Maximum number of Secrets for the run folders of a Job that has many runs.
_MOST_PARTS = 16
#: The most bytes of run folders in one Secret. The other 32 KiB are reserved for the ticket and the pod's first program.
_RUN_BYTES = manifests.SECRET_BYTES - (32 << 10)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The submitted Job's uid and object names, and the bytes still to upload."""

    names: manifests.ObjectNames
    uid: str
    upload_bytes: int = 0

    @property
    def source_secrets(self) -> list[str]:
        """The Secrets of the source, which only runs of this workspace use."""
        return sorted(name for path, name in self.names.secrets.items() if path.startswith("source."))


@dataclass(frozen=True, kw_only=True)
class _Code:
    """Paceline's library and a run's source, in Secrets that runs share.

    Attributes:
        names: Name of a file in the pod -> name of the Secret that holds it.
        snapshot: The folder of the source; None for a run without source.
        source_parts: The number of files into which the source is packed; None if it is too large for Secrets.
    """

    names: Mapping[str, str]
    snapshot: Path | None
    source_parts: int | None


def submit(
    cluster: Cluster,
    job: Job,
    settings: KubernetesSettings,
    folder: RunFolder,
    library: Path,
    workspace: str,
    live: bool,
) -> Sent:
    """Create a run's Job, Secrets and Service in the cluster.

    live: Whether the pod writes the run's changes into its log. Users who may not forward ports need this.

    Raises:
        EngineError, TargetError: The cluster does not answer, or refuses an object.
        DataError, EnvironmentSpecError, TransferError: A file that the job names is missing here or can't be sent.
    """
    settings = _with_queue(cluster, settings)
    code = _stored_code(cluster, settings, folder, library, workspace)
    archive = _packed_run(folder, code)
    is_uploaded = len(archive) > _RUN_BYTES
    if is_uploaded:
        upload_path(folder).write_bytes(archive)
    names = manifests.ObjectNames(
        job=manifests.job_name(folder.run_id), run_id=folder.run_id, workspace=workspace, secrets=code.names
    )
    ticket = _ticket_of(folder, names, settings, job, code, library, secrets.token_hex(32), live=live)
    write_whole(folder.exec_key, ticket.key, mode=PRIVATE)
    if is_uploaded:
        ticket = replace(ticket, upload_bytes=len(archive))
    program, run = Path(boot.__file__).read_bytes(), b"" if is_uploaded else archive
    uid = create(cluster, job, settings, names, {"boot.py": program, "run": run}, ticket)
    cluster.create("services", manifests.service_manifest(settings, names, uid))
    _restore_code(cluster, settings, code, library, workspace)
    folder.secrets.unlink(missing_ok=True)  # not needed any more, because the pod's archive contains the secrets
    return Sent(names=names, uid=uid, upload_bytes=ticket.upload_bytes)


def check_many(title: str, job: Job) -> None:
    """Raise TargetError if each run of the job needs several nodes."""
    if job.node_count > 1:
        raise TargetError(
            f"{title}: one Kubernetes Job holds many runs of one pod each, and this job has {job.node_count} nodes. Submit the "
            "runs one by one: a sweep without array_size, a function by submit()."
        )


def submit_many(
    cluster: Cluster,
    job: Job,
    settings: KubernetesSettings,
    folders: Sequence[RunFolder],
    library: Path,
    workspace: str,
    *,
    live: bool,
    at_once: int,
) -> Sent:
    """Create the Job and Secrets of runs that differ in their arguments only.

    Raises:
        EngineError, TargetError: The cluster does not answer or refuses an object, or files are too large for Secrets.
    """
    settings = _with_queue(cluster, settings)
    code = _stored_code(cluster, settings, folders[0], library, workspace)
    archives = {archive_name(index): _packed_run(folder, code) for index, folder in enumerate(folders)}
    groups = list(_grouped(archives))
    if max(map(len, archives.values())) > _RUN_BYTES or len(groups) > _MOST_PARTS:
        raise TargetError(
            f"{settings.title}: the source or the files of {len(folders)} runs are too large for Secrets, from which the pods "
            "of one Job read them. Submit the runs one by one (a sweep without array_size), or store files in a datastore."
        )
    name = manifests.many_name([folder.run_id for folder in folders])
    names = manifests.ObjectNames(
        job=name,
        run_id=folders[0].run_id,
        workspace=workspace,
        secrets=code.names,
        count=len(folders),
        at_once=at_once,
        parts=[f"{name}-part-{number}" for number in range(1, len(groups))],
    )
    ticket = _ticket_of(folders[0], names, settings, job, code, library, secrets.token_hex(32), live=live)
    ticket = replace(ticket, runs=[folder.run_id for folder in folders])
    for folder in folders:
        write_whole(folder.exec_key, ticket.key, mode=PRIVATE)
    program = Path(boot.__file__).read_bytes()
    uid = create(cluster, job, settings, names, {"boot.py": program, **groups[0]}, ticket)
    for part, files in zip(names.parts, groups[1:], strict=True):
        cluster.create("secrets", manifests.start_manifest(settings, names, uid, files, part))
    _restore_code(cluster, settings, code, library, workspace)
    for folder in folders:
        folder.secrets.unlink(missing_ok=True)
    return Sent(names=names, uid=uid)


def _grouped(archives: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Divide files into groups, each small enough for a Secret."""
    group: dict[str, bytes] = {}
    for name, data in archives.items():
        if group and sum(map(len, group.values())) + len(data) > _RUN_BYTES:
            yield group
            group = {}
        group[name] = data
    yield group


def _with_queue(cluster: Cluster, settings: KubernetesSettings) -> KubernetesSettings:
    """Return the settings with the namespace's only LocalQueue, if they name no queue."""
    if settings.queue is None and (queue := _only_queue(cluster)):
        return replace(settings, queue=queue)
    return settings


def _ticket_of(
    folder: RunFolder,
    names: manifests.ObjectNames,
    settings: KubernetesSettings,
    job: Job,
    code: _Code,
    library: Path,
    key: str,
    *,
    live: bool,
) -> PodTicket:
    """Return the description of a run for its pods."""
    return PodTicket(
        run_id=folder.run_id,
        job=names.job,
        port=manifests.port_of(folder.run_id),
        workspace="/".join(folder.path.parts[-4 if folder.path.parts[-3] == ".paceline" else -3 : -2]),
        key=key,
        library=library_digest(library),
        node_count=job.node_count,
        source_parts=code.source_parts or 0,
        volume=settings.volume or "",
        live=live,
        gang_wait_s=settings.gang_wait_s,
        silence_s=settings.silence_s,
    )


def _only_queue(cluster: Cluster) -> str | None:
    """Return the namespace's only LocalQueue of Kueue, or None."""
    try:
        (queue,) = cast("list[dict[str, ObjectMeta]]", cluster.items("localqueues"))
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
    """Create a Job, and its Secret with `files` and ticket. Return the Job's uid."""
    # Create the Job first. The Job then owns its Secret, so that Kubernetes deletes the Secret together with the Job.
    created, _ = cluster.create("jobs", manifests.job_manifest(job, settings, names))
    metadata = created["metadata"]
    uid = str(metadata["uid"]) if isinstance(metadata, dict) else ""
    whole = {**files, "ticket.json": message(ticket.to_json())}
    cluster.create("secrets", manifests.start_manifest(settings, names, uid, whole))
    return uid


def upload_path(folder: RunFolder) -> Path:
    """Return the path of the archive to upload, removed after the upload."""
    return folder.path / ".upload.tar.gz"


def preview(job: Job, settings: KubernetesSettings) -> list[Manifest]:
    """Return a run's manifests for --dry-run, with placeholders in capitals."""
    names = manifests.ObjectNames(job="JOB", run_id="RUN_ID", workspace="WORKSPACE", secrets={"library.0": "LIBRARY"})
    return [manifests.job_manifest(job, settings, names), manifests.service_manifest(settings, names, "UID")]


def _stored_code(
    cluster: Cluster, settings: KubernetesSettings, folder: RunFolder, library: Path, workspace: str
) -> _Code:
    """Create missing Secrets for the library and a run's source. Return all Secrets' names."""
    names = library_secrets(cluster, settings, library, workspace)
    snapshot = folder.snapshot.resolve() if folder.snapshot.exists() else None
    source = _source(cluster, settings, snapshot, workspace) if snapshot is not None else {}
    parts = None if source is None else len(source)
    return _Code(names={**names, **(source or {})}, snapshot=snapshot, source_parts=parts)


def _restore_code(cluster: Cluster, settings: KubernetesSettings, code: _Code, library: Path, workspace: str) -> None:
    """Recreate a new Job's Secrets if some are missing.

    `leftovers.remove_unused` may have deleted a Secret before the Job existed.
    """
    if any(cluster.annotations("secrets", name) is None for name in code.names.values()):
        library_secrets(cluster, settings, library, workspace, anew=True)
        if code.source_parts and code.snapshot is not None:
            _source(cluster, settings, code.snapshot, workspace, anew=True)


def refuse_insecure(settings: KubernetesSettings, warnings: Sequence[str]) -> None:
    """Raise TargetError if the API warns that it will refuse the pods."""
    for warning in warnings:
        # The API accepts a Job whose pods it will refuse later, and reports the violation only in this warning.
        if "would violate PodSecurity" in warning:
            raise TargetError(
                f"{settings.title}: the namespace {settings.namespace!r} would refuse the pods: {warning}. Change "
                "user_id or pod_template of the compute target."
            )


def library_secrets(
    cluster: Cluster, settings: KubernetesSettings, library: Path, workspace: str, *, anew: bool = False
) -> dict[str, str]:
    """Create the Secrets of Paceline's library unless they exist. Return {file in pod: Secret}.

    anew: Whether to check that the Secret of each part exists; else the first part suffices.
    """
    name = f"paceline-library-{library_digest(library)}"
    return (
        content_secrets(cluster, settings, name, workspace, lambda: packed_library(library), most=100, anew=anew) or {}
    )


def _source(
    cluster: Cluster, settings: KubernetesSettings, snapshot: Path, workspace: str, *, anew: bool = False
) -> dict[str, str] | None:
    # Include the workspace in the names, so that no other workspace uses these Secrets, and this workspace can delete them.
    name = f"paceline-source-{workspace[:10]}-{snapshot.name[:20].lower()}"
    return content_secrets(
        cluster, settings, name, workspace, lambda: _packed_source(snapshot), most=_SOURCE_PARTS, anew=anew
    )


def content_secrets(
    cluster: Cluster,
    settings: KubernetesSettings,
    name: str,
    workspace: str,
    pack: Callable[[], bytes],
    *,
    most: int,
    anew: bool,
) -> dict[str, str] | None:
    """Store packed data in Secrets `name`-0, `name`-1, ... Return {file in the pod: Secret}.

    Return None if the data need more than `most` parts. `anew`: Whether to check that each part exists.
    """
    kind = name.split("-")[1]
    about = None if anew else cluster.annotations("secrets", f"{name}-0")
    if about is not None and about.get(manifests.PARTS_ANNOTATION, "").isdigit():
        count = int(about[manifests.PARTS_ANNOTATION])
    else:
        parts = manifests.parts_of(pack())
        count = len(parts)
        if count > most:
            return None
        # Create the Secret of the first part last, so that its existence proves that all others exist.
        for number in reversed(range(count)):
            body = manifests.content_manifest(settings, f"{name}-{number}", kind, workspace, parts[number], count)
            cluster.ensure("secrets", body)
    return {f"{kind}.{number}": f"{name}-{number}" for number in range(count)}


@functools.lru_cache(maxsize=2)
def _packed_source(snapshot: Path) -> bytes:
    packed = io.BytesIO()
    # Don't store the time in the archive, so that equal sources give equal archives.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w|") as archive:
        archive.add(snapshot, f"snapshots/{snapshot.name}")
    return packed.getvalue()


def _packed_run(folder: RunFolder, code: _Code) -> bytes:
    """Return an archive of a run's folder, and of the source unless Secrets hold it.

    Raises:
        DataError, EnvironmentSpecError, TransferError: A file that the job names is missing here or can't be sent.
    """
    packed = pack_run(folder)
    expect(folder, packed.manifest.home if packed else ())
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=1) as archive:
        if code.source_parts is None and code.snapshot is not None:
            archive.add(code.snapshot, f"snapshots/{code.snapshot.name}")
        for tree, files in (packed.files if packed else {}).items():
            add_tree(archive, tree, files)
        add_run(archive, folder, packed, engine="kubernetes")
    return data.getvalue()


def start_upload(run_dir: Path, library_dir: Path, python: str) -> None:
    """Start a background process that uploads a run's large files to its pod."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        detached_process.start(
            "paceline.targets.kubernetes.submission",
            run_dir,
            null,
            python=python,
            library_dir=library_dir,
            cwd="/",
            stdout=null,
            stderr=null,
        )
    finally:
        os.close(null)


def main(argv: list[str]) -> int:
    from paceline.targets.kubernetes import api, look, readers

    folder = RunFolder(Path(argv[0]))
    archive, described = upload_path(folder), read_json(folder.target)
    _, settings = read_settings(described["name"], described["settings"])
    while archive.exists() and not store.has_ended(folder):
        try:
            connection = look.connected(api.cluster_of(settings), folder, engine(folder))
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
