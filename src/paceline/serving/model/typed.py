"""Paceline's own contract of a scoring script: a function `predict` whose type hints say what it takes.

    def init(): ...                                            once, where there is one
    def predict(x: list[float], k: int = 1) -> list[float]: ...

A request is an object of JSON with the parameters by name. What does not fit the hints is refused before the function is
called, and OpenAPI is made of them. A script that has `predict_batch(calls)` beside it is given a list of what `predict` would
be called with, each a dict, and returns a list as long.
"""

from __future__ import annotations

import inspect
import time
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from paceline.errors import ServingError
from paceline.serving.model import swagger
from paceline.serving.model.answers import InputError, error, parsed
from paceline.serving.model.hints import Hints, object_schema, read_fields
from paceline.serving.model.queries import values_of
from paceline.serving.model.results import answered, failed, of_each
from paceline.serving.model.signatures import parameters
from paceline.serving.wire import INFER, ModelCall, Reply


class TypedScript:
    kind = "typed script"
    wants_head = False

    def __init__(self, module: ModuleType, setup: dict[str, Any]) -> None:
        path = str(module.__file__)
        self._predict = module.predict
        found = parameters(self._predict, path)
        if not found:
            raise ServingError(f"{path}: predict() has no parameters. Write those that a request is to bring.")
        try:
            said = typing.get_type_hints(self._predict, include_extras=True)
        except (NameError, TypeError) as reason:
            raise ServingError(f"{path}: the type hints of predict() can't be read: {reason}.") from reason
        hints = Hints()
        try:
            fields = {each.name: hints.of(said.get(each.name, Any)) for each in found}
        except ServingError as reason:
            raise ServingError(f"{path}: predict(): {reason}") from reason
        self._readers = {name: hint.read for name, hint in fields.items()}
        self._needed = {each.name for each in found if each.default is inspect.Parameter.empty}
        self._many = getattr(module, "predict_batch", None)
        self.is_batched = self._many is not None and setup["max_batch"] > 1
        try:
            returned = hints.of(said.get("return", Any)).schema
        except ServingError:  # nothing is checked by it
            returned = {}
        version = setup["models"][0]["version"] if setup["models"] else "1.0"
        self._document = swagger.openapi(
            setup["name"], version, object_schema(fields, self._needed), returned, hints.schemas
        )
        # Whose schemas are JSON Schema's.
        self._document["openapi"] = "3.1.0"

    def documents(self) -> dict[str, Any]:
        return {"openapi": self._document, "swagger3": self._document}

    def answer(self, calls: Sequence[ModelCall]) -> list[Reply]:
        if self._many is None or not self.is_batched:
            return [self._one(call) for call in calls]
        return of_each(calls, self._arguments, self._many, "predict_batch")

    def _one(self, call: ModelCall) -> Reply:
        try:
            arguments = self._arguments(call)
        except InputError as reason:
            return error(reason.status, str(reason))
        before = time.perf_counter()
        try:
            result = self._predict(**arguments)
        except Exception as raised:
            return failed(raised)
        return answered(result, before)

    def _arguments(self, call: ModelCall) -> dict[str, Any]:
        if call.operation == INFER:
            raise InputError("a scoring script has no tensors; POST to /score.", 404)
        value = values_of(call) if call.head.get("method") == "GET" else parsed(call.body)
        return read_fields(value, "", self._readers, self._needed)
