"""Steps that need a service of Azure's, or a program that is not here."""

from __future__ import annotations

from paceline.compat.azureml.refused import Refused

__all__ = [
    "AdlaStep",
    "AutoMLStep",
    "AutoMLStepRun",
    "AzureBatchStep",
    "DataTransferStep",
    "DatabricksStep",
    "KustoStep",
    "ModuleStep",
    "RScriptStep",
    "SynapseSparkStep",
]


class AdlaStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "There is no Data Lake Analytics: query the data in a PythonScriptStep."


class AutoMLStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "Search by a sweep: HyperDriveStep."


class AutoMLStepRun(AutoMLStep):
    """Raises ScenarioNotSupportedException."""


class AzureBatchStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "Run the program by a CommandStep."


class DataTransferStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "Copy the files in a PythonScriptStep: its inputs are fetched, its outputs stored where they name."


class DatabricksStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "There is no Databricks: run the script by a PythonScriptStep."


class KustoStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "There is no Kusto: query the data in a PythonScriptStep."


class ModuleStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "There are no modules: name the script itself in a PythonScriptStep."


class RScriptStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "Run the script by a CommandStep: command='Rscript train.R'."


class SynapseSparkStep(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "There is no Synapse: run spark-submit by a CommandStep."
