"""Replacements of the modules of Azure's server that scoring scripts import.

    from azureml.contrib.services.aml_request import AMLRequest, rawhttp
    from azureml.contrib.services.aml_response import AMLResponse

The real modules need Azure's own server and Flask, so a model process replaces them. It does not replace the parent
packages `azureml` and `azureml.contrib` if they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import urllib.parse
from collections.abc import Iterable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

from paceline.serving.wire import ModelCall, Reply

_HOMES = ("azureml.contrib.services", "azureml_inference_server_http.api")

#: Attribute by which `rawhttp` marks a function that takes the request object.
_RAW = "__paceline_rawhttp__"


def rawhttp(function: object) -> object:
    """Decorate a script's `run`, so that it gets the whole request object."""
    setattr(function, _RAW, True)
    return function


def is_raw(function: object) -> bool:
    return bool(getattr(function, _RAW, False))


class AMLRequest:
    """A request with the attributes of Flask's requests that scoring scripts use.

    method, path, full_path, url, mimetype: Texts.
    headers: The headers, whose names ignore case.
    data: The body as bytes.
    args: The query's parameters, as name -> first value.
    """

    def __init__(self, call: ModelCall) -> None:
        head = call.head
        self.method: str = head.get("method", "POST")
        self.path: str = head.get("path", "/score")
        self.query_string: bytes = head.get("query", "").encode()
        self.full_path = f"{self.path}?{head.get('query', '')}"
        self.headers = Headers(head.get("headers", []))
        self.url = f"{head.get('scheme', 'http')}://{self.headers.get('Host', 'localhost')}{self.full_path.rstrip('?')}"
        self.data = call.body
        self.args = Arguments(urllib.parse.parse_qsl(head.get("query", ""), keep_blank_values=True))
        self.content_type: str | None = self.headers.get("Content-Type")
        self.mimetype = (self.content_type or "").partition(";")[0].strip().lower()
        self.content_length = len(call.body)

    @property
    def is_json(self) -> bool:
        return is_json_type(self.mimetype)

    @property
    def json(self) -> object:
        return self.get_json()

    def get_data(self, cache: bool = True, as_text: bool = False, parse_form_data: bool = False) -> object:
        return self.data.decode() if as_text else self.data

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> object:
        if not (force or self.is_json):
            return None
        try:
            return json.loads(self.data)
        except ValueError:
            if silent:
                return None
            raise


class Arguments(dict[str, str]):
    """The parameters of a query, as name -> first value. `getlist` returns all values."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        super().__init__()
        self._pairs = pairs
        for name, value in pairs:
            self.setdefault(name, value)

    def getlist(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]


class AMLResponse:
    """A response with the status and headers that the script chooses.

    message: Text, bytes, or a list of texts or bytes. With `json_str`, any JSON-serializable value. None means an empty
        JSON object.
    """

    def __init__(
        self,
        message: Any,
        status_code: int,
        response_headers: dict[str, str] | None = None,
        json_str: bool = False,
        run_function_failed: bool = False,
    ) -> None:
        self.status_code = int(status_code)
        self.headers = Headers([])
        if message is None or json_str:
            self.data = json.dumps({} if message is None else message).encode()
            self.headers["Content-Type"] = "application/json"
        else:
            self.data = b"".join(map(_bytes, message)) if isinstance(message, (list, tuple)) else _bytes(message)
            self.headers["Content-Type"] = "text/html; charset=utf-8"
        self.headers["x-ms-run-function-failed"] = str(run_function_failed)
        for name, value in (response_headers or {}).items():
            self.headers[name] = str(value)

    def reply(self, ran_us: int) -> Reply:
        if self.status_code >= 500:
            self.headers["x-ms-run-function-failed"] = "True"
        return Reply(self.status_code, self.data, list(self.headers.items()), ran_us)


def is_json_type(mimetype: str) -> bool:
    return mimetype == "application/json" or (mimetype.startswith("application/") and mimetype.endswith("+json"))


def install() -> None:
    """Make the modules of Azure's server importable."""
    # Get the folder from this file's path, because a packaged service has only `paceline.serving`, and can't import others.
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    shim = os.path.join(package, "compat", "shim", "azureml_names")
    if os.path.isdir(shim) and shim not in sys.path:
        sys.path.insert(0, shim)
    for home in _HOMES:
        parts = home.split(".")
        for end in range(1, len(parts) + 1):
            _module(".".join(parts[:end]))
        for leaf, names in (
            ("aml_request", {"AMLRequest": AMLRequest, "rawhttp": rawhttp}),
            ("aml_response", {"AMLResponse": AMLResponse}),
        ):
            module = ModuleType(f"{home}.{leaf}")
            vars(module).update(names)
            sys.modules[module.__name__] = module
            setattr(sys.modules[home], leaf, module)


def _module(name: str) -> None:
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and name not in _HOMES:
        importlib.import_module(name)
        return
    module = ModuleType(name)
    module.__path__ = list(spec.submodule_search_locations or ()) if spec is not None else []
    sys.modules[name] = module
    above, _, leaf = name.rpartition(".")
    if above:
        setattr(sys.modules[above], leaf, module)


def _bytes(part: Any) -> bytes:
    return part.encode() if isinstance(part, str) else bytes(part)


class Headers(MutableMapping[str, str]):
    """Headers of a request or response, with case-insensitive names.

    Repeated headers are joined by a comma (RFC 9110, 5.3).
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._found: dict[str, tuple[str, str]] = {}
        for name, value in pairs:
            before = self._found.get(name.lower())
            self._found[name.lower()] = (name, f"{before[1]}, {value}" if before else value)

    def __getitem__(self, name: str) -> str:
        return self._found[name.lower()][1]

    def __setitem__(self, name: str, value: str) -> None:
        # Refuse a line feed in a header: it would start another header (header injection).
        if any(character in "\r\n\0" for character in name + value):
            raise ValueError(f"header {name!r}: a name or a value with a line feed can't be sent")
        self._found[name.lower()] = (name, value)

    def __delitem__(self, name: str) -> None:
        del self._found[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Headers({list(self.items())})"
