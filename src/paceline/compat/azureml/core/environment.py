"""Environments (`azureml.core.environment`), mutable until they are submitted.

https://learn.microsoft.com/python/api/azureml-core/azureml.core.environment.environment
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.compat.azureml import records
from paceline.compat.azureml.core.conda_dependencies import CondaDependencies
from paceline.compat.azureml.curated import CURATED, is_curated
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.records import NamedObjects
from paceline.compat.azureml.refused import INSTEAD, DockerBuildContext
from paceline.compat.azureml.run_details import UNNAMED
from paceline.compat.azureml.strict import Strict

if TYPE_CHECKING:
    from paceline import Workspace
    from paceline.compat.azureml.records import Document
    from paceline.environments import EnvironmentSpec

__all__ = [
    "DEFAULT_CPU_IMAGE",
    "DEFAULT_GPU_IMAGE",
    "CondaDependencies",
    "ContainerRegistry",
    "DockerBuildContext",
    "DockerSection",
    "Environment",
    "PythonSection",
    "RSection",
    "SparkSection",
]

DEFAULT_CPU_IMAGE = "mcr.microsoft.com/azureml/openmpi4.1.0-ubuntu22.04"
DEFAULT_GPU_IMAGE = "mcr.microsoft.com/azureml/openmpi4.1.0-cuda11.8-cudnn8-ubuntu22.04"


class ContainerRegistry(Strict):
    """A registry of images, without effect: log in with docker or podman."""

    def __init__(self) -> None:
        self.address: str | None = None
        self.username: str | None = None
        self.password: str | None = None


class PythonSection(Strict):
    """The Python part of an environment.

    Args:
        user_managed_dependencies: True installs nothing.
        interpreter_path: "python" means this program's interpreter.
    """

    def __init__(self) -> None:
        self.interpreter_path = "python"
        self.user_managed_dependencies = False
        self.conda_dependencies: CondaDependencies | None = CondaDependencies()
        self.conda_dependencies_file: str | None = None
        self.base_conda_environment: str | None = None
        self.create_conda_env = True

    def _plain(self) -> dict[str, object]:
        found = super()._plain()
        dependencies = self.conda_dependencies
        return found | {"condaDependencies": dependencies.as_dict() if dependencies else None}


class DockerSection(Strict):
    """The container part of an environment.

    A script runs in `base_image` if `enabled` is true, a container engine answers, and the image is not Azure's own.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.base_image: str | None = DEFAULT_CPU_IMAGE
        self.base_dockerfile: str | None = None
        self.base_image_registry = ContainerRegistry()
        self.shared_volumes = True
        self.shm_size: str | None = None
        self.arguments: list[str] = []
        self.gpu_support: bool | None = None
        self.platform: object = None
        self.build_context: object = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        # As in the SDK, an environment has either a base image or a base Dockerfile. Setting one of them clears the other.
        other = {"base_image": "base_dockerfile", "base_dockerfile": "base_image"}.get(name)
        if other is not None and value is not None:
            super().__setattr__(other, None)


class SparkSection(Strict):
    """Settings for Spark, accepted without effect."""

    def __init__(self) -> None:
        self.repositories: list[object] = []
        self.packages: list[object] = []
        self.precache_packages = True


class RSection(Strict):
    """Settings for R, accepted without effect."""

    def __init__(self) -> None:
        self.r_version: str | None = None
        self.user_managed = False
        self.rscript_path: str | None = None
        self.snapshot_date: str | None = None
        self.cran_packages: object = None
        self.github_packages: object = None
        self.custom_url_packages: object = None
        self.bioconductor_packages: object = None


