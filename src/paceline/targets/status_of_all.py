"""The status of a workspace's targets. All are asked at once, so that one that hangs holds up no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.targets import configured
from paceline.targets.base import Examined
from paceline.targets.configured import Configured
from paceline.targets.polling import all_within, said
from paceline.targets.status import SettingError, Status


@dataclass(frozen=True, kw_only=True)
class TargetLook:
    """The answer of one target. error: why there is no status, where that is a fault. is_wrong: it is one of the
    settings, not of the target's being away.
    """

    name: str
    kind: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    status: Status | None = None
    error: str | None = None
    is_wrong: bool = False

    @property
    def state(self) -> str:
        """up, degraded, down; unreachable; unknown for a kind that tells nothing of its nodes."""
        return self.status.state if self.status else "unreachable" if self.error else "unknown"

    def to_json(self, *, with_nodes: bool = True) -> dict[str, Any]:
        status = self.status.to_json() if self.status else None
        if status is not None and not with_nodes:
            nodes = status.pop("nodes")
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
    """Ask one target for its status.

    Raises:
        TargetError: there is none of this name, or its description can't be read.
    """
    # For its error: of a name that is not known `look_at_all` makes an answer like any other.
    configured.read(workspace_dir, name)
    return look_at_all(workspace_dir, [name], limit_s)[0]


def look_at_all(workspace_dir: Path, names: Iterable[str], limit_s: float) -> list[TargetLook]:
    """Return the status of the targets in the order of their names; none takes longer than `limit_s`."""
    described: dict[str, Configured | TargetError] = {}
    for name in names:
        try:
            described[name] = configured.read(workspace_dir, name)
        # One description that can't be read keeps nobody from asking the other targets.
        except TargetError as error:
            described[name] = error
    calls = {name: partial(_status, found) for name, found in described.items() if isinstance(found, Configured)}
    # A thread for each: the ssh or HTTP call of one that hangs is left behind when the time is over.
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
    """Return the free part of what there is: "6 of 8", "8" where nobody tells what is used, "" where nobody tells anything."""
    if total is None:
        return ""
    return str(total) if used is None else f"{total - used} of {total}"


def _status(found: Configured) -> Status | None:
    target: Any = found.make()
    if not isinstance(target, Examined):
        return None
    status: Status = target.status()
    return status
