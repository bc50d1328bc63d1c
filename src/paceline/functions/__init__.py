"""Functions as runs: the decorator `paceline.job`, the program that calls a function in a worker, and its results.

`decorator` and `__main__` are loaded in workers and need the standard library alone. The others belong to the submitting program.
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
