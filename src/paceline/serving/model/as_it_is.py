"""Serve a model without a script: /score takes rows, /v2/models/NAME/infer takes tensors.

/score   {"data": [[...], ...]}, or the list alone; {"NAME": [...], ...} for a model with several inputs. "method" or "outputs"
         selects outputs. The response is {"predict": [...]}, with a key for each output
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from paceline.serving.config import ServerConfig
from paceline.serving.model import swagger, tensors
from paceline.serving.model.answers import InputError, as_json, error, failure, in_protocol, parsed, refusal
from paceline.serving.model.runners.base import Array, Outputs, Runner, TensorInfo
from paceline.serving.wire import INFER, Documents, ModelCall, Reply

_FAILED = "the model failed on this input. Check the logs for more info."


class _Request(NamedTuple):
    inputs: dict[str, Array]
    wanted: list[str]
    rows: int
    is_infer: bool
    id: str | None


class AsItIs:
    wants_head = False

    def __init__(self, runner: Runner, config: ServerConfig) -> None:
        self._runner = runner
        self._model = config.models[0]
        self._name = config.name
        self.kind = runner.platform
        self.is_batched = runner.batches and config.max_batch > 1

    def documents(self) -> Documents:
        def described(each: TensorInfo) -> dict[str, object]:
            return {"name": each.name, "datatype": each.datatype, "shape": list(each.shape or (-1,))}

        title, version = self._name, self._model.version
        names = [each.name for each in self._runner.inputs]
        key = "data" if len(names) == 1 else None
        rows = {"type": "array", "items": {}}
        given_schema = {"type": "object", "properties": dict.fromkeys([key] if key else names, rows)}
        returned = {"type": "object", "properties": dict.fromkeys(self._runner.default, rows)}
        document = swagger.openapi(title, version, given_schema, returned)
        return {
            "metadata": {
                "name": self._model.name,
                "versions": [version],
                "platform": self._runner.platform,
                "inputs": list(map(described, self._runner.inputs)),
                "outputs": list(map(described, self._runner.outputs)),
            },
            "swagger2": swagger.swagger2(title, version, given_schema, returned),
            "swagger3": document,
            "openapi": document,
        }

    def answer(self, calls: Sequence[ModelCall]) -> list[Reply]:
        replies: dict[int, Reply] = {}
        groups: dict[Hashable, list[tuple[int, _Request]]] = {}
        for at, call in enumerate(calls):
            try:
                request = self._infer(call) if call.operation == INFER else self._score(call)
            except Exception as reason:
                replies[at] = _refused(call.operation == INFER, *refusal(reason))
                continue
            groups.setdefault(self._kind(request, at), []).append((at, request))
        for group in groups.values():
            for (at, _), reply in zip(group, self._run([request for _, request in group]), strict=True):
                replies[at] = reply
        return [replies[at] for at in range(len(calls))]

    def _kind(self, request: _Request, at: int) -> Hashable:
        """Return a key. Requests with equal keys run in one call of the model.

        A request that runs alone gets its index `at` as key.
        """
        if not self.is_batched or request.rows < 0:
            return at
        shapes = [(name, value.dtype.str, value.shape[1:]) for name, value in request.inputs.items()]
        return (tuple(shapes), tuple(request.wanted))

    def _run(self, group: list[_Request]) -> list[Reply]:
        before = time.perf_counter()
        first = group[0]
        try:
            results = [self._runner.run(first.inputs, first.wanted)] if len(group) == 1 else self._together(group)
        except Exception as reason:
            if len(group) > 1:  # run each request alone, so that one bad input does not fail the others
                return [reply for request in group for reply in self._run([request])]
            if isinstance(reason, InputError):
                return [_refused(first.is_infer, reason.status, str(reason))]
            return [_refused(first.is_infer, 500, failure(reason, _FAILED))]
        ran_us = int((time.perf_counter() - before) * 1e6)
        return [self._told(request, outputs, ran_us) for request, outputs in zip(group, results, strict=True)]

    def _together(self, group: list[_Request]) -> list[Outputs]:
        joined = {name: np.concatenate([request.inputs[name] for request in group]) for name in group[0].inputs}
        outputs = self._runner.run(joined, group[0].wanted)
        rows = sum(request.rows for request in group)
        if any(getattr(value, "shape", (len(value),))[:1] != (rows,) for value in outputs.values()):
            # If the output's first dimension is not the number of rows, the output can't be split, so stop batching.
            self.is_batched = False
            return [self._runner.run(request.inputs, request.wanted) for request in group]
        parts, at = [], 0
        for request in group:
            parts.append({name: value[at : at + request.rows] for name, value in outputs.items()})
            at += request.rows
        return parts

    def _told(self, request: _Request, outputs: Outputs, ran_us: int) -> Reply:
        try:
            if not request.is_infer:
                return Reply(200, as_json(outputs), [], ran_us)
            answer = {
                "model_name": self._model.name,
                "model_version": self._model.version,
                **({"id": request.id} if request.id is not None else {}),
                "outputs": [tensors.tensor(name, value) for name, value in outputs.items()],
            }
            return Reply(200, as_json(answer), [], ran_us)
        except Exception as reason:
            return _refused(request.is_infer, 500, failure(reason, _FAILED))

    def _infer(self, call: ModelCall) -> _Request:
        inputs, wanted, id_ = tensors.read_request(call.body, self._runner.inputs)
        return _Request(inputs, self._wanted(wanted), _rows(inputs), True, id_)

    def _score(self, call: ModelCall) -> _Request:
        if call.head.get("method") == "GET":
            raise InputError("POST rows to this model.", 405)
        value = parsed(call.body)
        wanted = None
        infos = self._runner.inputs
        if isinstance(value, dict):
            method, outputs = value.pop("method", None), value.pop("outputs", None)
            wanted = [method] if method is not None else outputs
            if wanted is not None and not (isinstance(wanted, list) and all(isinstance(each, str) for each in wanted)):
                raise InputError("method should be a name, and outputs a list of names.")
        if len(infos) == 1:
            rows = value
            if isinstance(value, dict):
                names = [name for name in ("data", infos[0].name) if name in value]
                if len(names) != 1 or len(value) != 1:
                    raise InputError('the body should be {"data": [[...], ...]}, a list a row.')
                rows = value[names[0]]
            frame = getattr(self._runner, "frame", None)
            if frame and isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                return _Request({infos[0].name: frame(rows)}, self._wanted(wanted), -1, False, None)
            arrays = {infos[0].name: tensors.from_lists(rows, infos[0])}
        else:
            if not isinstance(value, dict):
                raise InputError(f"the body should be an object with {', '.join(each.name for each in infos)}.")
            known = {each.name: each for each in infos}
            tensors.check_known("input", value, list(known))
            arrays = {name: tensors.from_lists(rows, known[name]) for name, rows in value.items()}
        arrays = tensors.named(arrays, infos)
        return _Request(arrays, self._wanted(wanted), _rows(arrays), False, None)

    def _wanted(self, names: list[str] | None) -> list[str]:
        if names is None:
            return self._runner.default
        tensors.check_known("output", names, [each.name for each in self._runner.outputs])
        return list(dict.fromkeys(names)) or self._runner.default


def _rows(inputs: dict[str, Array]) -> int:
    sizes = {value.shape[0] if value.ndim else -1 for value in inputs.values()}
    return sizes.pop() if len(sizes) == 1 else -1


def _refused(is_infer: bool, status: int, message: str) -> Reply:
    refused = error(status, message)
    return refused._replace(body=in_protocol(refused.body)) if is_infer else refused
