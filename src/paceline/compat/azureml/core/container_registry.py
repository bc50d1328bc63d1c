"""Where an image comes from (`azureml.core.container_registry`)."""

from __future__ import annotations

from paceline.compat.azureml.strict import Strict

__all__ = ["ContainerRegistry"]


class ContainerRegistry(Strict):
    """address, username, password: of a registry of images. Log in to it with docker or podman; nothing is done with these."""

    def __init__(self) -> None:
        self.address: str | None = None
        self.username: str | None = None
        self.password: str | None = None
