"""Profiles of models (`azureml.core.profile`), which are a service of Azure's."""

from __future__ import annotations

from paceline.compat.azureml.refused import Refused

__all__ = ["ModelProfile"]


class ModelProfile(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "Measure a service: paceline service bench NAME."
