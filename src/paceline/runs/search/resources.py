"""The memory and CPU time that a run's workers have used, from load samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

from paceline.runs.folder import RunFolder, load_logs
from paceline.runs.metric_reader import parsed_lines
from paceline.system.files import gone_is_fine

#: The longest time in seconds between two samples of one attempt. A longer gap lies between two attempts.
_LONGEST_S = 120.0
_PEAKS = ("memory_gib", "gpu_memory_gib")


def read_resources(folder: RunFolder) -> dict[str, float]:
    """Return the memory and CPU time of a run, as far as measured.

    `memory_gib` and `gpu_memory_gib` are the largest values of one process in any sample. `cpu_s` is the sum over all
    processes. A run that ended before the second sample has no values.

    Examples:
        >>> read_resources(RunFolder(workspace.runs_dir / "digits_1700000000_00000001"))
        {}
    """
    found: dict[str, float] = {}
    for path in load_logs(folder.metrics).values():
        _add(found, path)
    return found


def _add(found: dict[str, float], path: Path) -> None:
    before = math.nan
    with gone_is_fine():
        for entry in parsed_lines(path):
            if not isinstance(entry, dict) or not all(_is_number(entry.get(key)) for key in ("value", "step")):
                continue
            name, value, time = str(entry.get("name")).removeprefix("rank_"), entry["value"], entry["step"]
            if name in _PEAKS:
                found[name] = max(found.get(name, 0.0), value)
            elif name == "cpu_percent":
                # `cpu_percent` is the mean load since the previous sample, so multiply it by the seconds since that sample.
                passed = min(max(0.0, time - before), _LONGEST_S) if before == before else 0.0  # noqa: PLR0124
                found["cpu_s"] = found.get("cpu_s", 0.0) + value / 100 * passed
                before = time


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast("float", value))
