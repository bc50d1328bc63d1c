"""The mapping from the SDK's compute target names to Paceline's targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.compat.azureml import records
from paceline.compat.azureml.exceptions import ComputeTargetException
from paceline.compat.azureml.policy import SubmissionNotes

if TYPE_CHECKING:
    from paceline import Workspace

#: Names of clusters that Azure would create on demand.
_LOCAL = ("local", "amlcompute", "containerinstance", "")


def resolve(name: object, workspace: Workspace, notes: SubmissionNotes) -> str:
    """Return a target added to Paceline, otherwise "local" with a note.

    A driver may name a cluster that exists only in Azure's portal.

    Raises:
        ComputeTargetException: The value is not a valid target name.
    """
    name = getattr(name, "name", name) or "local"
    if not isinstance(name, str):
        raise ComputeTargetException(f"compute_target={name!r} must be a target or a target's name.")
    if name in workspace_targets(workspace):
        return name
    created = records.documents(workspace, "compute")
    if name.lower() in _LOCAL:
        return "local"
    if not created.rule.fullmatch(name):
        raise ComputeTargetException(
            f"compute_target={name!r} can't be a target's name: letters, digits, '-', '_' and '.'."
        )
    size = (created.read(name) or {}).get("vm_size")
    notes.add(
        f"The compute target {name}{f' ({size})' if size else ''} is this machine. To train elsewhere: "
        f"paceline compute add {name} --kind ssh ..."
    )
    return "local"


def workspace_targets(workspace: Workspace) -> list[str]:
    """Return the names of Paceline's targets in the workspace."""
    from paceline.targets import ComputeTargets

    return list(ComputeTargets(workspace.path))
