"""The exact versions of what an interpreter has installed, asked of itself.

Another interpreter is given this file's text (`paceline.remote.foreign_python` does the same for nodes), so it is on the standard
library of Python 3.8 alone, with annotations in quotes.
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
    """python, python_version, and packages: "name==version" of each distribution on sys.path, sorted."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        # Of two of one name the first counts, as for `import`.
        if name and name.lower() not in found:
            found[name.lower()] = "%s==%s" % (name, distribution.version)  # noqa: UP031
    return {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "packages": [found[name] for name in sorted(found)],
    }


def ask(python: str, variables: "dict[str, str]") -> "dict[str, object]":
    """The same of another interpreter on this machine; {} where it is gone or does not answer. variables: of its environment."""
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
    """The environment that an interpreter belongs to, by its path: that of a venv's link is the venv."""
    return os.path.dirname(os.path.dirname(os.path.abspath(python)))