class Environment(Strict):
    """The software that a script needs.

    The parts are `python`, `docker` and `environment_variables`. Each may change until a run is submitted. Registration
    sets `version`.

    Args:
        name: Name of the environment: letters, digits, `-`, `_` and `.`.

    Raises:
        UserErrorException: The name is not valid.
    """

    def __init__(self, name: str, **others: object) -> None:
        if not isinstance(name, str) or not name:
            raise UserErrorException(f"name={name!r} can't be an environment's name.")
        self.name = name
        self.version: str | None = None
        self.python = PythonSection()
        self.docker = DockerSection()
        self.environment_variables: dict[str, str] = {"EXAMPLE_ENV_VAR": "EXAMPLE_VALUE"}
        self.spark = SparkSection()
        self.r: RSection | None = None
        self.inferencing_stack_version: str | None = None
        self.databricks: object = None
        self.asset_id: str | None = None
        # The estimator that made this environment: its framework's module, a text such as "the estimator PyTorch".
        self._made_for = ("", "")

    # --- constructors of an environment

    @staticmethod
    def from_conda_specification(name: str, file_path: str) -> Environment:
        made = Environment(name)
        made.python.conda_dependencies = CondaDependencies(file_path)
        return made

    @staticmethod
    def from_pip_requirements(name: str, file_path: str, pip_version: str | None = None) -> Environment:
        made = Environment(name)
        try:
            text = Path(file_path).read_text(encoding="utf-8")
        except OSError as error:
            raise UserErrorException(f"the requirements file {file_path!r} can't be read: {error.strerror}.") from error
        # Remove the hashes of packages: Paceline may use an installed version instead of a listed version, whose hash differs.
        lines = re.sub(r"\s--hash[= ]\S+", "", re.sub(r"\\\r?\n", " ", text)).splitlines()
        lines = [line.partition(" #")[0].strip() for line in lines if not line.lstrip().startswith("#")]
        # Keep repeated lines: an option may occur more than once, and so may a package under different conditions.
        content = CondaDependencies.create(pip_packages=[]).as_dict()
        content["dependencies"].append({"pip": [line for line in lines if line]})
        made.python.conda_dependencies = CondaDependencies(_underlying_structure=content)
        return made

    @staticmethod
    def from_existing_conda_environment(name: str, conda_environment_name: str) -> Environment:
        """Return a conda environment of this machine, used unchanged.

        Raises:
            UserErrorException: conda is missing, or has no environment of this name.
        """
        roots = [os.environ.get("CONDA_PREFIX_1"), os.environ.get("CONDA_PREFIX"), os.environ.get("CONDA_ROOT")]
        places = [Path(root, "envs", conda_environment_name, "bin", "python") for root in roots if root]
        made = Environment(name)
        made.python.user_managed_dependencies = True
        for place in places:
            if place.exists():
                made.python.interpreter_path = str(place)
                return made
        raise UserErrorException(
            f"there is no conda environment {conda_environment_name!r}"
            + (f" in {[str(place.parents[2]) for place in places]}." if places else ": conda is not active here.")
        )

    @staticmethod
    def from_docker_image(
        name: str,
        image: str,
        container_registry: ContainerRegistry | None = None,
        conda_specification: str | None = None,
        pip_requirements: str | None = None,
    ) -> Environment:
        """Return an environment in a container image."""
        if conda_specification is not None:
            made = Environment.from_conda_specification(name, conda_specification)
        elif pip_requirements is not None:
            made = Environment.from_pip_requirements(name, pip_requirements)
        else:
            made = Environment(name)
            made.python.user_managed_dependencies = True
        made.docker.enabled = True
        made.docker.base_image = image
        if container_registry is not None:
            made.docker.base_image_registry = container_registry
        return made

    @staticmethod
    def from_dockerfile(
        name: str, dockerfile: str, conda_specification: str | None = None, pip_requirements: str | None = None
    ) -> Environment:
        """Return an environment for a Dockerfile, given by its path or text.

        Paceline does not build the image. So the environment lacks the Dockerfile's packages, and a note says so. To
        get these packages, build the image with docker or podman, and set `base_image` to the image's name.
        """
        made = Environment.from_docker_image(name, "", None, conda_specification, pip_requirements)
        made.docker.base_dockerfile = dockerfile
        return made

    @staticmethod
    def load_from_directory(path: str) -> Environment:
        """Return an environment that `save_to_directory` has written to a folder.

        The packages are the current content of `conda_dependencies.yml`.
        """
        file = Path(path, "azureml_environment.json")
        try:
            made = Environment._of(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserErrorException(f"{str(file)!r} is not a saved environment: {error}.") from error
        if (packages := file.with_name("conda_dependencies.yml")).is_file():
            made.python.conda_dependencies = CondaDependencies(str(packages))
        return made

    def save_to_directory(self, path: str, overwrite: bool = False) -> None:
        """Write `azureml_environment.json` and `conda_dependencies.yml` into a folder."""
        folder = Path(path)
        if folder.exists() and not overwrite:
            raise UserErrorException(f"{path!r} exists. Name another folder, or pass overwrite=True.")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "azureml_environment.json").write_text(json.dumps(self._data(), indent=2))
        if self.python.conda_dependencies is not None:
            self.python.conda_dependencies.save_to_file(str(folder))

    def clone(self, new_name: str) -> Environment:
        made = copy.deepcopy(self)
        made.name, made.version = new_name, None
        return made

    # --- registration in a workspace

    def version_in(self, workspace: Workspace) -> int | None:
        """Return the environment's version if the workspace has it with equal content."""
        number = int(self.version) if self.version and self.version.isdecimal() else None
        found = records.version(workspace, "environments", self.name, number) if number else None
        return number if found is not None and found[1] == self._data() else None

    def register(self, workspace: Workspace) -> Environment:
        """Register the environment, and return it with its version.

        If the content equals the latest version's content, the environment gets the latest version's number.
        """
        if is_curated(self.name):
            raise UserErrorException(f"the names of curated environments are reserved: {self.name!r}. Clone it first.")
        version = records.add_version(workspace, "environments", self.name, self._data())
        made = copy.deepcopy(self)
        made.version = str(version)
        return made

    @staticmethod
    def get(workspace: Workspace, name: str, version: str | None = None, label: str | None = None) -> Environment:
        """Return a registered or a curated environment.

        `label` is "latest", or a label that the method `label` has set.

        Raises:
            UserErrorException: No such environment exists.
        """
        if label not in (None, "latest") and not version:
            version = (records.documents(workspace, "environment_labels").read(name) or {}).get(label)
            if version is None:
                raise UserErrorException(f"there is no environment {name!r} with the label {label!r}.")
        found = records.version(workspace, "environments", name, int(version) if version else None)
        if found is not None:
            made = Environment._of(found[1])
            made.version = str(found[0])
            return made
        if is_curated(name):
            return _curated(name, version)
        known = ", ".join(records.names(workspace, "environments")) or "none"
        raise UserErrorException(
            f"Error retrieving the environment definition. Code: 404: there is no environment {name!r}"
            f"{f' of version {version}' if version else ''}; registered are: {known}."
        )

    @staticmethod
    def list(workspace: Workspace) -> NamedObjects[Environment]:
        """Return the latest version of each registered or curated environment, by name."""
        names = [*records.names(workspace, "environments"), *CURATED]
        return NamedObjects({name: Environment.get(workspace, name) for name in names})

    @staticmethod
    def label(workspace: Workspace, name: str, version: str, labels: Sequence[str]) -> None:
        """Label a version, so that `get` finds it.

        A label refers to at most one version of an environment.

        Raises:
            UserErrorException: The version does not exist.
        """
        Environment.get(workspace, name, version)
        records.update(workspace, "environment_labels", name, dict.fromkeys(labels, str(version)))

    @staticmethod
    def from_docker_build_context(name: str, docker_build_context: object) -> Environment:
        """Raise UserErrorException: build the image, and use `from_docker_image`."""
        raise UserErrorException(INSTEAD["DockerBuildContext"])

    @staticmethod
    def add_private_pip_wheel(workspace: Workspace, file_path: str, exist_ok: bool = False) -> str:
        """Return the path of a wheel, for use as a pip package.

        Raises:
            UserErrorException: The file does not exist.
        """
        if not os.path.isfile(file_path):
            raise UserErrorException(f"there is no wheel {file_path!r}.")
        return os.path.abspath(file_path)

    def build(self, workspace: Workspace, image_build_compute: object = None) -> EnvironmentBuild:
        """Return a finished build: runs build their environment on first use."""
        return EnvironmentBuild()

    def build_local(self, workspace: Workspace, platform: object = None, **others: object) -> EnvironmentBuild:
        return EnvironmentBuild()

    def get_image_details(self, workspace: Workspace) -> dict[str, object]:
        """Return details of the image that a run would use."""
        return {"imageExistsInRegistry": False, "dockerImage": {"name": self.docker.base_image}}

    def _data(self) -> dict[str, object]:
        dependencies = self.python.conda_dependencies
        return {
            "name": self.name,
            "python": {
                "interpreter_path": self.python.interpreter_path,
                "user_managed_dependencies": self.python.user_managed_dependencies,
                "conda_dependencies_file": self.python.conda_dependencies_file,
                "conda_dependencies": dependencies.as_dict() if dependencies else None,
            },
            "docker": {
                "enabled": self.docker.enabled,
                "base_image": self.docker.base_image,
                "base_dockerfile": self.docker.base_dockerfile,
                "shm_size": self.docker.shm_size,
                "arguments": [*self.docker.arguments],
            },
            "environment_variables": dict(self.environment_variables or {}),
            "inferencing_stack_version": self.inferencing_stack_version,
        }

    @staticmethod
    def _of(data: Document) -> Environment:
        data = _snake_case(data)
        made = Environment(data["name"])
        python = _snake_case(data.get("python") or {})
        dependencies = python.pop("conda_dependencies", None)
        made.python.conda_dependencies = (
            CondaDependencies(_underlying_structure=dependencies) if dependencies is not None else None
        )
        for section, values in ((made.python, python), (made.docker, _snake_case(data.get("docker") or {}))):
            for key, value in values.items():
                if value is not None and hasattr(section, key):
                    setattr(section, key, value)
        made.environment_variables = dict(data.get("environment_variables") or {})
        made.inferencing_stack_version = data.get("inferencing_stack_version")
        return made


