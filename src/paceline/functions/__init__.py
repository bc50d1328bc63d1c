"""Functions as runs: the decorator `paceline.job`, the program that calls a function, and the results.

Workers load `decorator` and `__main__`, which need only the standard library. Submitting programs load the other modules.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.functions.decorator import FunctionJob, job
    from paceline.functions.function_run import FunctionRun, FunctionRuns

__all__ = ["FunctionJob", "FunctionRun", "FunctionRuns", "job"]

__getattr__ = face(
    __name__,
    {
        "paceline.functions.decorator": ("FunctionJob", "job"),
        "paceline.functions.function_run": ("FunctionRun", "FunctionRuns"),
    },
)
