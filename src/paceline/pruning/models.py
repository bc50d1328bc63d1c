"""What models leave: contents that no version has any more, and registrations that were killed. Versions stay."""

from __future__ import annotations

from pathlib import Path

from paceline.models import keep, registry, staging


def prune(workspace_dir: Path, *, dry_run: bool = False) -> int:
    """Remove what nobody needs; its bytes."""
    parts, blobs = registry.parts_dir(workspace_dir), registry.blobs_dir(workspace_dir)
    # First, for their files are further names of contents, which no one else may need.
    freed = sum(size for _, size in staging.abandoned(parts)) if dry_run else staging.sweep(parts)
    for path, size in [*keep.unneeded(blobs)]:
        freed += size if dry_run else keep.drop(path)
    return freed


def made_by(workspace_dir: Path) -> dict[str, str | None]:
    """Run -> snapshot, of the runs that made a model: it can be made again only with both."""
    return {record.run_id: record.run.get("snapshot_id") for record in registry.records(workspace_dir) if record.run_id}
