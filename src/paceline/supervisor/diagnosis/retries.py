"""Decide which failures another attempt may fix: pure functions of the failure report."""

from __future__ import annotations

import re

from paceline.job.job import Job
from paceline.runs.failure import FailureReport

#: Causes outside the script: another attempt may succeed.
RETRIED = frozenset({"node_lost", "preempted", "port", "killed", "launcher"})
#: Causes that usually occur again. Another attempt follows only if the user has set `restart_on_exception`.
RETRIED_IF_ASKED = frozenset({"exception", "memory"})

_OF_SOURCE = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"})
_FRAME = re.compile(r'^  File "([^"]*)", line \d+, in (.+)$', re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"


def is_retried(report: FailureReport, job: Job) -> bool:
    """Return whether a failure of this kind leads to another attempt.

    Whether `max_restarts` still allows an attempt is not checked.
    """
    if report.cause in RETRIED or (report.cause == "hang" and job.on_hang == "restart"):
        return True
    return job.restart_on_exception and report.cause in RETRIED_IF_ASKED and not comes_again(report)


def comes_again(report: FailureReport) -> bool:
    """Return whether the script can't be loaded, so that it fails in each attempt.

    The reason is then a syntax error, or a failed import at the top level of a module. An import that fails inside a
    function does not count, because a file system may have failed after the start.
    """
    if report.exception is None or report.exception.partition(":")[0] not in _OF_SOURCE:
        return False
    # Of chained exceptions, look only at the last: it is the exception that ended the script.
    frames = _FRAME.findall((report.traceback or "").rpartition(_TRACEBACK)[2])
    return all(
        function == "<module>" or file.startswith("<frozen importlib") or file.endswith("importlib/__init__.py")
        for file, function in frames
    )
