"""Check the values of an `EnvironmentSpec`, with only the standard library.

Workers load this module. The functions annotate the specification as `Any`, because its module imports this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import EnvironmentSpecError
from paceline.job.local_paths import absolute
from paceline.job.secret_values import credentials_in
from paceline.system.names import is_one_line, name_rule

NAME = name_rule("_.-", 128)

#: Fields that are tuples of strings, with an example of each.
_LISTS = {
    "pip_packages": "einops==0.8.0",
    "pip_constraints": "numpy<3",
    "conda_packages": "ffmpeg=7",
    "conda_channels": "conda-forge",
    "locked_pip": "einops==0.8.0",
    "locked_conda": "https://conda.anaconda.org/conda-forge/noarch/x-1-0.conda#<sha256>",
}

#: Pattern of a token in the path of a conda channel.
_CONDA_TOKEN = re.compile(r"/t/(?!\$\{)[^/\s]+/")
# Matches `python`, `python=3.11` and `conda-forge::python>=3.10`, but not `python-dateutil` or `python_abi`.
_CONDA_PYTHON = re.compile(r"(?:.*::)?python(?![\w.-])", re.IGNORECASE)


def is_environment_name(name: str) -> bool:
    """Return whether an environment may be registered under this name."""
    return NAME.fullmatch(name) is not None


def normalise(environment: Any) -> None:
    """Normalize an environment in place: sequences to tuples, local paths to absolute paths.

    Raises:
        EnvironmentSpecError: A value has the wrong type.
    """
    for field, example in _LISTS.items():
        values = _strings(field, getattr(environment, field), example)
        if field == "pip_packages":
            if files := [value for value in values if re.match(r"-[rc]\b|--(requirement|constraint)", value.strip())]:
                raise EnvironmentSpecError(
                    f"pip_packages has {files[0]!r}: a file of requirements is named with pip_requirements_file "
                    "(--requirements)."
                )
            values = tuple(absolute(value) for value in values)
        # The dataclass is frozen. Changing it is safe here, because only its __post_init__ calls this function.
        object.__setattr__(environment, field, values)
    variables = environment.environment_variables
    if not isinstance(variables, Mapping):
        raise EnvironmentSpecError(f"environment_variables={variables!r} is not a dict of strings.")
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise EnvironmentSpecError(
                f"environment_variables has {name!r}: {value!r}. A name is letters, digits and _, and both are strings."
            )
    object.__setattr__(environment, "environment_variables", dict(variables))


def check(environment: Any) -> None:
    """Refuse an environment whose values are invalid or contradict each other.

    Raises:
        EnvironmentSpecError: The message names the value, and what to write instead.
    """
    _check_scalars(environment)
    for field in ("pip_packages", "pip_constraints", "locked_pip"):
        for value in getattr(environment, field):
            _check_secret(field, value)
    for number, line in enumerate((environment.pip_requirements or "").splitlines(), start=1):
        _check_secret(f"pip_requirements, line {number},", line)
    for field in ("conda_channels", "conda_packages", "locked_conda"):
        for value in getattr(environment, field):
            _check_channel(field, value)
    _check_contradictions(environment)


def check_name(name: Any) -> None:
    """Refuse an invalid name of an environment, which also names a folder.

    Raises:
        EnvironmentSpecError: The name is invalid.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise EnvironmentSpecError(
            f"name={name!r} can't be an environment's name. Begin with a letter or digit, go on with letters, digits, "
            "'_', '-' and '.', 128 in all at most."
        )


def names_python(spec: str) -> bool:
    """Return whether a conda spec is for Python itself."""
    return _CONDA_PYTHON.match(spec.strip()) is not None


def _strings(field: str, values: Any, example: str) -> tuple[str, ...]:
    # Refuse a str: it is iterable, so each of its letters would become a package.
    if isinstance(values, str):
        raise EnvironmentSpecError(f"{field}={values!r} is one string. Write {field}=[{values!r}].")
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)):
        raise EnvironmentSpecError(f"{field}={values!r} is not a list of strings. Write {field}=[{example!r}].")
    found = tuple(values)
    for value in found:
        if not isinstance(value, str):
            raise EnvironmentSpecError(f"{field} has {value!r}, which is not a string. Write {field}=[{example!r}].")
        if not value.strip():
            raise EnvironmentSpecError(f"{field} has an empty name. Leave it out, or name a package: {example!r}.")
        # A line break would start another line of a requirements file, perhaps an option of pip.
        if not is_one_line(value):
            raise EnvironmentSpecError(
                f"{field} has {value!r}, which has a line break or a control character. Give each a string of its own."
            )
    return tuple(value.strip() for value in found)


