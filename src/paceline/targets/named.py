"""The compute targets of a workspace by name, as `Workspace.compute_targets` has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.errors import TargetError
from paceline.targets import configured
from paceline.targets.configured import Configured


class ComputeTargets(Mapping[str, Configured]):
    """Name -> compute target: `local`, and those that the workspace has now. To be read; `paceline compute` changes them.

    `[name]` raises KeyError for a name that there is not, and TargetError for a description that can't be read.
    """

    def __init__(self, workspace_dir: Path) -> None:
        self._workspace_dir = workspace_dir

    def __getitem__(self, name: str) -> Configured:
        if name not in configured.names(self._workspace_dir):
            try:
                configured.read(self._workspace_dir, name)
            except TargetError as error:
                raise KeyError(str(error)) from None
        return configured.read(self._workspace_dir, name)

    def __iter__(self) -> Iterator[str]:
        return iter(configured.names(self._workspace_dir))

    def __len__(self) -> int:
        return len(configured.names(self._workspace_dir))

    def __repr__(self) -> str:
        return f"ComputeTargets({', '.join(self)})"
