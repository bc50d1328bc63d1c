"""Which of Paceline's compute targets a name of the SDK's means."""

from __future__ import annotations

from typing import Any

from paceline.compat.azureml import records
from paceline.compat.azureml.exceptions import ComputeTargetException
from paceline.compat.azureml.policy import SubmissionNotes

#: Of clusters that Azure would have made by themselves.
_LOCAL = ("local", "amlcompute", "containerinstance", "")


def resolve(name: Any, workspace: Any, notes: SubmissionNotes) -> str:
    """Return the target's name here: one that was added to Paceline, else "local", which is noted.

    A driver may name a cluster that somebody made in the portal.

    Raises:
        ComputeTargetException: The value can't be a target's name.
    """
    name = getattr(name, "name", name) or "local"
    if not isinstance(name, str):
        raise ComputeTargetException(f"compute_target={name!r} is neither a target nor the name of one.")
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


def workspace_targets(workspace: Any) -> list[str]:
    """The names of Paceline's own targets in the workspace."""
    from paceline.targets.configured import ComputeTargets

    return list(ComputeTargets(workspace.path))
