"""Where in the script a process crashed, of what Python itself writes when a signal such as SIGSEGV ends it.

The form is that of the standard library's faulthandler: https://docs.python.org/3/library/faulthandler.html
"""

from __future__ import annotations

from collections.abc import Sequence

#: The innermost calls, which come first.
_FRAMES = 15
#: In which file the outermost calls are: those that start the script.
_OURS = "/paceline/worker/"


def crash_stack(lines: Sequence[str]) -> str | None:
    """The fatal error and the calls of the thread that had it, the innermost first; None where nothing was written.

    lines: the end of the worker's log. Other threads, the list of modules and the calls that start the script are left out.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not starts:
        return None
    after = iter(lines[starts[-1] :])
    found = [next(after)]
    for line in after:
        if line.startswith("Current thread "):
            found.append(line)
            break
    for line in after:
        if not line.startswith("  ") or _OURS in line or len(found) == _FRAMES + 2:
            break
        found.append(line)
    return "\n".join(found)
