"""A finished environment: where it lies and what was installed into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.job.environment import EnvironmentSpec
from paceline.system.serialization import plain_fields

#: Written last into the environment's folder: without it, the folder is what a build left that did not end.
RECORD = "paceline-environment.json"


@dataclass(frozen=True, kw_only=True)
class Built:
    """An environment that is there.

    python: its interpreter. bin_dir: its programs, to be put first on PATH. variables: what its processes need beside
        that. base_python: the interpreter that it was made from.
    is_layered: whether what that has installed is there too.
    environment: as asked for. locked: the same with the exact versions that were installed.
    pip: "name==version" of what pip packages brought into it. conda: "name=version=build".
    size_bytes: on disk, counted once for files that share it. last_used_utc: when it was last found or held.
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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Built:
        """Make one of what `to_json` wrote."""
        values = dict(data)
        return cls(
            **values
            | {name: Path(values[name]) for name in ("prefix", "python", "bin_dir")}
            | {name: EnvironmentSpec.from_json(values[name]) for name in ("environment", "locked")}
            | {name: tuple(values[name]) for name in ("pip", "conda")}
        )

    def asked_as(self, environment: EnvironmentSpec) -> Built:
        """The same, for an environment of equal content: its name and variables are its own."""
        locked = replace(environment, locked_pip=self.locked.locked_pip, locked_conda=self.locked.locked_conda)
        return replace(self, environment=environment, locked=locked)


def utc(seconds: float) -> str:
    """A time, given in seconds since 1970, as records of environments have it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
