"""Parse stacks of faulthandler and py-spy, and collectives of torch's flight recorder.

A thread is {"name", "current": has the GIL, "frames": [{"file", "line", "function"}, ...]}, innermost frame first.
The recorder's format (2.x, JSON): https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from paceline.observe.node.messages import Collective, Frame, Recorded, Thread
from paceline.system.collective_state import ranks_text

_THREAD = re.compile(
    r"(?P<current>Current t|T)hread (?P<number>0x[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
#: Matches the end of a complete dump: the outermost frame of the main thread, or of a thread that Python started.
_LAST = re.compile(
    r'(/paceline/worker/__main__\.py", line \d+ in <module>|/threading\.py", line \d+ in _bootstrap)\n\Z'
)
#: The line that faulthandler writes after its maximum number of frames.
_CUT = "  ...\n"

_ITEM_BYTES = {
    **dict.fromkeys(("Float", "Int", "ComplexHalf", "UInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat", "UInt64"), 8),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    "ComplexDouble": 16,
}


def is_whole(text: str) -> bool:
    """Return whether a worker has certainly finished writing its stack dump."""
    return _LAST.search(text) is not None or text.endswith(_CUT)


def from_faulthandler(text: str) -> list[Thread]:
    """Return the threads of faulthandler's stack dump, the main thread first."""
    threads: list[Thread] = []
    for line in text.splitlines():
        if line.startswith("Stack (most recent call first):"):
            threads.append({"name": "", "current": True, "frames": []})
        elif found := _THREAD.match(line):
            name = (found["name"] or "").strip()
            threads.append({"name": name, "current": found["current"] == "Current t", "frames": []})
        elif threads and (frame := _FRAME.match(line)):
            number = int(frame["line"]) if frame["line"].isdecimal() else 0
            threads[-1]["frames"].append({"file": frame["file"], "line": number, "function": frame["function"]})
    if threads:
        # A dump lists the newest thread first, so the main thread, which is the oldest, comes last.
        threads[-1]["name"] = threads[-1]["name"] or "main"
    return threads[::-1]


def from_py_spy(text: str, pid: int) -> list[Thread]:
    """Return the threads in the output of `py-spy dump --json`."""
    threads: list[Thread] = []
    for thread in json.loads(text):
        frames: list[Frame] = [
            {
                "file": frame.get("filename") or frame.get("module") or "",
                "line": frame.get("line") or 0,
                "function": frame["name"],
            }
            for frame in thread.get("frames") or ()
        ]
        is_main = thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread"
        name = "main" if is_main else thread.get("thread_name") or ""
        threads.append({"name": name, "current": bool(thread.get("owns_gil")), "frames": frames})
    return sorted(threads, key=lambda thread: thread["name"] != "main")


def under_way(data: bytes) -> Recorded:
    """Return unfinished collectives in torch's flight-recorder data, or raise ValueError."""
    text, _, more = data.rpartition(b"\n")
    if not text:
        return {"entries": [], "last": {}}
    told, ranks = json.loads(text), json.loads(more)
    entries: list[Collective] = []
    last: dict[str, int] = {}
    for one in told.get("entries") or ():
        group = str(one["process_group"][0])
        number = int(one["p2p_seq_id"] if one.get("is_p2p") else one["collective_seq_id"])
        if not one.get("is_p2p"):
            last[group] = max(last.get(group, 0), number)
        if not one.get("retired") and one.get("state") != "completed":
            entries.append(_entry(one, group, number, ranks_text(ranks.get(group) or ())))
    return {"entries": entries, "last": last}


def _entry(one: dict[str, Any], group: str, number: int, ranks: str) -> Collective:
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
        # The name is, for example, "gloo:all_reduce" or "nccl:all_reduce".
        "kind": str(one.get("profiling_name", "")).partition(":")[2] or "collective",
        "name": "",
        "number": number,
        "shape": shape,
        "bytes": sum(sizes),
        "ranks": ranks,
        "began": one.get("time_created_ns", 0) / 1e9,
    }
