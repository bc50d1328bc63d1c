"""The installed packages of an interpreter, with exact versions.

Another interpreter runs the text of this file, as `paceline.remote.foreign_python` does on nodes. So it uses only the standard
library of Python 3.8, with annotations in quotes.
"""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata

_TIMEOUT_S = 60.0
_MARK = "PACELINE-PACKAGES "


def installed_here() -> "dict[str, object]":
    """Return python, python_version, and the sorted "name==version" of each distribution."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        # Of two distributions with one name, `import` uses the first.
        if name and name.lower() not in found:
            found[name.lower()] = "%s==%s" % (name, distribution.version)  # noqa: UP031
    return {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "packages": [found[name] for name in sorted(found)],
    }


def ask(python: str, variables: "dict[str, str]") -> "dict[str, object]":
    """Return `installed_here` of another interpreter, or {} if it does not answer.

    variables: added to its environment.
    """
    if os.path.realpath(python) == os.path.realpath(sys.executable) and not variables and sys.prefix == _prefix(python):
        return installed_here()
    with open(__file__, encoding="utf-8") as own:
        text = own.read() + "\nprint(%r + json.dumps(installed_here()))\n" % _MARK  # noqa: UP031
    try:
        done = subprocess.run(
            [python, "-"],
            input=text.encode(),
            capture_output=True,
            env={**os.environ, **variables, "PYTHONSAFEPATH": "1"},
            timeout=_TIMEOUT_S,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            found = json.loads(line[len(_MARK) :])
            return found if isinstance(found, dict) else {}
    return {}


def _prefix(python: str) -> str:
    """Return the environment of an interpreter. The link in a venv belongs to the venv."""
    return os.path.dirname(os.path.dirname(os.path.abspath(python)))
