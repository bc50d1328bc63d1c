"""Image registries (`azureml.core.container_registry`)."""

from __future__ import annotations

from paceline.compat.azureml.strict import Strict

__all__ = ["ContainerRegistry"]


class ContainerRegistry(Strict):
    """A registry of images.

    The address, user name and password have no effect: log in with docker or podman.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self.username: str | None = None
        self.password: str | None = None
