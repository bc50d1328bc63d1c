"""An import hook that maps `azureml` to Paceline's modules.

`import azureml.core` loads `paceline.compat.azureml.core`, even if the real SDK is installed.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

from paceline.compat.alias_finder import AliasFinder, is_shim, spec_of

if TYPE_CHECKING:
    import logging

_OURS = "paceline.compat.azureml"
_OTHER = "Paceline does not include it (docs/from-azureml.md). "
#: Modules of Azure's SDK that this package lacks -> what to use instead.
_ABSENT = {
    "train.automl": "Search with a sweep: azureml.train.hyperdrive, or paceline.Sweep.",
    "automl": "Search with a sweep: azureml.train.hyperdrive, or paceline.Sweep.",
    "interpret": "Use interpret-community or shap directly.",
    "explain": "Use interpret-community or shap directly.",
    "dataprep": "Read the files with pandas, or with azureml.core.Dataset.",
    "contrib": "In web services azureml.contrib.services works. ParallelRunStep is in azureml.pipeline.steps.",
    "accel": "There are no FPGAs.",
    "fsspec": "Open the files with fsspec.",
    "rag": "Use the libraries that it combines.",
    "responsibleai": "Use responsibleai by itself.",
}
#: Module of the SDK -> the module of this package that defines the same names, if it is named differently.
RENAMED = {
    "exceptions._azureml_exception": "exceptions",
    "core.compute_target": "core.compute",
    "core.container_registry": "core.environment",
    "core.databricks": "refused",
    "core.image.container": "core.image",
    "core.image.image": "core.image",
    "core.private_endpoint": "refused",
    "core.profile": "refused",
    "core.resource_configuration": "core.model",
    **{f"core.webservice.{name}": "core.webservice" for name in ("aci", "aks", "local", "webservice")},
    "data.abstract_dataset": "data.file_dataset",
    "data.azure_data_lake_datastore": "core.datastore",
    "data.azure_storage_datastore": "core.datastore",
    "data.datapath": "data.data_reference",
    "data.dataset_consumption_config": "data.data_reference",
    "data.dataset_error_handling": "exceptions",
    "data.dataset_factory": "core.dataset",
    "data.dataset_type_definitions": "core.dataset",
    "tensorboard.export": "tensorboard",
    "train.dnn": "train.estimator",
    "train.hyperdrive.exceptions": "exceptions",
    **{
        f"train.hyperdrive.{name}": "train.hyperdrive.search"
        for name in ("parameter_expressions", "policy", "sampling")
    },
    "train.sklearn": "train.estimator",
    "train.widgets": "widgets",
    **{
        f"core.compute.{name}": "core.compute"
        for name in (
            *("adla", "aks", "amlcompute", "batch", "compute", "computeinstance", "databricks", "datafactory", "dsvm"),
            *("hdinsight", "kubernetescompute", "kusto", "remote", "synapse"),
        )
    },
    **{f"pipeline.core.{name}": "refused" for name in ("module", "pipeline_draft", "pipeline_endpoint", "schedule")},
    **{
        f"pipeline.steps.{name}": "pipeline.steps"
        for name in (
            *("adla_step", "automl_step", "azurebatch_step", "command_step", "data_transfer_step", "databricks_step"),
            *("estimator_step", "hyper_drive_step", "kusto_step", "module_step", "mpi_step", "parallel_run_config"),
            *("parallel_run_step", "python_script_step", "r_script_step", "synapse_spark_step"),
        )
    },
}

#: Modules of this package that the SDK does not have.
OUR_OWN = (
    "curated",
    "aliases",
    "check",
    "everywhere",
    "offline",
    "packages",
    "parallel_run",
    "policy",
    "records",
    "refused",
    "run_details",
    "stores",
    "strict",
    "submission",
)


def install() -> None:
    """Let later `import azureml...` find Paceline's modules. Idempotent."""
    if FINDER in sys.meta_path:
        return
    loaded = sys.modules.get("azureml.core")
    if loaded is not None and not loaded.__name__.startswith(_OURS):
        _log().warning(
            "the real azureml-core was imported earlier and stays in use where it is. Import paceline.azureml first."
        )
    elif PathFinder.find_spec("azureml.core", _real_folders()) is not None:
        # No warning is needed: every process of this program gets Paceline's `azureml` instead of the installed one.
        _log().info("azureml-core is installed; in this program azureml is Paceline's")
    FINDER.install()


def _log() -> logging.Logger:
    # Import logging late: workers rarely need it, and its import takes as long as the import of this whole package.
    import logging

    return logging.getLogger("paceline.azureml")


def _beside(fullname: str) -> ModuleSpec | None:
    """Return the import spec of an `azureml` module that another distribution provides, else None."""
    if fullname == "azureml":
        return None
    first = fullname.split(".")[1]
    # Don't load submodules of the real SDK into Paceline's package, because the two don't work together.
    if spec_of(f"{_OURS}.{first}") is not None:
        return None
    parent = sys.modules.get(fullname.rpartition(".")[0])
    if fullname.count(".") > 1:
        return PathFinder.find_spec(fullname, getattr(parent, "__path__", None))
    return PathFinder.find_spec(fullname, _real_folders())


def _real_folders() -> list[str]:
    folders = (os.path.join(place or os.getcwd(), "azureml") for place in sys.path)
    return [folder for folder in folders if os.path.isdir(folder) and not is_shim(folder)]


FINDER = AliasFinder(
    "azureml",
    _OURS,
    absent={name: _OTHER + instead for name, instead in _ABSENT.items()},
    hidden=OUR_OWN,
    renamed=RENAMED,
    beside=_beside,
)
#: Returns the spec of the module for a name of the SDK, such as azureml.core.
find_spec = FINDER.find_spec
