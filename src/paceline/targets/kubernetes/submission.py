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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.errors import PacelineError, TargetError
from paceline.job.job import Job
from paceline.remote.foreign_python import library_digest, packed_library
from paceline.remote.staging.packing import Packed, add_run, add_tree, pack_run
from paceline.remote.staging.stage_out_local import expect
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import engine
from paceline.system import detached_process
from paceline.system.files import PRIVATE, read_json, write_whole
from paceline.targets.kubernetes import boot, manifests
from paceline.targets.kubernetes.settings import KubernetesSettings, Manifest, read_settings
from paceline.targets.kubernetes.ticket import PodTicket, message

if TYPE_CHECKING:
    from paceline.targets.kubernetes.api import Cluster
    from paceline.targets.kubernetes.objects import ObjectMeta

#: The most Secrets for a source. A larger one is uploaded to the run's pod.
_SOURCE_PARTS = 3
_PAUSE_S = 1.0
#: Bytes of the run's own Secret that are reserved for the ticket and the first program.
_RUN_BYTES = manifests.SECRET_BYTES - (32 << 10)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The names and uid of a submitted Job's objects. `upload_bytes` are still to send."""

    names: manifests.ObjectNames
    uid: str
    upload_bytes: int


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

    live: Whether the pod writes the run's changes into its log, since the user may not forward ports.

    Raises:
        EngineError, TargetError: The cluster does not answer, or refuses an object.
        DataError, EnvironmentSpecError, TransferError: A file that the job names is missing here or can't be sent.
    """
    if settings.queue is None and (queue := _only_queue(cluster)):
        settings = replace(settings, queue=queue)
    packed = pack_run(folder)
    expect(folder, packed.manifest.home if packed else ())
    content = library_secrets(cluster, settings, library, workspace)
    snapshot = folder.snapshot.resolve() if folder.snapshot.exists() else None
    source = _source(cluster, settings, snapshot, workspace) if snapshot is not None else {}
    archive = _archive(folder, packed, snapshot if source is None else None)
    is_uploaded = len(archive) > _RUN_BYTES
    if is_uploaded:
        upload_path(folder).write_bytes(archive)
    content |= source or {}
    names = manifests.ObjectNames(
        job=manifests.job_name(folder.run_id), run_id=folder.run_id, workspace=workspace, secrets=content
    )
    key = secrets.token_hex(32)
    write_whole(folder.exec_key, key, mode=PRIVATE)
    ticket = PodTicket(
        run_id=folder.run_id,
        job=names.job,
        port=manifests.port_of(folder.run_id),
        workspace="/".join(folder.path.parts[-4 if folder.path.parts[-3] == ".paceline" else -3 : -2]),
        key=key,
        library=library_digest(library),
        node_count=job.node_count,
        upload_bytes=len(archive) if is_uploaded else 0,
        source_parts=len(source or {}),
        volume=settings.volume or "",
        live=live,
        gang_wait_s=settings.gang_wait_s,
        silence_s=settings.silence_s,
    )
    program, run = Path(boot.__file__).read_bytes(), b"" if is_uploaded else archive
    uid = create(cluster, job, settings, names, {"boot.py": program, "run": run}, ticket)
    cluster.create("services", manifests.service_manifest(settings, names, uid))
    # `leftovers.remove_unused` may have deleted a Secret before the Job existed.
    if any(cluster.annotations("secrets", name) is None for name in content.values()):
        library_secrets(cluster, settings, library, workspace, anew=True)
        if source and snapshot is not None:
            _source(cluster, settings, snapshot, workspace, anew=True)
    folder.secrets.unlink(missing_ok=True)  # the supervisor in the pod has the secrets now
    return Sent(names=names, uid=uid, upload_bytes=ticket.upload_bytes)


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
    # Create the Job first: with its uid it can own the other objects, which are then deleted together with the Job.
    created, _ = cluster.create("jobs", manifests.job_manifest(job, settings, names))
    metadata = created["metadata"]
    uid = str(metadata["uid"]) if isinstance(metadata, dict) else ""
    whole = {**files, "ticket.json": message(ticket.to_json())}
    cluster.create("secrets", manifests.start_manifest(settings, names, uid, whole))
    return uid


def upload_path(folder: RunFolder) -> Path:
    """Return the path of the archive to upload, which is removed afterwards."""
    return folder.path / ".upload.tar.gz"


def preview(job: Job, settings: KubernetesSettings) -> list[Manifest]:
    """Return a run's manifests for --dry-run, with placeholders in capitals."""
    names = manifests.ObjectNames(job="JOB", run_id="RUN_ID", workspace="WORKSPACE", secrets={"library.0": "LIBRARY"})
    return [manifests.job_manifest(job, settings, names), manifests.service_manifest(settings, names, "UID")]


def library_secrets(
    cluster: Cluster, settings: KubernetesSettings, library: Path, workspace: str, *, anew: bool = False
) -> dict[str, str]:
    """Create the Secrets with Paceline's library unless they exist. Return {file in the pod: Secret}.

    anew: Whether to check each part, because some parts may be missing.
    """
    name = f"paceline-library-{library_digest(library)}"
    return _ensured(cluster, settings, name, workspace, lambda: packed_library(library), most=100, anew=anew) or {}


def _source(
    cluster: Cluster, settings: KubernetesSettings, snapshot: Path, workspace: str, *, anew: bool = False
) -> dict[str, str] | None:
    # Include the workspace in the names: no other workspace uses these Secrets, so this one can delete them.
    name = f"paceline-source-{workspace[:10]}-{snapshot.name[:20].lower()}"
    return _ensured(cluster, settings, name, workspace, lambda: _packed_source(snapshot), most=_SOURCE_PARTS, anew=anew)


def _ensured(
    cluster: Cluster,
    settings: KubernetesSettings,
    name: str,
    workspace: str,
    pack: Callable[[], bytes],
    *,
    most: int,
    anew: bool,
) -> dict[str, str] | None:
    """Create Secrets for the parts of data. Return {file in the pod: Secret}.

    Return None if there are more than `most` parts. `anew`: Whether to check each part, because some parts may be missing.
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
        # Create the first part's Secret last: if it exists, all others exist.
        for number in reversed(range(count)):
            body = manifests.content_manifest(settings, f"{name}-{number}", kind, workspace, parts[number], count)
            cluster.ensure("secrets", body)
    return {f"{kind}.{number}": f"{name}-{number}" for number in range(count)}


@functools.lru_cache(maxsize=2)
def _packed_source(snapshot: Path) -> bytes:
    packed = io.BytesIO()
    # Clear the times, so that equal sources give equal archives.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w|") as archive:
        archive.add(snapshot, f"snapshots/{snapshot.name}")
    return packed.getvalue()


def _archive(folder: RunFolder, packed: Packed | None, snapshot: Path | None) -> bytes:
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
            pass  # the pod has not begun, or the connection broke: retry later, from the same byte
        time.sleep(_PAUSE_S)
    archive.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
