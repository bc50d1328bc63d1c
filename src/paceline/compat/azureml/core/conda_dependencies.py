"""A conda environment.yml as an object (`azureml.core.conda_dependencies`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.conda_dependencies.condadependencies
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict, cast

from paceline.compat.azureml.exceptions import UserErrorException

__all__ = ["CondaDependencies"]


class CondaFields(TypedDict):
    """The content of a conda environment file."""

    name: str
    dependencies: list[str | dict[str, list[str]]]
    channels: list[str]


#: Python version to write into a conda file if none was requested. Runs always use the present interpreter's version.
_PYTHON = "3.10.18"
#: Matches package names such as `numpy`, `conda-forge::_libgcc_mutex=0.1` and `torch[x]>=1`. Matches no path, URL or option.
_NAME = re.compile(r"^(?:[\w.-]+::)?([A-Za-z0-9_][\w.-]*)\s*(?:\[[^]]*\]\s*)?(?:$|[=<>!~;@#\s])")


class CondaDependencies:
    """Channels, conda packages and pip packages.

    Args:
        conda_dependencies_file_path: A conda environment file to start from; None starts with Python and
            `azureml-defaults`.
        _underlying_structure: The parsed content of a conda environment file.

    Raises:
        UserErrorException: The file is missing, or is not a conda environment file.
    """

    DEFAULT_NUMBER_OF_CONDA_PACKAGES = 1

    def __init__(
        self, conda_dependencies_file_path: str | None = None, _underlying_structure: CondaFields | None = None
    ) -> None:
        if conda_dependencies_file_path is not None:
            content = _read(conda_dependencies_file_path)
        else:
            content = _underlying_structure or {
                "name": "project_environment",
                "dependencies": [f"python={_PYTHON}", {"pip": ["azureml-defaults"]}],
                "channels": ["anaconda", "conda-forge"],
            }
        self._name = str(content.get("name") or "project_environment")
        self._channels = [str(channel) for channel in content.get("channels") or ()]
        self._conda: list[str] = []
        self._pip: list[str] = []
        self._options: list[str] = []
        for item in content.get("dependencies") or ():
            if isinstance(item, dict):
                for line in item.get("pip") or ():
                    (self._options if str(line).startswith("-") else self._pip).append(str(line))
            else:
                self._conda.append(str(item))

    @staticmethod
    def create(
        pip_indexurl: str | None = None,
        pip_packages: list[str] | None = None,
        conda_packages: list[str] | None = None,
        python_version: str = _PYTHON,
        pin_sdk_version: bool = True,
    ) -> CondaDependencies:
        """Return dependencies made from lists of packages.

        `pin_sdk_version` has no effect, because Paceline never installs the SDK's own packages.
        """
        made = CondaDependencies()
        made.set_python_version(python_version)
        if pip_indexurl:
            made.set_pip_index_url(pip_indexurl)
        if pip_packages is not None:
            made._pip = []
        for package in pip_packages or ():
            made.add_pip_package(package)
        for package in conda_packages or ():
            made.add_conda_package(package)
        return made

    @staticmethod
    def merge_requirements(requirements: list[str]) -> list[str]:
        """Return the last requirement for each package."""
        return list({package_name(line): line for line in requirements}.values())

    # --- reading the channels, packages and options

    @property
    def conda_channels(self) -> Iterable[str]:
        return iter(tuple(self._channels))

    @property
    def conda_packages(self) -> Iterable[str]:
        return iter(tuple(self._conda))

    @property
    def pip_packages(self) -> Iterable[str]:
        return iter(tuple(self._pip))

    @property
    def pip_options(self) -> Iterable[str]:
        return iter(tuple(self._options))

    # --- changing the channels, packages and options

    def add_channel(self, channel: str) -> None:
        if channel not in self._channels:
            self._channels.append(channel)

    def remove_channel(self, channel: str) -> None:
        self._channels = [one for one in self._channels if one != channel]

    def add_conda_package(self, conda_package: str) -> None:
        """Add a package, replacing another version of it."""
        self._conda = [*_without(self._conda, conda_package), conda_package]

    def remove_conda_package(self, conda_package: str) -> None:
        self._conda = _without(self._conda, conda_package)

    def add_pip_package(self, pip_package: str) -> None:
        """Add a package, replacing another version of it."""
        self._pip = [*_without(self._pip, pip_package), pip_package]

    def remove_pip_package(self, pip_package: str) -> None:
        self._pip = _without(self._pip, pip_package)

    def set_pip_option(self, pip_option: str) -> None:
        self.remove_pip_option(pip_option.split(maxsplit=1)[0])
        self._options.append(pip_option)

    def remove_pip_option(self, pip_option: str) -> None:
        self._options = [one for one in self._options if one.split()[0] != pip_option.split(maxsplit=1)[0]]

    def set_pip_index_url(self, index_url: str) -> None:
        self.set_pip_option(f"--index-url {index_url.removeprefix('--index-url').strip()}")

    def set_pip_requirements(self, pip_requirements: list[str]) -> None:
        self._pip = [str(line) for line in pip_requirements]

    def set_python_version(self, version: str) -> None:
        self._conda = [f"python={version}", *_without(self._conda, "python")]

    def get_python_version(self) -> str | None:
        for line in self._conda:
            if package_name(line) == "python":
                return re.sub(r"^.*?python\s*=*\s*", "", line) or None
        return None

    def add_tensorflow_pip_package(self, core_type: str = "cpu", version: str | None = None) -> None:
        self.add_pip_package("tensorflow" + (f"=={version}" if version else ""))

    def remove_tensorflow_pip_package(self) -> None:
        self.remove_pip_package("tensorflow")

    def add_tensorflow_conda_package(self, core_type: str = "cpu", version: str | None = None) -> None:
        self.add_conda_package("tensorflow" + (f"={version}" if version else ""))

    def remove_tensorflow_conda_package(self) -> None:
        self.remove_conda_package("tensorflow")

    def add_cntk_package(self, core_type: str = "cpu") -> None:
        """Raise UserErrorException: CNTK ended in 2019."""
        raise UserErrorException("CNTK was discontinued in 2019. Use PyTorch or TensorFlow.")

    # --- converting to a dict, text or file

    def as_dict(self) -> CondaFields:
        pip = [*self._options, *self._pip]
        dependencies: list[str | dict[str, list[str]]] = [*self._conda, *([{"pip": pip}] if pip else [])]
        return {"name": self._name, "dependencies": dependencies, "channels": list(self._channels)}

    def serialize_to_string(self) -> str:
        return _yaml().safe_dump(self.as_dict(), sort_keys=False)  # type: ignore[no-any-return]

    def save(self, path: str | None = None) -> str:
        """Write the conda environment file at a path or in a folder. Return its path."""
        target = Path(path or ".")
        if target.is_dir():
            target = target / "conda_dependencies.yml"
        target.write_text(self.serialize_to_string())
        return str(target)

    def save_to_file(self, base_directory: str, conda_file_path: str | None = None) -> str:
        """Write the conda environment file below `base_directory`. Return its relative path."""
        name = conda_file_path or "conda_dependencies.yml"
        Path(base_directory, name).write_text(self.serialize_to_string())
        return name

    def __repr__(self) -> str:
        return self.serialize_to_string()


def _without(lines: list[str], package: str) -> list[str]:
    name = package_name(package)
    return [line for line in lines if package_name(line) != name]


def package_name(line: str) -> str:
    """Return the normalized name of the package in `line`, or `line` without a name."""
    match = _NAME.match(line.strip())
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else line


def _read(path: str) -> CondaFields:
    try:
        content = _yaml().safe_load(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserErrorException(f"the conda file {path!r} can't be read: {error.strerror}.") from error
    except (ValueError, _yaml().YAMLError) as error:
        raise UserErrorException(f"the conda file {path!r} is not YAML: {error}.") from error
    if not isinstance(content, dict):
        raise UserErrorException(f"the conda file {path!r} has no `dependencies:`.")
    return cast(CondaFields, content)


def _yaml() -> Any:
    # Import yaml late: only a submitting process needs it, and a worker's environment may not have it.
    import yaml

    return yaml
