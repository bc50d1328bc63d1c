"""`hvd.elastic`: training that continues after a failed collective."""

from __future__ import annotations

from paceline.compat.horovod.common.elastic import run
from paceline.compat.horovod.torch.elastic.sampler import ElasticSampler
from paceline.compat.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]
