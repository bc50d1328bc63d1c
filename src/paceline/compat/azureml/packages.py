"""Translation of Azure environments into environments that Paceline can build.

A note reports each replacement. docs/from-azureml.md describes the rules.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from typing import TYPE_CHECKING

from paceline.compat.azureml.core.conda_dependencies import CondaDependencies, package_name
from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.curated import is_curated, module_of
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.policy import SubmissionNotes, is_strict
from paceline.environments import EnvironmentSpec, is_environment_name, is_sdk_package, version_of
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.compat.azureml.core.environment import PythonSection

#: Name of a conda package -> name of the same package for pip.
_PIP_OF = {
    **{
        name: name
        for name in (
            *("numpy", "scipy", "pandas", "matplotlib", "scikit-learn", "joblib", "tqdm", "pillow", "requests"),
            *("tensorflow", "keras", "seaborn", "h5py", "pyyaml", "cython", "lightgbm", "xgboost", "nltk"),
            *("statsmodels", "pyarrow", "networkx", "ipython", "ipykernel", "notebook", "psutil", "dask"),
            *("torchvision", "torchaudio", "transformers", "datasets", "gensim", "sympy", "numba", "pytest"),
        )
    },
    "pytorch": "torch",
    "pytorch-cpu": "torch",
    "pytorch-gpu": "torch",
    "tensorflow-gpu": "tensorflow",
    "tensorflow-base": "tensorflow",
    "py-xgboost": "xgboost",
    "opencv": "opencv-python-headless",
    "msgpack-python": "msgpack",
}
#: Packages that pip can't install for a run, because they belong to the interpreter, the machine or its drivers.
_OF_PYTHON = ("pip", "setuptools", "wheel")
_OF_MACHINE = ("cudatoolkit", "cudnn", "mkl", "nccl", "cuda", "pytorch-cuda", "openmpi")
#: Name in an environment -> name of the package that pip installs in its place.
_SAME = {"tensorflow-gpu": "tensorflow", "tensorflow-cpu": "tensorflow", "pytorch": "torch", "sklearn": "scikit-learn"}
#: Version of this interpreter, such as 3.11.
_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
_PARTS = re.compile(r"^(?:[\w.-]+::)?([A-Za-z0-9][\w.-]*)(\[[^]]*\])?\s*(.*)$")


def spec_of(
    environment: Environment | None, notes: SubmissionNotes, *, use_docker: bool | None = None
) -> EnvironmentSpec:
    """Return the environment to build for a run.

    `use_docker` comes from DockerConfiguration and overrides the environment's own setting. None overrides nothing.

    Raises:
        UserErrorException: The interpreter is missing. Or PACELINE_AZUREML=strict is set, and Paceline would have to
            replace a part of the environment.
    """
    if environment is None:
        return EnvironmentSpec()
    # The run's details show the environment's name. Drop a name that is valid in the SDK, but that Paceline would refuse.
    name = environment.name if is_environment_name(environment.name) else None
    variables = {
        str(name): str(value)
        for name, value in (environment.environment_variables or {}).items()
        if (name, value) != ("EXAMPLE_ENV_VAR", "EXAMPLE_VALUE")
    }
    spec = _spec(environment, notes, use_docker=use_docker)
    return dataclasses.replace(spec, name=name, environment_variables=variables)


def _spec(environment: Environment, notes: SubmissionNotes, *, use_docker: bool | None) -> EnvironmentSpec:
    image = _image(environment, notes, use_docker=environment.docker.enabled if use_docker is None else use_docker)
    python = environment.python
    if is_curated(environment.name):
        notes.add(f"The curated environment {environment.name} means the packages installed here.")
        packages = _with_framework([], module_of(environment.name), f"the environment {environment.name}", notes)
        return EnvironmentSpec(layered=bool(packages), pip_packages=tuple(packages))
    if python.user_managed_dependencies:
        return EnvironmentSpec(python=_interpreter(python), docker_image=image)
    dependencies = python.conda_dependencies
    if python.conda_dependencies_file is not None:
        dependencies = CondaDependencies(python.conda_dependencies_file)
    if dependencies is None:
        return EnvironmentSpec(docker_image=image)
    if is_strict() and any(package_name(line) not in ("python", "pip") for line in dependencies.conda_packages):
        return EnvironmentSpec(
            conda_packages=tuple(dependencies.conda_packages),
            conda_channels=tuple(dependencies.conda_channels),
            pip_requirements=_lines([*dependencies.pip_options, *dependencies.pip_packages]),
        )
    packages, conda = _packages(dependencies, notes)
    if not conda and image is None:
        packages = _with_framework(packages, *environment._made_for, notes)
    options = _lines(dependencies.pip_options)
    if conda:
        return EnvironmentSpec(
            conda_packages=(f"python={_VERSION}", *conda),
            conda_channels=tuple(dependencies.conda_channels),
            pip_requirements=options + _lines(packages) if packages or options else None,
        )
    return EnvironmentSpec(
        layered=True,
        pip_packages=tuple(packages),
        pip_requirements=options if options and packages else None,
        docker_image=image,
    )


def with_notebooks(spec: EnvironmentSpec, notes: SubmissionNotes) -> EnvironmentSpec:
    """Return the environment, with the packages that run notebooks if it lacks them."""
    missing = [name for name in ("nbconvert", "ipykernel") if importlib.util.find_spec(name) is None]
    if not missing or spec.docker_image or spec.python or spec.uses_conda:
        return spec
    notes.add(f"Notebooks need {' and '.join(missing)}, not installed here: pip installs it for the run.")
    return dataclasses.replace(spec, layered=True, pip_packages=(*spec.pip_packages, *missing))


def _image(environment: Environment, notes: SubmissionNotes, *, use_docker: bool) -> str | None:
    docker = environment.docker
    image = docker.base_image
    if docker.base_dockerfile is not None:
        notes.add(
            "Paceline does not build a base_dockerfile: the run uses the packages installed here. Build the image and name it."
        )
        return None
    if not use_docker or not image or image.startswith(("mcr.microsoft.com/azureml", "azureml")):
        if use_docker and image:
            notes.add(f"Azure's own image {image} is not used: the script runs with the packages installed here.")
        return None
    from paceline.containers import find_engine

    try:
        find_engine(to_start=False)
    except PacelineError:
        notes.add(f"The image {image} is not used: no container engine (podman, docker) answers here.")
        return None
    return image


def _with_framework(packages: list[str], module: str, whose: str, notes: SubmissionNotes) -> list[str]:
    """Return the packages, with the package of `module` added if this interpreter lacks it.

    `whose` names the environment in the added note, such as "the curated environment 'AzureML-PyTorch-1.6'".
    """
    name = _SAME.get(module, module)
    if not module or importlib.util.find_spec(module) is not None or name in map(package_name, packages):
        return packages
    notes.add(f"{name}, which {whose} has, is not installed here: pip installs it for the run.")
    return [*packages, name]


def _interpreter(python: PythonSection) -> str | None:
    path = python.interpreter_path
    if path in (None, "", "python", "python3", sys.executable):
        return None
    import shutil

    found = shutil.which(str(path))
    if found is None:
        raise UserErrorException(f"python.interpreter_path={path!r} does not exist on this machine.")
    return found


def _packages(dependencies: CondaDependencies, notes: SubmissionNotes) -> tuple[list[str], list[str]]:
    pip: list[str] = []
    conda: list[str] = []
    moved: list[str] = []
    left: list[str] = []
    for line in dependencies.conda_packages:
        name = package_name(line)
        if name == "python":
            wanted = dependencies.get_python_version()
            if wanted and ".".join(wanted.split(".")[:2]) != _VERSION and wanted != "3.10.18":
                notes.add(f"Python {_VERSION} is used instead of the requested {wanted}.")
        elif name in _OF_PYTHON or name.startswith("azureml"):
            continue
        elif name in _OF_MACHINE:
            left.append(name)
        elif name in _PIP_OF or version_of(_PIP_OF.get(name, name)) is not None:
            moved.append(name)
            pip.append(_PIP_OF.get(name, name) + _pip_version(line))
        else:
            conda.append(line)
    if moved:
        notes.add(f"conda packages {', '.join(moved)}: taken from this interpreter, or from pip.")
    if left:
        notes.add(f"conda packages {', '.join(left)} are left out: they belong to this machine, or are not available.")
    if conda and importlib.util.find_spec("rattler") is None:
        notes.add(
            f"conda packages {', '.join(conda)} are left out: the extra for conda environments is not installed "
            "(pip install 'paceline[conda]')."
        )
        conda = []
    requested = [*dependencies.pip_packages]
    # If azureml-defaults is the only package, ignore it, because the SDK adds it to every environment.
    for line in requested if requested != ["azureml-defaults"] else ():
        name = package_name(line)
        if name == "horovod":
            notes.add("horovod is not installed: Paceline provides its API to scripts.")
        else:
            pip.append(line)
    # Leave the SDK's packages in the list. The submission removes them, and logs that it has removed them.
    return [_without_old_pin(line, notes) for line in dict.fromkeys(pip)], conda


def _without_old_pin(line: str, notes: SubmissionNotes) -> str:
    match = _PARTS.match(line)
    if match is None or line.startswith(("-", ".", "/")) or "://" in line or is_sdk_package(line):
        return line
    name, extras, rest = _SAME.get(match[1].lower(), match[1]), match[2] or "", match[3].strip()
    there = version_of(name)
    if there is None or not re.match(r"[=<>~!]", rest):
        return line if name == match[1] else name + line[match.end(1) :]
    if re.fullmatch(rf"==\s*{re.escape(there)}(\+.*)?", rest):
        return line
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        if SpecifierSet(rest.partition(";")[0].strip()).contains(there, prereleases=True):
            return line
    except InvalidSpecifier:
        pass
    notes.add(f"{name} {there}, which is installed here, is used instead of the requested {line}.")
    return name + extras


def _pip_version(line: str) -> str:
    """Return conda's `=1.2` as pip's `==1.2.*`, and other conditions unchanged."""
    match = _PARTS.match(line)
    rest = (match[3] if match else "").strip().replace(" ", "")
    if rest.startswith("==") or not rest.startswith("="):
        return rest if re.match(r"[<>=!~]", rest) else ""
    return f"=={rest[1:].split('=')[0]}.*"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
