from __future__ import annotations

import pytest

from paceline.runs.failure import CAUSES, FailureReport
from paceline.supervisor.diagnosis.retries import RETRIED, RETRIED_IF_ASKED, comes_again, is_retried
from tests.helpers import make_job

ASKED = make_job(max_restarts=3, restart_on_exception=True)
NOT_ASKED = make_job(max_restarts=3)


def report(cause: str, exception: str | None = None, traceback: str = "") -> FailureReport:
    return FailureReport(cause=cause, message="Rank 0 failed.", exception=exception, traceback=traceback)


def test_what_came_from_outside_is_retried_and_an_exception_only_when_asked_for():
    assert {cause for cause in CAUSES if is_retried(report(cause), NOT_ASKED)} == RETRIED
    assert {cause for cause in CAUSES if is_retried(report(cause), ASKED)} == RETRIED | RETRIED_IF_ASKED
    assert {"node_lost", "preempted", "port", "killed", "launcher"} == RETRIED
    assert {"exception", "memory"} == RETRIED_IF_ASKED


AT_THE_TOP = """Traceback (most recent call last):
  File "/w/work/train.py", line 3, in <module>
    import helper
  File "/w/work/helper.py", line 1, in <module>
    import torhc
ModuleNotFoundError: No module named 'torhc'
"""
BY_NAME = """Traceback (most recent call last):
  File "/w/work/train.py", line 3, in <module>
    importlib.import_module("models.large")
  File "/usr/lib/python3.11/importlib/__init__.py", line 126, in import_module
    return _bootstrap._gcd_import(name[level:], package, level)
  File "<frozen importlib._bootstrap>", line 1204, in _gcd_import
ModuleNotFoundError: No module named 'models'
"""
INSTEAD = """Traceback (most recent call last):
  File "/w/work/train.py", line 8, in first
    import fast
ModuleNotFoundError: No module named 'fast'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/w/work/train.py", line 3, in <module>
    import slow
ModuleNotFoundError: No module named 'slow'
"""
LATER = """Traceback (most recent call last):
  File "/w/work/train.py", line 30, in <module>
    main()
  File "/w/work/train.py", line 20, in main
    import plots
ModuleNotFoundError: No module named 'plots'
"""
SYNTAX = """  File "/w/work/train.py", line 1
    def
       ^
SyntaxError: invalid syntax
"""


@pytest.mark.parametrize(
    ("exception", "traceback", "again"),
    [
        ("ModuleNotFoundError: No module named 'torhc'", AT_THE_TOP, True),
        ("ModuleNotFoundError: No module named 'models'", BY_NAME, True),
        ("ModuleNotFoundError: No module named 'slow'", INSTEAD, True),
        ("SyntaxError: invalid syntax", SYNTAX, True),
        ("IndentationError: unexpected indent", SYNTAX, True),
        ("ModuleNotFoundError: No module named 'plots'", LATER, False),
        ("ValueError: bad batch", AT_THE_TOP, False),
        (None, "", False),
    ],
)
def test_a_script_that_can_not_be_loaded_is_told_from_one_that_failed_at_work(exception, traceback, again):
    found = report("exception", exception, traceback)
    assert comes_again(found) == again
    assert is_retried(found, ASKED) == (not again)
