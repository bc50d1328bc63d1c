"""Scripts with Paceline's own contract: a function `predict` with type hints.

    def init(): ...                                            once, optional
    def predict(x: list[float], k: int = 1) -> list[float]: ...

A request is a JSON object with the parameters by name. Values that do not fit the hints are refused before the call.
The OpenAPI document is made from the hints. `predict_batch(calls)` gets a list with a dict of arguments for each
request, and returns a list of the same length.
"""

from __future__ import annotations

import inspect
import typing
from types import ModuleType
from typing import Any

from paceline.errors import ServingError
from paceline.serving.config import ServerConfig
from paceline.serving.model import swagger
from paceline.serving.model.answers import parsed
from paceline.serving.model.calling import Script, parameters, values_of
from paceline.serving.model.hints import Hints, object_schema, read_fields
from paceline.serving.wire import Documents, ModelCall


class TypedScript(Script):
    kind = "typed script"

    def __init__(self, module: ModuleType, config: ServerConfig) -> None:
        super().__init__(module, "predict", config)
        path = str(module.__file__)
        own_parameters = parameters(self._function, path)
        if not own_parameters:
            raise ServingError(f"{path}: predict() has no parameters. Write those that a request is to bring.")
        try:
            said = typing.get_type_hints(self._function, include_extras=True)
        except (NameError, TypeError) as reason:
            raise ServingError(f"{path}: the type hints of predict() can't be read: {reason}.") from reason
        hints = Hints()
        try:
            fields = {each.name: hints.of(said.get(each.name, Any)) for each in own_parameters}
        except ServingError as reason:
            raise ServingError(f"{path}: predict(): {reason}") from reason
        self._readers = {name: hint.read for name, hint in fields.items()}
        self._needed = {each.name for each in own_parameters if each.default is inspect.Parameter.empty}
        try:
            returned = hints.of(said.get("return", Any)).schema
        except ServingError:  # the result's type has no JSON schema, so the document describes any result
            returned = {}
        self._document = swagger.openapi(
            config.name, config.version, object_schema(fields, self._needed), returned, hints.schemas
        )
        # Set version 3.1: since this version OpenAPI uses JSON Schema, like the schemas that are made from type hints.
        self._document["openapi"] = "3.1.0"

    def documents(self) -> Documents:
        return {"openapi": self._document, "swagger3": self._document}

    def _arguments(self, call: ModelCall) -> dict[str, object]:
        value = values_of(call) if call.head.get("method") == "GET" else parsed(call.body)
        return read_fields(value, "", self._readers, self._needed)
