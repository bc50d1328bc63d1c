"""`azureml.core.image`."""

from paceline.compat.azureml.core.image.image import ContainerImage, Image

__all__ = ["ContainerImage", "Image"]