def _snake_case(data: Document) -> Document:
    """Return the data with the SDK's keys, such as `baseImage`, in snake case."""
    return {re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", key): value for key, value in data.items()}


def environment_of(workspace: Workspace, spec: EnvironmentSpec | None) -> Environment:
    """Return the registered environment that `spec` names, or a new one from `spec`."""
    name = (spec.name if spec else None) or UNNAMED
    if spec is not None and (spec.version or is_curated(name)):
        # If the registered environment was removed, `get` raises an exception. Then create the environment from `spec` below.
        with contextlib.suppress(UserErrorException):
            return Environment.get(workspace, name, str(spec.version) if spec.version else None)
    made = Environment(name)
    if spec is not None:
        made.environment_variables = dict(spec.environment_variables)
        if made.python.conda_dependencies is not None:
            lines = [*(spec.pip_requirements or "").splitlines(), *spec.pip_packages]
            made.python.conda_dependencies.set_pip_requirements(lines)
        made.docker.base_image = spec.docker_image
    return made


class EnvironmentBuild:
    """A finished build of an environment, from `Environment.build`."""

    status = "Succeeded"

    def wait_for_completion(self, show_output: bool = True) -> None:
        if show_output:
            print("Succeeded: the environment is built when the first run needs it.")


def _curated(name: str, version: str | None) -> Environment:
    made = Environment(name)
    made.version = version or "1"
    # List no packages: runs use the installed packages, and a program may add other packages to a copy of this environment.
    made.python.conda_dependencies = CondaDependencies.create(pip_packages=[])
    made.environment_variables = {}
    return made
