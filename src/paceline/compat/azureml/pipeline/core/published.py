"""Pipeline services of Azure: published pipelines, endpoints, drafts, modules.

All are refused.
"""

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
    """Return the exception for a call that would publish or look up a pipeline."""
    return ScenarioNotSupportedException(f"{what} is not here. {_INSTEAD}")


class PublishedPipeline(Refused):
    """A published pipeline: raises ScenarioNotSupportedException."""

    refused = _INSTEAD

    @classmethod
    def get(cls, *arguments: Any, **named: Any) -> Any:
        """Raise ScenarioNotSupportedException."""
        raise cls.refusal()

    create = publish = get

    @classmethod
    def list(cls, *arguments: Any, **named: Any) -> Any:
        """Return an empty list."""
        return []

    get_all = list


class PipelineEndpoint(PublishedPipeline):
    """A pipeline endpoint: raises ScenarioNotSupportedException."""


class PipelineDraft(PublishedPipeline):
    """A pipeline draft: raises ScenarioNotSupportedException."""


class Module(PublishedPipeline):
    """A module: raises ScenarioNotSupportedException."""

    refused = "There are no modules: name the script itself in a PythonScriptStep."


class ModuleVersion(Module):
    """A module version: raises ScenarioNotSupportedException."""
