"""Describe the use of memory when a worker ran out of it, from earlier samples: pure functions.

The kernel kills a process as soon as memory runs out, but samples of its memory are seconds apart. So the text gives
the last sample with its age, and the peak that the kernel has counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.observe.load_watch import Sample

_GIB = 1 << 30
#: An increase by this factor over this many seconds counts as growth; a smaller increase may come from the start of the script.
_GROWN, _GROWN_S = 1.3, 20.0
#: If the peak is more than this many times the last sample, the process reached it after that sample.
_BEYOND = 1.05
#: The report names another rank if its memory is more than this many times the memory of the rank that failed.
_LARGER = 1.5
#: If other programs use more than this share of a node's memory, the report mentions them.
_OTHERS = 0.3
#: A node counts as having free memory if less than this share of its memory was in use.
_ROOM = 0.6


def memory_text(
    rank: int,
    samples: Sequence[Sample],
    node_ranks: Mapping[int, int],
    plan: Mapping[str, object] | None,
    now_s: float | None = None,
    *,
    peak_bytes: int = 0,
    by_kernel: bool = True,
    on_gpu: bool = False,
) -> str:
    """Return a text about a rank's memory and how to reduce it; "" if unknown.

    node_ranks: Rank of each worker -> rank of its node.
    plan: Planned bytes by their use, such as parameters, from `paceline.parallel`; None without a plan.
    now_s: The present Unix time; None reads the clock.
    peak_bytes: The process's peak memory, or 0 if unknown.
    by_kernel: Whether the kernel killed the process. Otherwise the process's own request for memory failed.
    on_gpu: Whether a GPU's memory ran out. The result is then only about the plan, because torch's error message itself
        says how much memory is used.
    """
    if on_gpu:
        return _planned(plan)
    series = [(sample.at_s, sample.ranks[rank]) for sample in samples if "memory_gib" in sample.ranks.get(rank, {})]
    said = [
        text
        for text in (
            _held(rank, series, now_s, peak_bytes / _GIB),
            *_on_node(rank, samples, node_ranks, by_kernel),
            _planned(plan),
        )
        if text
    ]
    # Ignore growth before the first step, when the model is still being built.
    if _growth(series) and series[len(series) // 3][1].get("steps", 0.0) > 0:
        said.append(
            "What grows from step to step is kept somewhere: losses with their graph (log loss.item()), a list, a cache."
        )
    return " ".join(said)


def _held(rank: int, series: Sequence[tuple[float, Mapping[str, float]]], now_s: float | None, peak_gib: float) -> str:
    if not series:
        return f"Rank {rank} held {_text(peak_gib)} at its most." if peak_gib else ""
    at_s, last = series[-1]
    ago = max(0.0, (time.time() if now_s is None else now_s) - at_s)
    below = int(last.get("processes", 1)) - 1
    whose = f", with the {below} processes below it" if below > 1 else ", with the process below it" if below else ""
    text = f"Rank {rank} held {_text(last['memory_gib'])}{whose}"
    if last.get("gpu_memory_gib"):
        text += f", and {_text(last['gpu_memory_gib'])} of GPUs"
    text += f", when it was last seen, {ago:.0f} s ago"
    if peak_gib > _BEYOND * last["memory_gib"]:
        text += f", and {_text(peak_gib)} at its most"
    if grown := _growth(series):
        text += f"; it had grown from {_text(grown[1])} in {grown[0]:.0f} s"
    return f"{text}."


def _growth(series: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[float, float] | None:
    """Return (duration_s, start_gib) of a worker's steady memory growth, or None.

    The first third of the samples, given as (Unix time, values by name), is ignored.
    """
    later = series[len(series) // 3 :]
    if len(later) < 4 or later[-1][0] - later[0][0] < _GROWN_S:
        return None
    values = [load["memory_gib"] for _, load in later]
    rises = sum(after > before for before, after in pairwise(values))
    if values[-1] < _GROWN * values[0] or rises < 0.7 * (len(values) - 1):
        return None
    return later[-1][0] - later[0][0], values[0]


def _on_node(rank: int, samples: Sequence[Sample], node_ranks: Mapping[int, int], by_kernel: bool) -> list[str]:
    # Use the samples that include this rank, because the last sample has no values of ranks that had ended before.
    seen = [sample for sample in samples if "memory_gib" in sample.ranks.get(rank, {})] or samples[-1:]
    if not seen:
        return []
    last, node = seen[-1], node_ranks.get(rank, 0)
    here = {
        one: load["memory_gib"]
        for one, load in last.ranks.items()
        if node_ranks.get(one) == node and "memory_gib" in load
    }
    load = last.nodes.get(node, {})
    used, total = load.get("memory_gib"), load.get("memory_total_gib")
    if used is None or not total or not here:
        return []
    together = sum(here.values())
    workers = "the worker" if len(here) == 1 else f"the {len(here)} workers"
    said = []
    if len(here) > 1:
        said.append(
            f"On its node {workers} held {_text(together)} together, and {_text(used)} of {_text(total)} were in use."
        )
    else:
        said.append(f"On its node {_text(used)} of {_text(total)} were in use.")
    largest = max(here, key=lambda one: here[one])
    if largest != rank and here[largest] > _LARGER * here.get(rank, 0.0):
        said.append(f"Rank {largest} held most of it, {_text(here[largest])}.")
    if not by_kernel and used < _ROOM * total and not last.ranks.get(rank, {}).get("gpu_memory_gib"):
        said.append(
            "So there was room: a limit of its own (ulimit), or one very large request, is the likelier reason."
        )
    if used - together > _OTHERS * total:
        said.append(f"{_text(used - together)} of that were not this run's.")
    return said


def _planned(plan: Mapping[str, Any] | None) -> str:
    if not plan:
        return ""
    parts = [
        f"{name} {_text(plan[name] / _GIB)}"
        for name in ("parameters", "gradients", "optimizer", "activations")
        if isinstance(plan.get(name), (int, float))
    ]
    if not parts:
        return ""
    rest = "activations, data" if plan.get("activations") is None else "data"
    return f"By parallelize's plan: {', '.join(parts)}; the rest is {rest} and what libraries keep."


def _text(gib: float) -> str:
    return f"{gib * 1024:.0f} MiB" if gib < 1 else f"{gib:.1f} GiB"
