"""`python -m paceline.functions [OPTIONS] MODULE:FUNCTION [--NAME VALUE ...]`: call a function, and store its result.

--pickle: store the result as a pickle. --limit: the largest size of the result in bytes. --calls FOLDER: read the call,
or a list of calls, from this folder. --at-once: how many calls of a list to make at the same time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from paceline.errors import JobError
from paceline.functions import calls, finding


class Words(NamedTuple):
    """The parsed command line of the program that calls a function.

    This class is not a dataclass, because importing dataclasses would take a third of this program's import time.
    """

    function: str
    rest: tuple[str, ...]
    pickled: bool
    limit: int
    folder: str | None
    at_once: int


def parsed(argv: Sequence[str]) -> Words:
    """Parse the command line of `python -m paceline.functions`."""
    options, rest = {}, list(argv)
    while rest[0].startswith("--"):
        name = rest.pop(0)
        options[name] = "" if name == "--pickle" else rest.pop(0)
    return Words(
        function=rest[0],
        rest=tuple(rest[1:]),
        pickled="--pickle" in options,
        limit=int(options["--limit"]),
        folder=options.get("--calls"),
        at_once=int(options.get("--at-once", 0)),
    )


def load(function: str) -> Callable[..., object]:
    """Import `module:name`, and return the function.

    Raises:
        JobError: The module has no such function.
    """
    module, _, name = function.partition(":")
    finding.loading = module
    try:
        found = getattr(import_module(module), name, None)
    finally:
        finding.loading = None
    if found is None:
        raise JobError(f"{module!r} has no function {name!r}, as it had when the run was submitted.")
    called: Callable[..., object] = getattr(found, "function", found)
    return called


def main(argv: Sequence[str]) -> None:
    words = parsed(argv)
    outputs, rank = Path(os.environ["PACELINE_OUTPUT_DIR"]), int(os.environ["PACELINE_RANK"])
    function = load(words.function)
    given = calls.load(Path(words.folder), calls.CALLS, pickled=words.pickled) if words.folder else None
    if isinstance(given, list):
        if rank == 0:
            from paceline.functions.pool import call_all

            folder = outputs / calls.RESULTS
            call_all(function, given, folder, at_once=words.at_once, pickled=words.pickled, limit=words.limit)
        return  # rank 0 makes all calls; the other ranks only keep their GPUs reserved
    args, kwargs = (given["args"], given["kwargs"]) if given is not None else calls.call_of(words.rest)
    result = calls.make(function, args, kwargs)
    name = f"the result of {function.__name__}()"
    calls.store(outputs, calls.result_stem(rank), name, result, pickled=words.pickled, limit=words.limit)


if __name__ == "__main__":
    main(sys.argv[1:])
