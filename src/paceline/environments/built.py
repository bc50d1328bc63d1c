"""Records of the environments that are completely built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.job.environment import EnvironmentSpec
from paceline.system.serialization import plain_fields

#: Name of the record's file, which a build writes last: a folder without it is left from a failed build.
RECORD = "paceline-environment.json"


@dataclass(frozen=True, kw_only=True)
class Built:
    """A completely built environment.

    Attributes:
        python: The path of the environment's interpreter.
        bin_dir: The folder of the environment's programs, which comes first on PATH.
        variables: Further variables for processes in the environment.
        base_python: The interpreter from which the environment was made.
        is_layered: Whether the environment also sees the packages of `base_python`.
        environment: The specification from which the environment was built.
        locked: The specification in `environment`, with the installed versions.
        pip, conda: Installed packages, as "name==version" (pip) and "name=version=build" (conda).
        size_bytes: The size on disk, where hard-linked files count once.
        last_used_utc: When a run last found or used the environment.
    """

    key: str
    prefix: Path
    python: Path
    bin_dir: Path
    variables: Mapping[str, str]
    base_python: str
    is_layered: bool
    environment: EnvironmentSpec
    locked: EnvironmentSpec
    pip: tuple[str, ...]
    conda: tuple[str, ...]
    created_utc: str
    build_s: float
    size_bytes: int
    last_used_utc: str

    def to_json(self) -> dict[str, object]:
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Built:
        """Create an environment's record from its JSON form."""
        values = dict(data)
        return cls(
            **values
            | {name: Path(values[name]) for name in ("prefix", "python", "bin_dir")}
            | {name: EnvironmentSpec.from_json(values[name]) for name in ("environment", "locked")}
            | {name: tuple(values[name]) for name in ("pip", "conda")}
        )

    def asked_as(self, environment: EnvironmentSpec) -> Built:
        """Return this record for an equal request with another name or variables."""
        locked = replace(environment, locked_pip=self.locked.locked_pip, locked_conda=self.locked.locked_conda)
        return replace(self, environment=environment, locked=locked)


def utc(seconds: float) -> str:
    """Format seconds since 1970 as UTC, such as "2026-11-29T12:00:00Z"."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
