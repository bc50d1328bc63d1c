"""Rules for the functions that a worker can import, and the path of this program's main script."""

from __future__ import annotations

import os
import sys
from types import FunctionType

from paceline.errors import JobError

_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200  # flags of code objects, such as `inspect.CO_GENERATOR`
_LONGER = {_GENERATOR: "a generator", _COROUTINE: "a coroutine", _ASYNC_GENERATOR: "an asynchronous generator"}

#: Name of the module that this worker is importing at the moment to find the job's function; None at other times.
loading: str | None = None


def check_function(function: object) -> FunctionType:
    """Return the function if a worker can import it by name.

    Raises:
        JobError: A worker can't import it; the message says why.
    """
    if not isinstance(function, FunctionType):
        raise JobError(f"@paceline.job on {function!r}, which is not a function. Decorate a function of a module.")
    code, name, module = function.__code__, function.__qualname__, function.__module__
    if function.__name__ == "<lambda>":
        raise JobError("@paceline.job on a lambda, which has no name to import it by. Write it with def, in a module.")
    if "<locals>" in name:
        uses = f" It uses {', '.join(code.co_freevars)} of the outer function: make it an argument." * bool(
            code.co_freevars
        )
        raise JobError(
            f"@paceline.job on {name}, which is inside a function: a worker can't import it. Move it to the module.{uses}"
        )
    if "." in name:
        raise JobError(
            f"@paceline.job on the method {name}: a worker has no such object. Write a function that makes the object."
        )
    for flag, kind in _LONGER.items():
        if code.co_flags & flag:
            how = "Return a list of its values." if flag != _COROUTINE else "Call asyncio.run() in a plain function."
            raise JobError(f"@paceline.job on {name}, which is {kind}: it has no result to send. {how}")
    if module == "__main__" and main_file() is None:
        raise JobError(
            f"@paceline.job on {name} of a notebook or prompt, which a worker can't import. Write it to a file, in a notebook by "
            f"%%writefile jobs.py, and import it: from jobs import {name}."
        )
    return function


def main_file() -> str | None:
    """Return the main script's path; None in a notebook or prompt."""
    main = vars(sys.modules["__main__"])
    path = main.get("__file__")
    return path if path and os.path.isfile(path) and "get_ipython" not in main else None
