"""Which of Paceline's compute targets a name of the SDK's means."""

from __future__ import annotations

from typing import Any

from paceline.compat.azureml import records
from paceline.compat.azureml.exceptions import ComputeTargetException
from paceline.compat.azureml.policy import Notes

#: Of clusters that Azure would have made by themselves.
_LOCAL = ("local", "amlcompute", "containerinstance", "")


def resolve(name: Any, workspace: Any, notes: Notes) -> str:
    """The target's name here.

    Raises:
        ComputeTargetException: nothing of this name was added or created.
    """
    name = getattr(name, "name", name) or "local"
    if not isinstance(name, str):
        raise ComputeTargetException(f"compute_target={name!r} is neither a target nor the name of one.")
    if name in workspace_targets(workspace):
        return name
    created = records.documents(workspace, "compute")
    if created.rule.fullmatch(name) and (data := created.read(name)) is not None:
        size = f" ({data['vm_size']})" if data.get("vm_size") else ""
        notes.add(
            f"The compute target {name}{size} is this machine. To train elsewhere: paceline compute add {name} --kind ssh ..."
        )
        return "local"
    if name.lower() in _LOCAL:
        return "local"
    known = ", ".join([*workspace_targets(workspace), *created.names()])
    raise ComputeTargetException(
        f"ComputeTargetNotFound: there is no compute target {name!r}; there are: {known}. Create it, or add one: "
        f"paceline compute add {name} --kind ssh ..."
    )


def workspace_targets(workspace: Any) -> list[str]:
    """The names of Paceline's own targets in the workspace."""
    from paceline.targets.named import ComputeTargets

    return list(ComputeTargets(workspace.path))
