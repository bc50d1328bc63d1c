"""A rank's command line and PYTHONPATH, made on the rank's machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, MutableMapping, Sequence

MAIN_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "main_script.py")
#: Matches options of the Python interpreter that change neither sys.path nor the use of environment variables.
_PLAIN = re.compile(r"-[uBOqSsvdbi]+")
_WITH_VALUE = ("-W", "-X")


def with_names(environment: MutableMapping[str, str], package: str, scratch: str) -> None:
    """Add `paceline` to PYTHONPATH, and a fallback for a missing `horovod`.

    `environment` is changed in place. `package` is the folder of `paceline`, and `scratch` is the rank's folder.
    """
    library = os.path.join(scratch, "lib")
    os.makedirs(library, exist_ok=True)
    # Link only this package, because its parent folder may be site-packages with many other packages.
    os.symlink(package, os.path.join(library, "paceline"))
    own = [library, os.path.join(package, "compat", "shim", "fallback")]
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), *own])


def python_command(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command, with `main_script` inserted before a script that this interpreter runs.

    `main_script` records the exception that ends a script, and lets the script exit without waiting for MPI. Two
    interpreters are equal if their symbolic links lead to the same file, as in a virtual environment.
    """
    # Search in the rank's PATH: `python` may be another program there than in the PATH of this process.
    program = shutil.which(argv[0], path=environment.get("PATH"))
    if program is None or os.path.realpath(program) != os.path.realpath(sys.executable):
        return list(argv)
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        if argv[at] in _WITH_VALUE:
            at += 1
        # The other options replace the script (-c, -m), or make the interpreter ignore PYTHONPATH (-E, -I). With such an option,
        # don't change the command.
        elif not _PLAIN.fullmatch(argv[at]):
            return list(argv)
        at += 1
    if at >= len(argv) or not os.path.isfile(argv[at]):
        return list(argv)
    return [*argv[:at], MAIN_SCRIPT, *argv[at:]]
