"""What torch's flight recorder has told (`paceline.torch_private.recorded_collectives`), as a board has it.

The recorder's format: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html (version 2.x, JSON).
"""

from __future__ import annotations

import json
import math
from typing import Any

from paceline.system.collective_state import ranks_text

_ITEM_BYTES = {
    **dict.fromkeys(("Float", "Int", "ComplexHalf", "UInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat", "UInt64"), 8),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    "ComplexDouble": 16,
}


def under_way(data: bytes) -> dict[str, Any]:
    """{"entries": as `paceline.system.collective_state.BoardEntry`, "last": group -> number of the last collective begun}.

    Raises:
        ValueError: nothing that a recorder writes.
    """
    text, _, more = data.rpartition(b"\n")
    if not text:
        return {"entries": [], "last": {}}
    told, ranks = json.loads(text), json.loads(more)
    entries: list[dict[str, Any]] = []
    last: dict[str, int] = {}
    for one in told.get("entries") or ():
        group = str(one["process_group"][0])
        number = int(one["p2p_seq_id"] if one.get("is_p2p") else one["collective_seq_id"])
        if not one.get("is_p2p"):
            last[group] = max(last.get(group, 0), number)
        if not one.get("retired") and one.get("state") != "completed":
            entries.append(_entry(one, group, number, ranks_text(ranks.get(group) or ())))
    return {"entries": entries, "last": last}


def _entry(one: dict[str, Any], group: str, number: int, ranks: str) -> dict[str, Any]:
    shapes = one.get("input_sizes") or one.get("output_sizes") or []
    dtypes = one.get("input_dtypes") or one.get("output_dtypes") or []
    sizes = [math.prod(shape) * _ITEM_BYTES.get(dtype, 1) for shape, dtype in zip(shapes, dtypes, strict=False)]
    shape = (
        f"{shapes[0]} {str(dtypes[0]).lower()}"
        if len(shapes) == 1 and dtypes
        else f"{len(shapes)} tensors"
        if shapes
        else ""
    )
    return {
        "channel": f"torch {group}",
        # Such as "gloo:all_reduce"; NCCL's begin with "nccl:".
        "kind": str(one.get("profiling_name", "")).partition(":")[2] or "collective",
        "name": "",
        "number": number,
        "shape": shape,
        "bytes": sum(sizes),
        "ranks": ranks,
        "began": one.get("time_created_ns", 0) / 1e9,
    }
