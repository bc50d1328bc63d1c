"""Define the job as frozen data that is converted to JSON and back: job, environment, data references, plan.

A call of the package is the decorator of functions, because the attribute `job` of `paceline` is both.

Examples:
    >>> @pl.job(nodes=2, gpus=1)  # doctest: +SKIP
    ... def double(x):
    ...     return 2 * x
"""

from __future__ import annotations

import sys
from types import ModuleType

from paceline.system.lazy_import import from_above


class _Decorator(ModuleType):
    def __call__(self, *args: object, **options: object) -> object:
        return from_above("job")(*args, **options)  # type: ignore[operator]


sys.modules[__name__].__class__ = _Decorator
