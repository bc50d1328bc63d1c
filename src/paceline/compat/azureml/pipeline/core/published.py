"""Pipeline services of Azure: published pipelines, endpoints, drafts, modules.

All are refused.
"""

from __future__ import annotations

import builtins
from typing import NoReturn

from paceline.compat.azureml.exceptions import ScenarioNotSupportedException
from paceline.compat.azureml.refused import Refused

__all__ = ["Module", "ModuleVersion", "PipelineDraft", "PipelineEndpoint", "PublishedPipeline"]

_INSTEAD = (
    "No service runs pipelines on request. Submit the pipeline directly (experiment.submit), or store it as a file: "
    "paceline pipeline run FILE.yaml."
)


def refuse(what: str) -> ScenarioNotSupportedException:
    """Return the exception for a call that would publish or look up a pipeline."""
    return ScenarioNotSupportedException(f"{what} is not supported. {_INSTEAD}")


class PublishedPipeline(Refused):
    """A published pipeline: raises ScenarioNotSupportedException."""

    refused = _INSTEAD

    @classmethod
    def get(cls, *arguments: object, **named: object) -> NoReturn:
        """Raise ScenarioNotSupportedException."""
        raise cls.refusal()

    create = publish = get

    @classmethod
    def list(cls, *arguments: object, **named: object) -> builtins.list[NoReturn]:
        """Return an empty list."""
        return []

    get_all = list


class PipelineEndpoint(PublishedPipeline):
    """A pipeline endpoint: raises ScenarioNotSupportedException."""


class PipelineDraft(PublishedPipeline):
    """A pipeline draft: raises ScenarioNotSupportedException."""


class Module(PublishedPipeline):
    """A module: raises ScenarioNotSupportedException."""

    refused = "Name the script in a PythonScriptStep."


class ModuleVersion(Module):
    """A module version: raises ScenarioNotSupportedException."""
