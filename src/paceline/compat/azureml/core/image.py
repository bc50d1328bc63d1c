"""Images of the SDK of 2018 (`azureml.core.image`): a script and its models.

Scripts create web services from images. Paceline builds no container image.
https://learn.microsoft.com/python/api/azureml-core/azureml.core.image.containerimage
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.compat.azureml import records
from paceline.compat.azureml.core.model import InferenceConfig, Model
from paceline.compat.azureml.exceptions import WebserviceException

if TYPE_CHECKING:
    from paceline import Workspace

__all__ = ["ContainerImage", "Image"]

#: With `__path__`, this module counts as a package: in the SDK it is divided into modules.
__path__: list[str] = []


class ImageConfiguration:
    """The script and the conda file of an image, from `image_configuration`.

    Raises:
        WebserviceException: The script does not exist.
    """

    def __init__(self, execution_script: str, conda_file: str | None) -> None:
        self.execution_script, self.conda_file = execution_script, conda_file
        self.inference_config()

    def inference_config(self) -> InferenceConfig:
        return InferenceConfig(entry_script=self.execution_script, conda_file=self.conda_file, runtime="python")


class Image:
    """A named, versioned script with its models."""

    def __init__(
        self, workspace: Workspace, name: str | None = None, version: int | None = None, **others: object
    ) -> None:
        found = records.version(workspace, "images", str(name), version)
        if found is None:
            raise WebserviceException(f"ImageNotFound: there is no image {name!r}.")
        number, data = found
        self.workspace, self.name, self.version = workspace, str(name), number
        self.id = f"{name}:{number}"
        self.creation_state = "Succeeded"
        self.image_location = f"local/{name}:{number}"
        self.image_build_log_uri = None
        self.image_config = ImageConfiguration(data["script"], data.get("conda_file"))
        self.models = [Model(workspace, id=one) for one in data["models"]]

    @staticmethod
    def create(workspace: Workspace, name: str, models: Sequence[object], image_config: ImageConfiguration) -> Image:
        """Register models and a script as an image's next version, and return the image."""
        data = {
            "script": str(Path(image_config.execution_script).absolute()),
            "conda_file": str(Path(image_config.conda_file).absolute()) if image_config.conda_file else None,
            "models": [getattr(one, "id", one) for one in models],
        }
        records.add_version(workspace, "images", name, data)
        return ContainerImage(workspace, name)

    @staticmethod
    def list(workspace: Workspace, **others: object) -> Sequence[Image]:
        return [ContainerImage(workspace, name) for name in records.names(workspace, "images")]

    def wait_for_creation(self, show_output: bool = False) -> None:
        if show_output:
            print("Succeeded\nImage creation operation finished for image " + self.id)

    def delete(self) -> None:
        """Do nothing: an image takes no space."""


class ContainerImage(Image):
    """The SDK's usual class of images: a script and its models."""

    @staticmethod
    def image_configuration(
        execution_script: str,
        runtime: str = "python",
        conda_file: str | None = None,
        docker_file: str | None = None,
        schema_file: str | None = None,
        dependencies: Sequence[str] | None = None,
        enable_gpu: bool | None = None,
        tags: object = None,
        properties: object = None,
        description: str | None = None,
        **others: object,
    ) -> ImageConfiguration:
        return ImageConfiguration(execution_script, conda_file)
