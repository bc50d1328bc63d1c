"""`azureml.core.resource_configuration`: accepted without effect."""

from __future__ import annotations

__all__ = ["ResourceConfiguration"]


class ResourceConfiguration:
    """The CPUs, memory (GB) and GPUs of a model's service."""

    def __init__(
        self, cpu: float | None = None, memory_in_gb: float | None = None, gpu: int | None = None, **others: object
    ) -> None:
        self.cpu, self.memory_in_gb, self.gpu = cpu, memory_in_gb, gpu
