"""Output of Slurm's programs; `recorded/README.md` says how it was recorded, and what is missing."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from paceline.targets.slurm.scheduler import CommandResult

_FOLDER = Path(__file__).parent

#: The releases of Slurm whose answers and failures are recorded here.
VERSIONS = ["20.11", "22.05", "24.11", "26.05"]


def recorded(name: str) -> str:
    return (_FOLDER / "recorded" / name).read_text(encoding="utf-8")


def failure(version: str, what: str) -> CommandResult:
    """What a call said that did not go well, such as "controller down: squeue"."""
    found = _failures(version)[what]
    return CommandResult(returncode=found["code"], stdout=found["out"], stderr=found["err"])


@cache
def _failures(version: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(recorded(f"failures-{version}.json"))
    return found
