"""Decorators that mark public names as deprecated or experimental."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type[object])


def deprecated(
    since: str, *, removed_in: str, instead: str
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that warns on each call that a function is deprecated.

    Args:
        since: The version that deprecates the function, such as "0.2".
        removed_in: The version that no longer has the function.
        instead: The name to call instead, as users write it.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        text = f"{function.__qualname__} is deprecated since Paceline {since} and goes away in {removed_in}. Use {instead}."

        @functools.wraps(function)
        def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        wrapper.__doc__ = f"{function.__doc__ or ''}\n\nDeprecated: {text}".lstrip()
        return wrapper

    return decorate


def experimental(since: str) -> Callable[[_Class], _Class]:
    """Return a decorator that adds "may change" to a class's docstring.

    Args:
        since: The version that introduces the class, such as "0.1".
    """

    def decorate(kind: _Class) -> _Class:
        kind.__doc__ = f"{kind.__doc__ or ''}\n\nExperimental since Paceline {since}: any version may change it."
        return kind

    return decorate
