"""Copy a run's source folder into a snapshot."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import snapshot
from paceline.errors import JobError
from paceline.job.entry import entry_file
from paceline.job.job import Job
from paceline.snapshot.scan import scan
from paceline.system import linked
from paceline.system.linked import NotCopied
from paceline.targets import configured


@dataclass(frozen=True, kw_only=True)
class SourceCopy:
    """The code of a run: a folder, or the existing snapshot of a rerun.

    Attributes:
        is_whole: Whether to copy every file, because the folder was made for this run and will be removed.
        link: Relative paths of folders in the source that hold results of earlier runs, and that the run must see.
    """

    directory: Path
    is_whole: bool = False
    link: frozenset[str] = frozenset()
    snapshot_id: str | None = None
    git: Mapping[str, object] = dataclasses.field(default_factory=dict)


def check_source(job: Job, directory: Path, workspace_dir: Path) -> None:
    """Raise UserError unless the source folder exists and contains the job's script."""
    snapshot.check_folder(directory)
    is_here = configured.read(workspace_dir, job.compute_target).kind == configured.LOCAL
    entry_file(job, directory, is_here=is_here)


def not_copied(job: Job, source: SourceCopy, workspace_dir: Path, leave_out: Sequence[Path] = ()) -> list[NotCopied]:
    """Return the files of the source that a submission would not copy.

    Raises:
        SnapshotError: The source can't be read.
    """
    _check_named(job, source, workspace_dir)
    opened = _opened(entry_file(job, source.directory), job.working_directory)
    none = workspace_dir / "snapshots" / ".scans" / "none"
    tree = scan(source.directory, none, workspace_dir, leave_out, opened, source.link.union(job.send))
    is_here = configured.read(workspace_dir, job.compute_target).kind == configured.LOCAL
    found = linked.measured(source.directory, tree.not_copied)
    return found if is_here else linked.with_sent(source.directory, found, job.send)


def snapshot_folder(directory: Path, workspace_dir: Path) -> str:
    """Copy a folder into the workspace's snapshots, and return the snapshot's id."""
    return snapshot.take(directory, workspace_dir / "snapshots", workspace_dir).id


def take_snapshot(
    job: Job,
    source: SourceCopy,
    workspace_dir: Path,
    progress: snapshot.Progress | None = None,
    leave_out: Sequence[Path] = (),
    known: snapshot.Snapshot | None = None,
) -> snapshot.Snapshot:
    """Copy a job's source for one or several runs. Return the snapshot.

    Files in `leave_out` are not copied. `known`: another job's snapshot of the same folder, used instead of a new copy.

    Raises:
        UserError: The source can't be copied, or lacks the job's script.
    """
    is_here = configured.read(workspace_dir, job.compute_target).kind == configured.LOCAL
    snapshots_dir = workspace_dir / "snapshots"
    if source.snapshot_id is not None:
        path = snapshots_dir / source.snapshot_id
        use_snapshot(path)
        taken = snapshot.Snapshot(
            id=source.snapshot_id, path=path, file_count=0, size=0, is_new=False, files=frozenset()
        )
        return _with_not_copied(taken, job, source.directory, is_here=is_here)
    # Check the script before the copy, which may take minutes, so that a missing script is reported at once.
    script = entry_file(job, source.directory, is_here=is_here)
    _check_named(job, source, workspace_dir)
    opened = None if source.is_whole else _opened(script, job.working_directory)
    taken = known or snapshot.take(
        source.directory,
        snapshots_dir,
        workspace_dir,
        progress,
        leave_out,
        opened,
        source.link.union(job.send),
        source.is_whole,
    )
    if taken.not_copied and known is None:
        # Store the list of files that were not copied, because reruns and trials of a sweep reuse this snapshot.
        linked.file_of(taken.path, source.directory).parent.mkdir(exist_ok=True)
        linked.write(linked.file_of(taken.path, source.directory), linked.measured(source.directory, taken.not_copied))
    if taken.not_copied:
        taken = _with_not_copied(taken, job, source.directory, is_here=is_here)
    if script is not None and script not in taken.files:
        raise JobError(
            f"entry_script {script!r} is left out of the snapshot by .amlignore or .gitignore in "
            f"{str(source.directory)!r}, or is in a folder that no snapshot has (outputs, .git). Move it, or change the rule."
        )
    return taken


def use_snapshot(path: Path) -> None:
    """Record that a snapshot is in use. Raise JobError if the snapshot is gone."""
    if not path.is_dir():
        raise JobError(f"snapshot {path.name} is no longer in {str(path.parent)!r}. Submit the source again.")
    with contextlib.suppress(OSError):
        os.utime(path)


def _with_not_copied(taken: snapshot.Snapshot, job: Job, directory: Path, *, is_here: bool) -> snapshot.Snapshot:
    """Add to an existing snapshot the list of files that it lacks, as `take_snapshot` stored it."""
    found = linked.read(linked.file_of(taken.path, directory))
    return dataclasses.replace(
        taken, not_copied=tuple(found if is_here else linked.with_sent(directory, found, job.send))
    )


def _check_named(job: Job, source: SourceCopy, workspace_dir: Path) -> None:
    """Raise JobError if a path of the options `link` and `send` is not allowed."""
    directory = source.directory
    for option, path in (*(("link", path) for path in source.link), *(("send", path) for path in job.send)):
        own = os.path.normpath(os.path.join(job.working_directory or ".", "outputs"))
        if linked.is_named(path, (own, "outputs")):
            raise JobError(
                f"{option}={path!r}: {own!r} is the place of the run's own outputs. Copy what the script needs to another folder."
            )
    for path in job.send:
        if not os.path.lexists(directory / path):
            raise JobError(f"send={path!r}: {str(directory)!r} has no such file or folder. Give an existing path.")
        is_own = f"{os.path.realpath(directory / path)}/".startswith(f"{os.path.realpath(workspace_dir)}/")
        if why := linked.kept_back(directory, path, named=True) or "the workspace" * is_own:
            raise JobError(f"send={path!r} can't be sent to other machines: {why}. Name data that the script reads.")


def _opened(script: str | None, working_directory: str | None) -> frozenset[str]:
    """Return paths that are copied although an ignore rule excludes them.

    The paths are the script, its folder, the working directory, and the folders above these.
    """
    inside = [os.path.dirname(script)] if script else []
    if working_directory is not None and working_directory.split("/")[0] != "..":
        inside.append(os.path.normpath(working_directory))
    parts = [path.split("/") for path in inside]
    folders = {"/".join(names[:count]) for names in parts for count in range(1, len(names) + 1)} - {"", "."}
    return frozenset({*folders, script} if script else folders)
