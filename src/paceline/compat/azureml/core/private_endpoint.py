"""Private endpoints (`azureml.core.private_endpoint`), which are Azure's network."""

from __future__ import annotations

from paceline.compat.azureml.refused import Refused

__all__ = ["PrivateEndPoint", "PrivateEndPointConfig"]


class PrivateEndPoint(Refused):
    """Raises ScenarioNotSupportedException."""

    refused = "A workspace is a folder, to which no network leads. Leave the endpoint out."


class PrivateEndPointConfig(PrivateEndPoint):
    """Raises ScenarioNotSupportedException."""
