"""After which failures another attempt is made: pure functions of the report."""

from __future__ import annotations

import re

from paceline.job.job import Job
from paceline.runs.failure import FailureReport

#: Causes outside the script: another attempt may do better.
RETRIED = frozenset({"node_lost", "preempted", "port", "killed", "launcher"})
#: Causes that most often come again, retried with `restart_on_exception` alone.
RETRIED_IF_ASKED = frozenset({"exception", "memory"})
#: Causes after which the nodes are given back, and others asked for.
NODES_GONE = frozenset({"node_lost", "preempted"})

_OF_SOURCE = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"})
_FRAME = re.compile(r'^  File "([^"]*)", line \d+, in (.+)$', re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"


def is_retried(report: FailureReport, job: Job) -> bool:
    """True if an attempt that failed so is followed by another, as long as there are any left."""
    if report.cause in RETRIED or (report.cause == "hang" and job.on_hang == "restart"):
        return True
    return job.restart_on_exception and report.cause in RETRIED_IF_ASKED and not comes_again(report)


def comes_again(report: FailureReport) -> bool:
    """True if the script can't even be loaded: its source, or a module that it imports at its top, is wrong or missing.

    An import that a function of the script's makes later is not meant: a file system may have failed by then.
    """
    if report.exception is None or report.exception.partition(":")[0] not in _OF_SOURCE:
        return False
    # Of chained exceptions the last is the one that left the script.
    frames = _FRAME.findall((report.traceback or "").rpartition(_TRACEBACK)[2])
    return all(
        function == "<module>" or file.startswith("<frozen importlib") or file.endswith("importlib/__init__.py")
        for file, function in frames
    )
