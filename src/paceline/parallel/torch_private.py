"""The parts of torch that are not public and that the pipeline needs. Loaded on use.

A new release of torch may move any of these: `tests/parallel/test_torch_private.py` says which is gone.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.distributed.pipelining._utils import _derive_grad_metas as gradient_metas
from torch.distributed.pipelining._utils import extract_tensor_meta
from torch.distributed.pipelining.stage import _RecvInfo

#: What a fake tensor raises when its values are asked for.
VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)

__all__ = [
    "VALUE_NEEDED",
    "FakeTensor",
    "FakeTensorMode",
    "_RecvInfo",
    "extract_tensor_meta",
    "gradient_metas",
]
