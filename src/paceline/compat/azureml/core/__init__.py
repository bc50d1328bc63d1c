"""`azureml.core`: names for programs and training scripts, each loaded on first use."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from paceline.system.lazy_import import face

#: The SDK version that this package imitates. Programs print it and compare it.
VERSION = "1.61.0"
__version__ = VERSION

#: Module -> names in this module that can be imported from the package `azureml.core`.
_HOMES = {
    "core.compute": "ComputeTarget",
    "core.dataset": "Dataset",
    "core.datastore": "Datastore",
    "core.environment": "ContainerRegistry Environment",
    "core.experiment": "Experiment",
    "core.image": "Image",
    "core.keyvault": "Keyvault",
    "core.model": "Model",
    "core.run": "Run ScriptRun get_run",
    "core.runconfig": "RunConfiguration",
    "core.script_run_config": "ScriptRunConfig",
    "core.webservice": "Webservice",
    "core.workspace": "Workspace",
}

__all__ = ["VERSION", *" ".join(_HOMES.values()).split()]  # noqa: PLE0604 - the names are strings

__getattr__ = face(__name__, {f"paceline.compat.azureml.{home}": names.split() for home, names in _HOMES.items()})

#: Package of the standard library -> its submodules that `import azureml.core` loads in the SDK. Programs rely on this: they
#: write `import urllib`, and then use `urllib.request`.
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
    """Make a package import its submodules `names` when they are first used."""

    def submodule(name: str) -> object:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    vars(importlib.import_module(package)).setdefault("__getattr__", submodule)


for _package, _names in _LOADED.items():
    _load_late(_package, _names)


def __dir__() -> list[str]:
    return __all__
