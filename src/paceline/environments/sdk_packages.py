"""Remove the Azure SDK's packages from environments, because Paceline provides modules of the same names.

Installed SDK packages would bring 60 outdated packages, and would log to a service that does not exist.
"""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.job.environment import Spec

# Matches `azureml-core==1.2`, `azureml_core[x]>=1; python_version<"3"` and `conda-forge::azureml-sdk=1.2`.
_NAME = re.compile(r"^\s*(?:[\w.-]+::)?(azureml(?:[-_.][\w.-]*)?)\s*(\[[^]]*\])?\s*(?:$|[=<>!~;@#\s])", re.IGNORECASE)
#: Removed package -> dependencies of it that scripts use, and that are therefore installed instead.
_INSTEAD = {"azureml-mlflow": ("mlflow-skinny",), "azureml-dataset-runtime": (), "azureml-dataprep": ()}


def without_sdk_packages(environment: Spec) -> tuple[Spec, list[str]]:
    """Return the environment without the Azure SDK's packages, and notices about removed packages."""
    notices: dict[str, str] = {}
    lines = environment.pip_requirements
    if lines is not None:
        lines = "".join(f"{line}\n" for line in _kept(lines.splitlines(), notices))
    kept = replace(
        environment,
        pip_packages=tuple(_kept(environment.pip_packages, notices)),
        pip_requirements=lines,
        pip_constraints=tuple(_kept(environment.pip_constraints, {}, stands_for=False)),
        conda_packages=tuple(_kept(environment.conda_packages, notices, stands_for=False)),
        locked_pip=tuple(_kept(environment.locked_pip, notices)),
    )
    # Return the same object if nothing was removed, so that a registered environment keeps its identity.
    return (kept, list(notices.values())) if notices else (environment, [])


def is_sdk_package(line: str) -> bool:
    """Return whether a requirement names a package of the Azure SDK."""
    return _NAME.match(line) is not None


def _kept(lines: tuple[str, ...] | list[str], notices: dict[str, str], *, stands_for: bool = True) -> list[str]:
    found: list[str] = []
    for line in lines:
        match = _NAME.match(line)
        if match is None:
            found.append(line)
            continue
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        instead = _INSTEAD.get(name, ())
        if name in _INSTEAD and "pandas" in (match[2] or ""):
            instead = (*instead, "pandas")
        text = f"{line.strip()} is left out: scripts have the names of azureml from Paceline."
        if stands_for and instead:
            found += instead
            text = f"{text[:-1]}; {' and '.join(instead)} {'is' if len(instead) == 1 else 'are'} installed."
        notices.setdefault(name, text)
    return found
