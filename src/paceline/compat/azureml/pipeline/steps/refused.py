"""Steps that need a service of Azure's, or a program that is not here. Each says what to do instead."""

from __future__ import annotations

from typing import Any, ClassVar

from paceline.compat.azureml.exceptions import ScenarioNotSupportedException

__all__ = [
    "AdlaStep",
    "AutoMLStep",
    "AutoMLStepRun",
    "AzureBatchStep",
    "DataTransferStep",
    "DatabricksStep",
    "KustoStep",
    "ModuleStep",
    "ParallelRunConfig",
    "ParallelRunStep",
    "RScriptStep",
    "SynapseSparkStep",
]


class _Refused:
    """Raises ScenarioNotSupportedException."""

    _instead: ClassVar[str] = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise ScenarioNotSupportedException(f"{type(self).__name__} is not here. {self._instead}")


class AdlaStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "There is no Data Lake Analytics: query the data in a PythonScriptStep."


class AutoMLStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "Search by a sweep: HyperDriveStep."


class AutoMLStepRun(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "Search by a sweep: HyperDriveStep."


class AzureBatchStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "Run the program by a CommandStep."


class DataTransferStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "Copy the files in a PythonScriptStep: its input is downloaded, its output stored where it names."


class DatabricksStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "There is no Databricks: run the script by a PythonScriptStep."


class KustoStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "There is no Kusto: query the data in a PythonScriptStep."


class ModuleStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "There are no modules: name the script itself in a PythonScriptStep."


class ParallelRunConfig(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = (
        "Score in a PythonScriptStep whose RunConfiguration asks for several processes, each with its part of the files: "
        "dataset.as_named_input(...), PACELINE's as_partition(by='rank')."
    )


class ParallelRunStep(ParallelRunConfig):
    """Raises ScenarioNotSupportedException."""


class RScriptStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "Run the script by a CommandStep: command='Rscript train.R'."


class SynapseSparkStep(_Refused):
    """Raises ScenarioNotSupportedException."""

    _instead = "There is no Synapse: run spark-submit by a CommandStep."
