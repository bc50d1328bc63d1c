"""The stacks that faulthandler and py-spy write, as the same plain values.

A thread is {"name", "current", "frames": [{"file", "line", "function"}, ...]}, its innermost frame first.
"""

from __future__ import annotations

import json
import re
from typing import Any

_THREAD = re.compile(
    r"(?P<current>Current t|T)hread (?P<number>0x[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
#: The last line of a worker's main thread, or of a thread that Python has started.
_LAST = re.compile(
    r'(/paceline/worker/__main__\.py", line \d+ in <module>|/threading\.py", line \d+ in _bootstrap)\n\Z'
)
#: faulthandler writes so many frames of a thread at most, and then this.
_CUT = "  ...\n"


def is_whole(text: str) -> bool:
    """True if a dump of a worker of ours surely has ended."""
    return _LAST.search(text) is not None or text.endswith(_CUT)


def from_faulthandler(text: str) -> list[dict[str, Any]]:
    """The threads of a dump, the main one first: of the one thread that has written it, or of all."""
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith("Stack (most recent call first):"):
            threads.append({"name": "", "current": True, "frames": []})
        elif found := _THREAD.match(line):
            name = (found["name"] or "").strip()
            threads.append({"name": name, "current": found["current"] == "Current t", "frames": []})
        elif threads and (frame := _FRAME.match(line)):
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            threads[-1]["frames"].append({"file": frame["file"], "line": number, "function": frame["function"]})
    if threads:
        # The main thread is the oldest, and the last.
        threads[-1]["name"] = threads[-1]["name"] or "main"
    return threads[::-1]


def from_py_spy(text: str, pid: int) -> list[dict[str, Any]]:
    """The threads that `py-spy dump --json` tells of."""
    threads = []
    for thread in json.loads(text):
        frames = [
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
