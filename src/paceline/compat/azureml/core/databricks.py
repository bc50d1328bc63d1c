"""What runs on Databricks (`azureml.core.databricks`)."""

from __future__ import annotations

from paceline.compat.azureml.refused import Refused

__all__ = [
    "DatabricksCluster",
    "DatabricksEnvironment",
    "DatabricksSection",
    "EggLibrary",
    "JarLibrary",
    "MavenLibrary",
    "PyPiLibrary",
    "RCranLibrary",
]


class DatabricksSection(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "There is no Databricks: run the script by a PythonScriptStep."


class DatabricksCluster(DatabricksSection):
    """Raises ScenarioNotSupportedException."""


class DatabricksEnvironment(DatabricksSection):
    """Raises ScenarioNotSupportedException."""


class EggLibrary(DatabricksSection):
    """Raises ScenarioNotSupportedException."""


class JarLibrary(DatabricksSection):
    """Raises ScenarioNotSupportedException."""


class MavenLibrary(DatabricksSection):
    """Raises ScenarioNotSupportedException."""


class PyPiLibrary(DatabricksSection):
    """Raises ScenarioNotSupportedException."""


class RCranLibrary(DatabricksSection):
    """Raises ScenarioNotSupportedException."""
