"""What of pipelines is a service of Azure's: published pipelines, endpoints, drafts, modules."""

from __future__ import annotations

from typing import Any

from paceline.compat.azureml.exceptions import ScenarioNotSupportedException
from paceline.compat.azureml.refused import Refused

__all__ = ["Module", "ModuleVersion", "PipelineDraft", "PipelineEndpoint", "PublishedPipeline"]

_INSTEAD = (
    "There is no service that runs pipelines when it is called. Submit the pipeline where it is needed (experiment.submit), or "
    "keep it as a file: paceline pipeline run FILE.yaml."
)


def refuse(what: str) -> ScenarioNotSupportedException:
    """The exception for a call that would publish a pipeline, or ask for one."""
    return ScenarioNotSupportedException(f"{what} is not here. {_INSTEAD}")


class PublishedPipeline(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = _INSTEAD

    @classmethod
    def get(cls, *arguments: Any, **named: Any) -> Any:
        """Raise ScenarioNotSupportedException."""
        raise cls.refusal()

    create = publish = get

    @classmethod
    def list(cls, *arguments: Any, **named: Any) -> Any:
        """None: there are none."""
        return []

    get_all = list


class PipelineEndpoint(PublishedPipeline):
    """Raises ScenarioNotSupportedException."""


class PipelineDraft(PublishedPipeline):
    """Raises ScenarioNotSupportedException."""


class Module(PublishedPipeline):
    """Raises ScenarioNotSupportedException."""

    refused = "There are no modules: name the script itself in a PythonScriptStep."


class ModuleVersion(Module):
    """Raises ScenarioNotSupportedException."""
