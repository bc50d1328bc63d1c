"""Environments that drivers change until they submit (`azureml.core.environment`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.environment.environment
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.compat.azureml import records
from paceline.compat.azureml.core.conda_dependencies import CondaDependencies
from paceline.compat.azureml.core.container_registry import ContainerRegistry
from paceline.compat.azureml.curated import CURATED, is_curated
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.records import NamedObjects
from paceline.compat.azureml.refused import Refused
from paceline.compat.azureml.strict import Strict

__all__ = [
    "DEFAULT_CPU_IMAGE",
    "DEFAULT_GPU_IMAGE",
    "CondaDependencies",
    "DockerBuildContext",
    "DockerSection",
    "Environment",
    "PythonSection",
    "RSection",
    "SparkSection",
]

DEFAULT_CPU_IMAGE = "mcr.microsoft.com/azureml/openmpi4.1.0-ubuntu22.04"
DEFAULT_GPU_IMAGE = "mcr.microsoft.com/azureml/openmpi4.1.0-cuda11.8-cudnn8-ubuntu22.04"


class PythonSection(Strict):
    """user_managed_dependencies: install nothing. interpreter_path: "python" is this program's interpreter."""

    def __init__(self) -> None:
        self.interpreter_path = "python"
        self.user_managed_dependencies = False
        self.conda_dependencies: CondaDependencies | None = CondaDependencies()
        self.conda_dependencies_file: str | None = None
        self.base_conda_environment: str | None = None
        self.create_conda_env = True

    def _plain(self) -> dict[str, Any]:
        found = super()._plain()
        dependencies = self.conda_dependencies
        return found | {"condaDependencies": dependencies.as_dict() if dependencies else None}


class DockerSection(Strict):
    """enabled, base_image: a container of this image, where there is an engine and the image is not one of Azure's own."""

    def __init__(self) -> None:
        self.enabled = False
        self.base_image: str | None = DEFAULT_CPU_IMAGE
        self.base_dockerfile: str | None = None
        self.base_image_registry = ContainerRegistry()
        self.shared_volumes = True
        self.shm_size: str | None = None
        self.arguments: list[str] = []
        self.gpu_support: bool | None = None
        self.platform: Any = None
        self.build_context: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # The one takes the other's place.
        other = {"base_image": "base_dockerfile", "base_dockerfile": "base_image"}.get(name)
        if other is not None and value is not None:
            super().__setattr__(other, None)


class SparkSection(Strict):
    """Accepted; there is no Spark."""

    def __init__(self) -> None:
        self.repositories: list[Any] = []
        self.packages: list[Any] = []
        self.precache_packages = True


class RSection(Strict):
    """Accepted; R is not installed for a script."""

    def __init__(self) -> None:
        self.r_version: str | None = None
        self.user_managed = False
        self.rscript_path: str | None = None
        self.snapshot_date: str | None = None
        self.cran_packages: Any = None
        self.github_packages: Any = None
        self.custom_url_packages: Any = None
        self.bioconductor_packages: Any = None