def _check_scalars(environment: Any) -> None:
    if environment.name is not None:
        check_name(environment.name)
    version = environment.version
    # Exclude True and False, which are integers in Python.
    if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 1):
        raise EnvironmentSpecError(f"version={version!r} is not a whole number from 1 on.")
    for field in ("python", "python_version", "pip_requirements", "docker_image", "shm_size"):
        value = getattr(environment, field)
        # An empty text of a requirements file is valid.
        if value is not None and (
            not isinstance(value, str) or "\0" in value or not (value or field == "pip_requirements")
        ):
            raise EnvironmentSpecError(f"{field}={value!r} is not a text. Give a string, or None.")
        # The values of all other fields become words of command lines, and lines of a container engine's files.
        if value is not None and field != "pip_requirements" and not is_one_line(value):
            raise EnvironmentSpecError(f"{field}={value!r} has a line break or a control character. Leave it out.")
    _check_image(environment.docker_image or "")
    for field in ("layered", "user_managed"):
        if not isinstance(getattr(environment, field), bool):
            raise EnvironmentSpecError(f"{field}={getattr(environment, field)!r} is not a bool. Write True or False.")
    if environment.python_version is not None and not re.fullmatch(r"3(\.\d+){1,2}", environment.python_version):
        raise EnvironmentSpecError(f'python_version={environment.python_version!r} is not a version such as "3.11".')
    if environment.python is not None and not environment.docker_image and not os.path.isabs(environment.python):
        raise EnvironmentSpecError(
            f"python={environment.python!r} is not an absolute path. Give the path of an interpreter, such as "
            "'/usr/bin/python3'."
        )


def _check_image(image: str) -> None:
    if credentials_in(image):
        raise EnvironmentSpecError(
            "docker_image has a password in it, which would be kept with the run. Leave it out, and log in to the registry: "
            "`podman login REGISTRY`, or docker."
        )


def _check_secret(field: str, value: str) -> None:
    # Don't show the value, because logs would contain it.
    if credentials_in(value):
        raise EnvironmentSpecError(
            f"{field} has a URL with a password or a token in it, which would be kept with the run. Write ${{NAME}} in its "
            "place and set the variable NAME (capitals): pip and uv fill it in from the environment when they read the line."
        )


def _check_channel(field: str, value: str) -> None:
    if credentials_in(value) or _CONDA_TOKEN.search(value):
        raise EnvironmentSpecError(
            f"{field} has a URL with a password or a token in it, which would be kept with the run. Leave it out, and give "
            'it in a file that RATTLER_AUTH_FILE names, such as {"conda.example.org": {"BearerToken": "..."}}.'
        )


def _check_contradictions(environment: Any) -> None:
    installs = [
        field
        for field in ("pip_packages", "pip_requirements", "conda_packages", "locked_pip", "locked_conda")
        if getattr(environment, field)
    ]
    if environment.user_managed and installs:
        raise EnvironmentSpecError(
            f"user_managed=True with {', '.join(installs)}: Paceline installs nothing into a user-managed "
            "interpreter. Install them there "
            "and leave them out here, or leave user_managed out."
        )
    conda = [field for field in installs if field.endswith(("conda_packages", "locked_conda"))]
    if environment.docker_image and conda:
        raise EnvironmentSpecError(
            f"docker_image={environment.docker_image!r} with {', '.join(conda)}: conda packages are not installed into an "
            "image. Choose an image that has them, or leave docker_image out."
        )
    if environment.uses_conda and environment.layered:
        own = [repr(spec) for spec in environment.conda_packages if names_python(spec)]
        own += [f"python_version={environment.python_version!r}"] if environment.python_version else []
        if own:
            raise EnvironmentSpecError(
                f"layered=True with {own[0]} from conda: what the "
                "submitting interpreter has installed can't be seen by another Python. Write layered=False and name all "
                "that the script needs, or leave Python out."
            )
