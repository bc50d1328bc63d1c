"""What of pipelines is a service of Azure's: published pipelines, endpoints, drafts, modules. Each says what to do instead."""

from __future__ import annotations

from typing import Any

from paceline.compat.azureml.exceptions import ScenarioNotSupportedException

__all__ = ["Module", "ModuleVersion", "PipelineDraft", "PipelineEndpoint", "PublishedPipeline", "refuse_to_publish"]


def refuse_to_publish(what: str) -> ScenarioNotSupportedException:
    """The exception for a pipeline that is to be called from elsewhere."""
    return ScenarioNotSupportedException(
        f"{what}: there is no service here that runs pipelines when it is called. Submit the pipeline where it is needed "
        "(experiment.submit), or keep it as a file: paceline pipeline run FILE.yaml."
    )


class _Refused:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise refuse_to_publish(type(self).__name__)

    @classmethod
    def get(cls, *arguments: Any, **named: Any) -> Any:
        """Raise ScenarioNotSupportedException."""
        raise refuse_to_publish(cls.__name__)

    create = publish = get

    @classmethod
    def list(cls, *arguments: Any, **named: Any) -> Any:
        """None: there are none."""
        return []

    get_all = list


class PublishedPipeline(_Refused):
    """Raises ScenarioNotSupportedException."""


class PipelineEndpoint(_Refused):
    """Raises ScenarioNotSupportedException."""


class PipelineDraft(_Refused):
    """Raises ScenarioNotSupportedException."""


class Module(_Refused):
    """Raises ScenarioNotSupportedException."""


class ModuleVersion(_Refused):
    """Raises ScenarioNotSupportedException."""
