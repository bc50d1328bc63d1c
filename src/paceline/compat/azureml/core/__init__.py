"""`azureml.core`: names for drivers and scripts, each loaded on first use."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.system.lazy_import import face

if TYPE_CHECKING:
    from paceline.compat.azureml.core.compute import ComputeTarget
    from paceline.compat.azureml.core.container_registry import ContainerRegistry
    from paceline.compat.azureml.core.dataset import Dataset
    from paceline.compat.azureml.core.datastore import Datastore
    from paceline.compat.azureml.core.environment import Environment
    from paceline.compat.azureml.core.experiment import Experiment
    from paceline.compat.azureml.core.image import Image
    from paceline.compat.azureml.core.keyvault import Keyvault
    from paceline.compat.azureml.core.model import Model
    from paceline.compat.azureml.core.run import Run, ScriptRun, get_run
    from paceline.compat.azureml.core.runconfig import RunConfiguration
    from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
    from paceline.compat.azureml.core.webservice import Webservice
    from paceline.compat.azureml.core.workspace import Workspace

#: The SDK version that this package imitates; drivers print and compare it.
VERSION = "1.61.0"
__version__ = VERSION

__all__ = [
    "VERSION",
    "ComputeTarget",
    "ContainerRegistry",
    "Dataset",
    "Datastore",
    "Environment",
    "Experiment",
    "Image",
    "Keyvault",
    "Model",
    "Run",
    "RunConfiguration",
    "ScriptRun",
    "ScriptRunConfig",
    "Webservice",
    "Workspace",
    "get_run",
]

_HERE = "paceline.compat.azureml.core"
__getattr__ = face(
    __name__,
    {
        f"{_HERE}.compute": ("ComputeTarget",),
        f"{_HERE}.container_registry": ("ContainerRegistry",),
        f"{_HERE}.dataset": ("Dataset",),
        f"{_HERE}.datastore": ("Datastore",),
        f"{_HERE}.environment": ("Environment",),
        f"{_HERE}.experiment": ("Experiment",),
        f"{_HERE}.image": ("Image",),
        f"{_HERE}.keyvault": ("Keyvault",),
        f"{_HERE}.model": ("Model",),
        f"{_HERE}.run": ("Run", "ScriptRun", "get_run"),
        f"{_HERE}.runconfig": ("RunConfiguration",),
        f"{_HERE}.script_run_config": ("ScriptRunConfig",),
        f"{_HERE}.webservice": ("Webservice",),
        f"{_HERE}.workspace": ("Workspace",),
    },
)

#: Standard library submodules that the SDK's imports load, by package: afterwards `import urllib` offers
#: `urllib.request`.
_LOADED = {
    "concurrent": ("futures",),
    "email": ("encoders", "errors", "header", "message", "parser", "policy", "utils"),
    "http": ("client", "cookiejar", "cookies"),
    "importlib": ("abc", "machinery", "metadata", "resources", "util"),
    "logging": ("handlers",),
    "urllib": ("error", "parse", "request", "response"),
    "xml": ("etree",),
    "xml.etree": ("ElementPath", "ElementTree"),
}


def _load_late(package: str, names: Sequence[str]) -> None:
    """Let attributes of a standard library package import its submodules on first use."""

    def submodule(name: str) -> object:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    vars(importlib.import_module(package)).setdefault("__getattr__", submodule)


for _package, _names in _LOADED.items():
    _load_late(_package, _names)


def __dir__() -> list[str]:
    return __all__
