"""Runner of ONNX models, by onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ServingError
from paceline.serving.model.answers import InputError
from paceline.serving.model.runners.base import Array, Outputs, TensorInfo, blamed

_TYPES = {
    **{"tensor(float)": "FP32", "tensor(double)": "FP64", "tensor(float16)": "FP16", "tensor(bool)": "BOOL"},
    **{f"tensor({sign}int{bits})": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "tensor(string)": "BYTES",
}


class OnnxRunner:
    platform = "onnxruntime_onnx"

    def __init__(self, path: str) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ServingError(
                f"{path} is an ONNX model, and onnxruntime is not in the model's environment. Add it: pip install onnxruntime."
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            path, sess_options=options, providers=onnxruntime.get_available_providers()
        )
        self.inputs = [_info(each) for each in self._session.get_inputs()]
        self.outputs = [_info(each) for each in self._session.get_outputs()]
        self.default = [each.name for each in self.outputs]
        # If the first dimension has a fixed size, requests can't be batched.
        self.batches = all(each.shape is not None and each.shape[:1] == (-1,) for each in (*self.inputs, *self.outputs))

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Outputs:
        try:
            results = self._session.run(list(wanted), dict(inputs))
        except Exception as reason:  # besides RuntimeError, onnxruntime raises classes of its own
            text = blamed(reason)
            if text is None or "INVALID_ARGUMENT" not in text.upper():
                raise
            raise InputError(f"the model can't take this input: {text}") from None
        return dict(zip(wanted, results, strict=True))


def _info(node: Any) -> TensorInfo:
    # Only tensors have a shape. A converted classifier also has other outputs, such as sequences of maps.
    is_tensor = node.type in _TYPES
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape) if is_tensor else None
    return TensorInfo(node.name, _TYPES.get(node.type, node.type), shape)
