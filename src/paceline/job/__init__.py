"""Define the job and its parts as frozen data with JSON forms.

`paceline.job` is this package and also a decorator (`paceline.functions`), so the package itself can be called.

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
