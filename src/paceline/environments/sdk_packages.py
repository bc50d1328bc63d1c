"""Packages of the Azure SDK in an environment: left out, for a worker has its names from Paceline.

Were they installed, they would bring 60 others in old versions, and the script would log to a service that is not there.
"""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.job.environment import Spec

# `azureml-core==1.2`, `azureml_core[x]>=1; python_version<"3"`, `conda-forge::azureml-sdk=1.2`; neither a path nor an option.
_NAME = re.compile(r"^\s*(?:[\w.-]+::)?(azureml(?:[-_.][\w.-]*)?)\s*(\[[^]]*\])?\s*(?:$|[=<>!~;@#\s])", re.IGNORECASE)
#: What scripts use of those that brought something else along.
_INSTEAD = {"azureml-mlflow": ("mlflow-skinny",), "azureml-dataset-runtime": (), "azureml-dataprep": ()}


def without(environment: Spec) -> tuple[Spec, list[str]]:
    """The environment without them, and a sentence for each that was left out."""
    said: dict[str, str] = {}
    lines = environment.pip_requirements
    if lines is not None:
        lines = "".join(f"{line}\n" for line in _kept(lines.splitlines(), said))
    kept = replace(
        environment,
        pip_packages=tuple(_kept(environment.pip_packages, said)),
        pip_requirements=lines,
        pip_constraints=tuple(_kept(environment.pip_constraints, {}, stands_for=False)),
        conda_packages=tuple(_kept(environment.conda_packages, said, stands_for=False)),
        locked_pip=tuple(_kept(environment.locked_pip, said)),
    )
    # The same object where nothing was there to leave out: a registered environment stays what it is.
    return (kept, list(said.values())) if said else (environment, [])


def is_one(line: str) -> bool:
    """Whether a requirement names a package of the SDK."""
    return _NAME.match(line) is not None


def _kept(lines: tuple[str, ...] | list[str], said: dict[str, str], *, stands_for: bool = True) -> list[str]:
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
        said.setdefault(name, text)
    return found
