"""`make check` (pytest --quick): the tests that start no process, in random order, for people who are editing.

Folders that mostly start processes are not collected. In the others, a test that starts a process is skipped at that point.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent

#: Folders and files of tests that load torch or TensorFlow, or that start processes in nearly every test.
SLOW = (
    *("chaos", "collectives", "engines", "kube", "parallel", "projects", "torch_mpi", "warm"),
    *("compat/horovod", "docs", "package", "test_torch_private.py", "ui/test_browser*.py"),
    *("test_forked.py", "test_hiding.py", "test_warm.py"),
)

_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"})
REASON = "starts a process: make test runs it"


class NoProcesses:
    """A plugin that skips each test at the point where it starts a process."""

    def __init__(self) -> None:
        self._is_armed = self._has_started = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: tuple[Any, ...]) -> None:
        if self._is_armed and event in _EVENTS:
            self._has_started = True
            pytest.skip(REASON)

    def pytest_configure(self, config: pytest.Config) -> None:
        # If a test is skipped after it has begun, the garbage collector finds its files and threads, and causes these
        # warnings.
        for kind in ("ResourceWarning", "pytest.PytestUnhandledThreadExceptionWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{kind}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        warnings.simplefilter("ignore", ResourceWarning)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return any(collection_path.match(f"{TESTS}/{name}") for name in SLOW) or None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._is_armed, self._has_started = True, False
        try:
            return (yield)
        finally:
            self._is_armed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # Mark the test as skipped here: pytest does not see a skip that was raised in a thread, or that an `except` of
        # the tested code has caught.
        if self._has_started and not report.skipped:
            report.outcome, report.longrepr = "skipped", (__file__, 0, f"Skipped: {REASON}")
        return report
