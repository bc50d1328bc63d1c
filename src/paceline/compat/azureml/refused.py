"""SDK classes that need a service of Azure, and the classes of these classes' arguments.

Paceline refuses each class that needs a service, with an error that names a replacement.
"""

from __future__ import annotations

import builtins
from typing import ClassVar, NoReturn

from paceline.compat.azureml.exceptions import ScenarioNotSupportedException

_NO_DATABRICKS = "Run the script as a PythonScriptStep."
_NO_NETWORK = "A workspace is a folder without network access. Omit the endpoint."
_NO_PUBLISHING = (
    "No service runs pipelines on request. Submit the pipeline directly (experiment.submit), or store it as a file: "
    "paceline pipeline run FILE.yaml."
)
_NO_MODULE = "Name the script in a PythonScriptStep."

#: Name of a class that Paceline refuses -> what to use instead. `paceline azureml check` prints the same text.
INSTEAD = {
    "ModelProfile": "Measure a service: paceline service bench NAME.",
    "PrivateEndPoint": _NO_NETWORK,
    "PrivateEndPointConfig": _NO_NETWORK,
    "DatabricksCluster": _NO_DATABRICKS,
    "DatabricksEnvironment": _NO_DATABRICKS,
    "DatabricksSection": _NO_DATABRICKS,
    "EggLibrary": _NO_DATABRICKS,
    "JarLibrary": _NO_DATABRICKS,
    "MavenLibrary": _NO_DATABRICKS,
    "PyPiLibrary": _NO_DATABRICKS,
    "RCranLibrary": _NO_DATABRICKS,
    "DockerBuildContext": "Paceline builds no build contexts. Build the image, and use Environment.from_docker_image.",
    "Module": _NO_MODULE,
    "ModuleVersion": _NO_MODULE,
    "PipelineDraft": _NO_PUBLISHING,
    "PipelineEndpoint": _NO_PUBLISHING,
    "PublishedPipeline": _NO_PUBLISHING,
    "Schedule": "Describe the pipeline in a file, and add it with `paceline schedule add`.",
    "AdlaStep": "Query the data in a PythonScriptStep.",
    "AutoMLStep": "Search with a sweep: HyperDriveStep.",
    "AutoMLStepRun": "Search with a sweep: HyperDriveStep.",
    "AzureBatchStep": "Run the program as a CommandStep.",
    "DataTransferStep": "Copy the files in a PythonScriptStep: it fetches its inputs and stores its outputs.",
    "DatabricksStep": _NO_DATABRICKS,
    "KustoStep": "Query the data in a PythonScriptStep.",
    "ModuleStep": _NO_MODULE,
    "RScriptStep": "Run the script as a CommandStep: command='Rscript train.R'.",
    "SynapseSparkStep": "Run spark-submit as a CommandStep.",
}

__all__ = [*INSTEAD, "ScheduleRecurrence", "TimeZone"]  # noqa: PLE0604 - the names are strings


def refuse(what: str) -> ScenarioNotSupportedException:
    """Return the exception for `what`, a call that publishes or looks up pipelines."""
    return ScenarioNotSupportedException(f"{what} is not supported. {_NO_PUBLISHING}")


class Refused:
    """The base of classes that always raise ScenarioNotSupportedException."""

    #: Text of the exception, which names what to use instead.
    refused: ClassVar[str] = ""

    def __init__(self, *arguments: object, **named: object) -> None:
        raise self.refusal()

    @classmethod
    def refusal(cls) -> ScenarioNotSupportedException:
        return ScenarioNotSupportedException(f"{cls.__name__} is not supported. {cls.refused}")

    @classmethod
    def get(cls, *arguments: object, **named: object) -> NoReturn:
        """Raise ScenarioNotSupportedException: Azure's service is not available here."""
        raise cls.refusal()

    create = publish = from_local_directory = get

    @classmethod
    def list(cls, *arguments: object, **named: object) -> builtins.list[NoReturn]:
        return []

    get_all = get_schedules_for_pipeline_id = list


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


class ScheduleRecurrence:
    """The frequency of a schedule."""

    def __init__(self, frequency: str, interval: int, **others: object) -> None:
        self.frequency, self.interval = frequency, interval
        vars(self).update(others)


class TimeZone:
    """Time zones by name: `TimeZone[name]` returns any name unchanged."""

    def __class_getitem__(cls, name: str) -> str:
        return name


class InputPortDef:
    """An input of a Module, Azure's reusable pipeline step."""

    def __init__(self, name: str, *arguments: object, **named: object) -> None:
        self.name = name
        vars(self).update(named)


class OutputPortDef(InputPortDef):
    """An output of a Module, Azure's reusable pipeline step."""
