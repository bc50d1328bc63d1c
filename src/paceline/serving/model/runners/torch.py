"""Runners of TorchScript and torch.export programs, with weights shared by all processes of a machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ServingError
from paceline.serving.model.answers import InputError
from paceline.serving.model.runners.base import Array, Outputs, TensorInfo, blamed
from paceline.serving.model.tensors import DATATYPES, check_known
from paceline.system.locks import locked

_ALIGNED = 64
#: Minimum size of a model's weights in bytes for which processes share the weights.
_LEAST_BYTES = 1 << 20


class _TorchRunner:
    platform = ""
    batches = True

    def __init__(self, module: Any, inputs: list[TensorInfo], shared: str | None, key: str) -> None:
        import torch

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if self._device != "cpu":
            module = module.to(self._device)
        elif shared is not None:
            share(module, shared, key)
        self._module = module
        self.inputs = inputs
        self.outputs = [TensorInfo("output", "FP32", None)]
        self.default = ["output"]
        # Call this in the thread that runs the model: torch's number of threads applies to the calling thread.
        torch.set_num_threads(max(1, torch.get_num_threads()))

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Outputs:
        torch = self._torch
        arrays = [torch.from_numpy(inputs[each.name]).to(self._device) for each in self.inputs]
        try:
            with torch.inference_mode():
                result = self._module(*arrays)
        except (RuntimeError, TypeError, ValueError, AssertionError) as reason:
            text = _said(reason)
            if text is None:
                raise
            raise InputError(f"the model can't take this input: {text}") from None
        return self._named(result, wanted)

    def _named(self, result: Any, wanted: Sequence[str]) -> Outputs:
        if isinstance(result, dict):
            named = result
        elif isinstance(result, (list, tuple)):
            named = (
                {f"output_{at}": each for at, each in enumerate(result)} if len(result) > 1 else {"output": result[0]}
            )
        else:
            named = {"output": result}
        arrays = {
            name: value.cpu().numpy() if isinstance(value, self._torch.Tensor) else value
            for name, value in named.items()
        }
        if list(wanted) == self.default and set(arrays) != set(self.default):
            # Name the outputs now, because a TorchScript model shows their number only when it is called.
            self.outputs = [TensorInfo(name, "FP32", None) for name in arrays]
            self.default = list(arrays)
            return arrays
        check_known("output", wanted, list(arrays))
        return {name: arrays[name] for name in wanted}


class TorchScriptRunner(_TorchRunner):
    platform = "pytorch_torchscript"

    def __init__(self, path: str, shared: str | None, key: str) -> None:
        import warnings

        import torch

        with warnings.catch_warnings():
            # Hide the warning of newer torch releases that TorchScript is deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            load: Any = torch.jit.load
            module = load(path, map_location="cpu").eval()
        names = [each.name for each in module.forward.schema.arguments[1:] if not each.has_default_value()]
        if not names:
            raise ServingError(f"{path}: its forward() takes nothing. Serve it with an entry script.")
        super().__init__(module, [TensorInfo(name, "FP32", None) for name in names], shared, key)


class ExportedRunner(_TorchRunner):
    platform = "pytorch_export"

    def __init__(self, path: str, shared: str | None, key: str) -> None:
        import torch

        program = torch.export.load(path)
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        inputs = []
        for name in program.graph_signature.user_inputs:
            value = placeholders[name].meta.get("val") if isinstance(name, str) else None
            if not isinstance(value, torch.Tensor):
                raise ServingError(f"{path}: its input {name!r} is not a tensor. Serve it with an entry script.")
            shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
            inputs.append(TensorInfo(str(name), DATATYPES.get(str(value.dtype).removeprefix("torch."), "FP32"), shape))
        if not inputs:
            raise ServingError(f"{path}: it takes nothing. Serve it with an entry script.")
        self.batches = all((each.shape or ())[:1] == (-1,) for each in inputs)
        super().__init__(program.module(), inputs, shared, key)


def _said(reason: Exception) -> str | None:
    """Return a message for the client if the request may have caused the error."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return blamed(type(reason)(lines[-1]) if len(lines) > 1 and "TorchScript" in str(reason) else reason)


def share(module: Any, folder: str, key: str) -> None:
    """Move a CPU module's weights into a file that all processes map.

    The file is `<folder>/<key>`. All processes share its memory pages; the kernel copies a page when a process writes
    to it. The weights stay in private memory if they are small, or if the disk is too full.
    """
    import torch

    weights: list[Any] = []
    seen: set[int] = set()
    for each in (*module.parameters(), *module.buffers()):
        # Tied weights appear several times in the model, so add each of them only once.
        if each.data_ptr() not in seen and each.layout == torch.strided and each.is_contiguous() and each.numel():
            seen.add(each.data_ptr())
            weights.append(each)
    offsets, size = [], 0
    for each in weights:
        offsets.append(size)
        size += -(-each.numel() * each.element_size() // _ALIGNED) * _ALIGNED
    if size < _LEAST_BYTES:
        return
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, key)
    with locked(Path(f"{path}.lock")):
        if not os.path.exists(path):
            if shutil.disk_usage(folder).free < 2 * size:
                return
            with open(f"{path}.part", "wb") as file:
                for each, offset in zip(weights, offsets, strict=True):
                    file.seek(offset)
                    file.write(each.detach().reshape(-1).view(torch.uint8).numpy().data)
                file.truncate(size)
            os.replace(f"{path}.part", path)
    if os.path.getsize(path) != size:
        return
    mapped = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    for each, offset in zip(weights, offsets, strict=True):
        end = offset + each.numel() * each.element_size()
        each.data = mapped[offset:end].view(each.dtype).view(each.shape)
