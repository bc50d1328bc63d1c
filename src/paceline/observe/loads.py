"""The resource use of a run, read from the samples of `observe.load_watch`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from paceline.observe.stragglers import RunPace, lines
from paceline.runs.folder import RunFolder, load_logs, node_logs
from paceline.runs.metric_reader import MetricEntry, parsed_lines
from paceline.runs.record import RunRecord
from paceline.runs.series import MetricSeries, series_of
from paceline.system.files import read_json

NODE_HEADER = ("NODE", "CPU", "MEMORY", "GPU", "GPU MEMORY", "DISK IN/OUT", "NET IN/OUT")
RANK_HEADER = (
    *("RANK", "NODE", "CPU", "MEMORY", "GPU", "GPU MEMORY", "DISK IN/OUT", "NET IN/OUT"),
    *("STEPS", "PER S", "COMPUTE", "DATA", "OTHERS"),
)


def last(folder: RunFolder) -> dict[str, Any] | None:
    """Return the newest sample of a run's resource use, or None."""
    attempts = (int(path.name) for path in folder.attempt(1).parent.glob("[0-9]*") if path.name.isdecimal())
    for number in sorted(attempts, reverse=True):
        found: dict[str, Any] | None = read_json(folder.load(number))
        if found is not None:
            return found
    return None


def pace(folder: RunFolder, record: RunRecord) -> RunPace:
    """Return how the ranks have spent their time in the last attempt."""
    found = last(folder)
    return (
        RunPace(is_over=record.is_terminal)
        if found is None
        else RunPace.from_json(found["pace"], is_over=record.is_terminal)
    )


def series(folder: RunFolder) -> dict[str, dict[int, dict[str, MetricSeries]]]:
    """Return all samples of a run as series, such as the series "cpu_percent".

    The result is {"nodes": {node rank: {name: series}}, "ranks": {rank: {name: series}}}. Steps are seconds since 1970.
    """
    return {
        "nodes": {number: _series(path, number, "") for number, path in sorted(node_logs(folder.metrics).items())},
        "ranks": {number: _series(path, number, "rank_") for number, path in sorted(load_logs(folder.metrics).items())},
    }


def whole(folder: RunFolder, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with means over the whole run, and maximums for memory.

    The result has only the nodes and ranks of `sample`: an elastic run may have had more nodes in earlier attempts.
    """
    found = {**sample}
    for kind, logs in series(folder).items():
        found[kind] = {number: {**load} for number, load in sample[kind].items()}
        for number, values in logs.items():
            load = found[kind].get(str(number))
            if load is None:
                continue
            for name, one in values.items():
                numbers = [value for value in one.values if isinstance(value, (int, float))]
                if numbers:
                    load[name] = max(numbers) if "memory" in name else sum(numbers) / len(numbers)
    return found


def node_rows(sample: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return table rows, one for each node, with the columns of `NODE_HEADER`."""
    rows: list[tuple[str, ...]] = []
    for _, load in sorted(sample["nodes"].items(), key=lambda item: int(item[0])):
        gpus = [name[: -len("_percent")] for name in load if name.startswith("gpu") and name.endswith("_percent")]
        percents = [load[f"{gpu}_percent"] for gpu in gpus]
        held, total = (sum(load.get(f"{gpu}_{what}_gib", 0.0) for gpu in gpus) for what in ("memory", "memory_total"))
        rows.append(
            (
                str(load.get("name", "")),
                _percent(load.get("cpu_percent")),
                _of(load.get("memory_gib"), load.get("memory_total_gib")),
                _percent(sum(percents) / len(percents) if percents else None),
                _of(held, total) if gpus else "-",
                _both(load.get("disk_read_mib_s"), load.get("disk_write_mib_s")),
                _both(load.get("net_in_mib_s"), load.get("net_out_mib_s")),
            )
        )
    return rows


def rank_rows(sample: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return table rows, one for each rank, with the columns of `RANK_HEADER`."""
    rows: list[tuple[str, ...]] = []
    for rank, load in sorted(sample["ranks"].items(), key=lambda item: int(item[0])):
        data, others = load.get("data_percent"), load.get("wait_percent")
        trains = bool(load.get("steps")) and data is not None
        rows.append(
            (
                rank,
                str(load.get("node", "")),
                _percent(load.get("cpu_percent")),
                _of(load.get("memory_gib"), None),
                _percent(load.get("gpu_percent")),
                _of(load.get("gpu_memory_gib"), None),
                _both(load.get("read_mib_s"), load.get("write_mib_s")),
                _both(load.get("net_in_mib_s"), load.get("net_out_mib_s")),
                f"{load['steps']:.0f}" if load.get("steps") else "-",
                f"{load['steps_s']:.3g}" if trains and "steps_s" in load else "-",
                _percent(max(0.0, 100 - data - (others or 0.0)) if trains else None),
                _percent(data if trains else None),
                _percent(others if trains else None),
            )
        )
    return rows


def shown_columns(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return header and rows without columns that have no value."""
    kept = [column for column in range(len(header)) if any(row[column] not in ("-", "") for row in rows)]
    return [tuple(line[column] for column in kept) for line in (header, *rows)]


def pace_lines(sample: Mapping[str, Any], *, is_over: bool) -> list[str]:
    """Return lines on how each rank spent its time, and on stragglers."""
    return lines(RunPace.from_json(sample["pace"], is_over=is_over))


def _series(path: Path, number: int, prefix: str) -> dict[str, MetricSeries]:
    found: dict[str, list[MetricEntry]] = {}
    for entry in parsed_lines(path):
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            name = entry["name"].removeprefix(prefix)
            found.setdefault(name, []).append(cast("MetricEntry", {"time": 0.0, **entry, "rank": number, "attempt": 1}))
    return {name: series_of(name, entries) for name, entries in found.items()}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _of(held: float | None, total: float | None) -> str:
    if held is None:
        return "-"
    return f"{_gib(held)} of {_gib(total)} GiB" if total else f"{_gib(held)} GiB"


def _gib(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _both(first: float | None, second: float | None) -> str:
    if first is None or second is None:
        return "-"
    return f"{first:.1f}/{second:.1f} MiB/s"
