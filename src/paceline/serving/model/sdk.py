"""Scripts with the Azure SDK's contract, compatible with azureml-inference-server-http 1.5.

    def init(): ...                     once
    def run(data): ...                  for each request; the result is sent as JSON

`run(data)` gets the body as text, for every content type. For a GET request, `data` is the query as JSON text. With
decorators of inference-schema, the body is a JSON object; its values are passed to `run` by name. With `@rawhttp`,
`run` gets the request object. A parameter `request_headers` gets the headers. Paceline adds `run_batch(data)`: it gets
a list with the data of several requests, and returns a list of the same length.
"""

from __future__ import annotations

import inspect
import json
import traceback
from types import ModuleType

from paceline.errors import ServingError
from paceline.serving.config import ServerConfig
from paceline.serving.model import swagger
from paceline.serving.model.aml_names import AMLRequest, Headers, is_json_type, is_raw
from paceline.serving.model.answers import InputError, error
from paceline.serving.model.calling import Script, parameters, values_of
from paceline.serving.wire import Documents, ModelCall, Reply

_DECORATORS = "inference_schema.schema_decorators"


class SdkScript(Script):
    kind = "script"

    def __init__(self, module: ModuleType, config: ServerConfig) -> None:
        super().__init__(module, "run", config)
        path = str(module.__file__)
        own_parameters = parameters(self._function, path)
        self._has_headers = any(each.name == "request_headers" for each in own_parameters)
        self._parameters = [each for each in own_parameters if each.name != "request_headers"]
        if not self._parameters:
            raise ServingError(f"{path}: run() has no parameter for the data. Write run(data).")
        self._is_raw = is_raw(self._function)
        self._is_decorated = swagger.is_decorated(self._function)
        if self._is_raw and self._is_decorated:
            raise ServingError(f"{path}: run() has both @rawhttp and @input_schema. Take one of them away.")
        if self._many is not None and (self._is_raw or self._is_decorated or self._has_headers):
            raise ServingError(
                f"{path}: run_batch(data) goes with a plain run(data), without decorators and request_headers."
            )
        self.wants_head = self._is_raw or self._is_decorated or self._has_headers
        self._config = config

    def documents(self) -> Documents:
        return swagger.documents(self._function, self._config)

    def _item(self, arguments: dict[str, object]) -> object:
        return arguments[self._parameters[0].name]

    def _failed(self, raised: Exception) -> Reply:
        if self._is_decorated and _is_of_the_input(raised):
            return error(400, " ".join(str(raised).split()))
        return super()._failed(raised)

    def _arguments(self, call: ModelCall) -> dict[str, object]:
        headers = {"request_headers": dict(_titled(call))} if self._has_headers else {}
        return {**self._data(call), **headers}

    def _data(self, call: ModelCall) -> dict[str, object]:
        name = self._parameters[0].name
        if self._is_raw:
            return {name: AMLRequest(call)}
        is_get = call.head.get("method") == "GET"
        if not self._is_decorated:
            if is_get:
                return {name: json.dumps(values_of(call))}
            try:
                return {name: str(call.body, "utf-8")}
            except UnicodeDecodeError as reason:
                raise InputError(f"Input cannot be decoded as UTF-8: {reason}") from None
        values = values_of(call) if is_get else _object(call)
        given = {}
        for each in self._parameters:
            value = values.get(each.name, each.default)
            if value is inspect.Parameter.empty:
                raise InputError(f"A value is not provided for the {each.name!r} parameter.")
            given[each.name] = value
        return given


def _is_of_the_input(raised: Exception) -> bool:
    """Return whether inference-schema refused the input before it called run()."""
    return any(
        frame.f_code.co_name == "_deserialize_input_argument" and frame.f_globals.get("__name__") == _DECORATORS
        for frame, _ in traceback.walk_tb(raised.__traceback__)
    )


def _object(call: ModelCall) -> dict[str, object]:
    kind = Headers(call.head.get("headers", [])).get("content-type", "").partition(";")[0].strip().lower()
    if not is_json_type(kind):
        raise InputError("Expects Content-Type to be application/json", 415)
    try:
        value = json.loads(call.body)
    except (ValueError, RecursionError) as reason:
        if not call.body:
            raise InputError("POST body is empty. Expecting a JSON dictionary.") from None
        raise InputError(f"POST body could not be decoded as JSON: {reason}") from None
    if not isinstance(value, dict):
        raise InputError("POST body should be a JSON dictionary.")
    return value


def _titled(call: ModelCall) -> list[tuple[str, str]]:
    return [("-".join(part.title() for part in name.split("-")), value) for name, value in call.head.get("headers", [])]
