"""Query targets in parallel, so that a target that hangs delays no other target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.targets import configured
from paceline.targets.base import Examined
from paceline.targets.configured import Configured
from paceline.targets.options import SettingValues
from paceline.targets.polling import all_within, said
from paceline.targets.status import SettingError, Status


@dataclass(frozen=True, kw_only=True)
class TargetLook:
    """A target's status, or the error of its query.

    Attributes:
        error: Why the query failed; None if it succeeded.
        is_wrong: Whether the error's cause is a wrong setting, and not an unreachable target.
    """

    name: str
    kind: str | None
    settings: SettingValues = field(default_factory=dict)
    status: Status | None = None
    error: str | None = None
    is_wrong: bool = False

    @property
    def state(self) -> str:
        """The state: up, degraded, down, unreachable, or unknown if the kind has no status."""
        return self.status.state if self.status else "unreachable" if self.error else "unknown"

    def to_json(self, *, with_nodes: bool = True) -> dict[str, Any]:
        status = self.status.to_json() if self.status else None
        if status is not None and not with_nodes:
            nodes = status.pop("nodes")
            del status["jobs"]
            status |= {"nodes": len(nodes), "nodes_up": sum(node["is_up"] for node in nodes)}
        return {
            "name": self.name,
            "kind": self.kind,
            "settings": dict(self.settings),
            "state": self.state,
            "status": status,
            "error": self.error,
        }


def look(workspace_dir: Path, name: str, limit_s: float) -> TargetLook:
    """Query the status of one target of a workspace.

    Raises:
        TargetError: The target does not exist, or its file in the workspace can't be read.
    """
    # Check the name first: `look_at_all` would return the error for an unknown name as a result.
    configured.read(workspace_dir, name)
    return look_at_all(workspace_dir, [name], limit_s)[0]


def look_at_all(workspace_dir: Path, names: Iterable[str], limit_s: float) -> list[TargetLook]:
    """Query the targets `names` in parallel, each within `limit_s`. Keep the order."""
    described: dict[str, Configured | TargetError] = {}
    for name in names:
        try:
            described[name] = configured.read(workspace_dir, name)
        # Query the other targets even if one target's description is unreadable.
        except TargetError as error:
            described[name] = error
    calls = {name: partial(_status, found) for name, found in described.items() if isinstance(found, Configured)}
    # Use a thread for each target, so that a hanging ssh or HTTP call can be abandoned at the time limit.
    answers = all_within(calls, limit_s)
    looks = []
    for name, found in described.items():
        if isinstance(found, TargetError):
            looks.append(TargetLook(name=name, kind=None, error=str(found)))
            continue
        answer = answers[name]
        looks.append(
            TargetLook(
                name=name,
                kind=found.kind,
                settings=found.settings,
                status=None if isinstance(answer, Exception) else answer,
                error=said(answer) if isinstance(answer, Exception) else None,
                is_wrong=isinstance(answer, SettingError),
            )
        )
    return looks


def counts_text(total: int | None, used: int | None) -> str:
    """Return how many cores or GPUs are free, such as "6 of 8"."""
    if total is None:
        return ""
    return str(total) if used is None else f"{total - used} of {total}"


def _status(found: Configured) -> Status | None:
    target: Any = found.make()
    if not isinstance(target, Examined):
        return None
    status: Status = target.status()
    return status