class DockerBuildContext(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "A build context is not built here. Build the image, and take Environment.from_docker_image."

    @classmethod
    def from_local_directory(cls, *arguments: Any, **named: Any) -> Any:
        """Raise ScenarioNotSupportedException."""
        raise cls.refusal()


class Environment(Strict):
    """What a script is to find installed; every part may be changed until a run is submitted with it.

    name: of letters, digits, `-`, `_` and `.`. `python`, `docker`, `environment_variables`: its parts. version: once registered.

    Raises:
        UserErrorException: the name is none.
    """

    def __init__(self, name: str, **others: Any) -> None:
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
        self.databricks: Any = None
        self.asset_id: str | None = None
        # Of an estimator's: the framework that it brings, as a module, and who brings it.
        self._made_for = ("", "")

    # --- made of something

    @staticmethod
    def from_conda_specification(name: str, file_path: str) -> Environment:
        """Of a conda environment file."""
        made = Environment(name)
        made.python.conda_dependencies = CondaDependencies(file_path)
        return made

    @staticmethod
    def from_pip_requirements(name: str, file_path: str, pip_version: str | None = None) -> Environment:
        """Of a requirements file."""
        made = Environment(name)
        try:
            text = Path(file_path).read_text(encoding="utf-8")
        except OSError as error:
            raise UserErrorException(f"the requirements file {file_path!r} can't be read: {error.strerror}.") from error
        # Exported files have a line for each hash, of versions that may be replaced by what is installed here.
        lines = re.sub(r"\s--hash[= ]\S+", "", re.sub(r"\\\r?\n", " ", text)).splitlines()
        lines = [line.partition(" #")[0].strip() for line in lines if not line.lstrip().startswith("#")]
        # Of several lines with one option, or one package under different conditions, all count.
        content = CondaDependencies.create(pip_packages=[]).as_dict()
        content["dependencies"].append({"pip": [line for line in lines if line]})
        made.python.conda_dependencies = CondaDependencies(_underlying_structure=content)
        return made

    @staticmethod
    def from_existing_conda_environment(name: str, conda_environment_name: str) -> Environment:
        """Of a conda environment of this machine, used as it is.

        Raises:
            UserErrorException: conda is not there, or has no environment of this name.
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
        """Of a container image."""
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
        """Of a Dockerfile, or of its text. Build it with docker or podman; here its packages are left out, and that is said."""
        made = Environment.from_docker_image(name, "", None, conda_specification, pip_requirements)
        made.docker.base_dockerfile = dockerfile
        return made

    @staticmethod
    def load_from_directory(path: str) -> Environment:
        """Return what `save_to_directory` has written, with the packages of `conda_dependencies.yml` as they are now."""
        file = Path(path, "azureml_environment.json")
        try:
            made = Environment._of(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserErrorException(f"{str(file)!r} is no saved environment: {error}.") from error
        if (packages := file.with_name("conda_dependencies.yml")).is_file():
            made.python.conda_dependencies = CondaDependencies(str(packages))
        return made

    def save_to_directory(self, path: str, overwrite: bool = False) -> None:
        """Write it into a folder: `azureml_environment.json`, and its packages as `conda_dependencies.yml`."""
        folder = Path(path)
        if folder.exists() and not overwrite:
            raise UserErrorException(f"{path!r} exists. Name another folder, or say overwrite=True.")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "azureml_environment.json").write_text(json.dumps(self._data(), indent=2))
        if self.python.conda_dependencies is not None:
            self.python.conda_dependencies.save_to_file(str(folder))

    def clone(self, new_name: str) -> Environment:
        """A deep copy under another name, not registered."""
        made = copy.deepcopy(self)
        made.name, made.version = new_name, None
        return made

    # --- registered

    def version_in(self, workspace: Any) -> int | None:
        """Its version in the workspace; None where it is not registered, or was changed since."""
        number = int(self.version) if self.version and self.version.isdecimal() else None
        found = records.version(workspace, "environments", self.name, number) if number else None
        return number if found is not None and found[1] == self._data() else None

    def register(self, workspace: Any) -> Environment:
        """This environment under its name in the workspace; the next version, unless nothing has changed."""
        if is_curated(self.name):
            raise UserErrorException(f"the names of curated environments are reserved: {self.name!r}. Clone it first.")
        version = records.add_version(workspace, "environments", self.name, self._data())
        made = copy.deepcopy(self)
        made.version = str(version)
        return made

    @staticmethod
    def get(workspace: Any, name: str, version: str | None = None, label: str | None = None) -> Environment:
        """A registered or a curated environment. label: "latest", or one that `label` has set.

        Raises:
            UserErrorException: there is none.
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
    def list(workspace: Any) -> NamedObjects[Environment]:
        """Name -> environment, in its latest version; the curated ones as well."""
        names = [*records.names(workspace, "environments"), *CURATED]
        return NamedObjects({name: Environment.get(workspace, name) for name in names})

    @staticmethod
    def label(workspace: Any, name: str, version: str, labels: Sequence[str]) -> None:
        """Give a version labels, by which `get` finds it; each label stands at one version of the name.

        Raises:
            UserErrorException: there is no such version.
        """
        Environment.get(workspace, name, version)
        kept = records.documents(workspace, "environment_labels")
        kept.put(name, {**(kept.read(name) or {}), **dict.fromkeys(labels, str(version))})

    @staticmethod
    def from_docker_build_context(name: str, docker_build_context: Any) -> Environment:
        """Raise UserErrorException: build the image, and name it."""
        raise UserErrorException(DockerBuildContext.refused)

    @staticmethod
    def add_private_pip_wheel(workspace: Any, file_path: str, exist_ok: bool = False) -> str:
        """The wheel's path, which stands for it among pip packages.

        Raises:
            UserErrorException: there is no such file.
        """
        if not os.path.isfile(file_path):
            raise UserErrorException(f"there is no wheel {file_path!r}.")
        return os.path.abspath(file_path)

    def build(self, workspace: Any, image_build_compute: Any = None) -> EnvironmentBuild:
        """Nothing is built before a run needs it; what was built is kept for the next."""
        return EnvironmentBuild()

    def build_local(self, workspace: Any, platform: Any = None, **others: Any) -> EnvironmentBuild:
        """As `build`."""
        return EnvironmentBuild()

    def get_image_details(self, workspace: Any) -> dict[str, Any]:
        """Of the image that a run would use."""
        return {"imageExistsInRegistry": False, "dockerImage": {"name": self.docker.base_image}}

    def _data(self) -> dict[str, Any]:
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
    def _of(data: dict[str, Any]) -> Environment:
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


def _snake_case(data: dict[str, Any]) -> dict[str, Any]:
    """Return the same with this module's names for the SDK's, which writes `baseImage`."""
    return {re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", key): value for key, value in data.items()}


class EnvironmentBuild:
    """What `Environment.build` gives."""

    status = "Succeeded"

    def wait_for_completion(self, show_output: bool = True) -> None:
        """Return at once."""
        if show_output:
            print("Succeeded: the environment is built when the first run needs it.")


def _curated(name: str, version: str | None) -> Environment:
    made = Environment(name)
    made.version = version or "1"
    # Nothing of its own: packages that a clone of it is given are installed beside what is here.
    made.python.conda_dependencies = CondaDependencies.create(pip_packages=[])
    made.environment_variables = {}
    return made
