"""Classes of the SDK that need a service of Azure.

Each names its replacement.
"""

from __future__ import annotations

from typing import ClassVar

from paceline.compat.azureml.exceptions import ScenarioNotSupportedException

_NO_DATABRICKS = "Run the script as a PythonScriptStep."
_NO_NETWORK = "A workspace is a folder without network access. Omit the endpoint."

#: Each refused class -> its replacement. `paceline azureml check` prints the same text.
INSTEAD = {
    # azureml.core.profile
    "ModelProfile": "Measure a service: paceline service bench NAME.",
    # azureml.core.private_endpoint
    "PrivateEndPoint": _NO_NETWORK,
    "PrivateEndPointConfig": _NO_NETWORK,
    # azureml.core.databricks
    "DatabricksCluster": _NO_DATABRICKS,
    "DatabricksEnvironment": _NO_DATABRICKS,
    "DatabricksSection": _NO_DATABRICKS,
    "EggLibrary": _NO_DATABRICKS,
    "JarLibrary": _NO_DATABRICKS,
    "MavenLibrary": _NO_DATABRICKS,
    "PyPiLibrary": _NO_DATABRICKS,
    "RCranLibrary": _NO_DATABRICKS,
    # azureml.pipeline.steps
    "AdlaStep": "Query the data in a PythonScriptStep.",
    "AutoMLStep": "Search with a sweep: HyperDriveStep.",
    "AutoMLStepRun": "Search with a sweep: HyperDriveStep.",
    "AzureBatchStep": "Run the program as a CommandStep.",
    "DataTransferStep": "Copy the files in a PythonScriptStep: it fetches its inputs and stores its outputs.",
    "DatabricksStep": _NO_DATABRICKS,
    "KustoStep": "Query the data in a PythonScriptStep.",
    "ModuleStep": "Name the script in a PythonScriptStep.",
    "RScriptStep": "Run the script as a CommandStep: command='Rscript train.R'.",
    "SynapseSparkStep": "Run spark-submit as a CommandStep.",
}

__all__ = [*INSTEAD]  # noqa: PLE0604 - the names are strings


class Refused:
    """The base of classes that always raise ScenarioNotSupportedException."""

    #: The replacement.
    refused: ClassVar[str] = ""

    def __init__(self, *arguments: object, **named: object) -> None:
        raise self.refusal()

    @classmethod
    def refusal(cls) -> ScenarioNotSupportedException:
        return ScenarioNotSupportedException(f"{cls.__name__} is not supported. {cls.refused}")


def __getattr__(name: str) -> type[Refused]:
    if name not in INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind = type(
        name,
        (Refused,),
        {
            "refused": INSTEAD[name],
            "__doc__": "A class that always raises ScenarioNotSupportedException.",
            "__module__": __name__,
        },
    )
    globals()[name] = kind
    return kind
