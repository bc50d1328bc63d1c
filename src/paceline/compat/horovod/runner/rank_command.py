"""A rank's command line and path, made on the machine where it runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, MutableMapping, Sequence

MAIN_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "main_script.py")
#: Options of the interpreter that leave the path and the environment alone, with or without a value of their own.
_PLAIN = re.compile(r"-[uBOqSsvdbi]+")
_WITH_VALUE = ("-W", "-X")


def with_names(environment: MutableMapping[str, str], package: str, scratch: str) -> None:
    """Add `paceline` to the path, and `horovod` as fallback.

    `environment` is changed in place. `package` is the folder of `paceline`, and `scratch` one of this rank.
    """
    library = os.path.join(scratch, "lib")
    os.makedirs(library, exist_ok=True)
    # A link: the folder above the package may hold all that is installed beside it.
    os.symlink(package, os.path.join(library, "paceline"))
    own = [library, os.path.join(package, "compat", "shim", "fallback")]
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), *own])


def python_command(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command, through `main_script` for this interpreter.

    `main_script` records the exception that ends a script, and does not let MPI wait for other ranks at its end. The
    interpreter's file decides: a virtual environment has a link to it.
    """
    # By the rank's PATH, not by this process's: `python` may be another one there.
    program = shutil.which(argv[0], path=environment.get("PATH"))
    if program is None or os.path.realpath(program) != os.path.realpath(sys.executable):
        return list(argv)
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        if argv[at] in _WITH_VALUE:
            at += 1
        # Others take the script's place (-c, -m) or make the interpreter ignore PYTHONPATH (-E, -I): the command is left as
        # it is.
        elif not _PLAIN.fullmatch(argv[at]):
            return list(argv)
        at += 1
    if at >= len(argv) or not os.path.isfile(argv[at]):
        return list(argv)
    return [*argv[:at], MAIN_SCRIPT, *argv[at:]]
