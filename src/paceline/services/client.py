"""One request to a service, with the standard library alone."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from paceline.errors import EngineError, ServiceError, ServiceFailedError
from paceline.serving.api import message_of

_TIMEOUT_S = 60.0
_SHOWN = 2000


def call(
    uri: str, data: Any, *, key: str | None = None, timeout_s: float = _TIMEOUT_S, certificate: str | None = None
) -> Any:
    """What the service answers, read as JSON where it is.

    data: text or bytes as they are; anything else as JSON. key: sent as `Authorization: Bearer`. certificate: the service's
    own (a PEM file), which is trusted besides those of the system.

    Raises:
        ServiceError: data that is no JSON.
        ServiceFailedError: the service answered with an error; `status` has its number.
        EngineError: nobody answered.
    """
    request = urllib.request.Request(uri, data=as_body(data), method="POST")
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    context = ssl.create_default_context(cafile=None) if uri.startswith("https:") else None
    if context is not None and certificate is not None:
        context.load_verify_locations(certificate)
    # No proxy: services are on this machine, or in its network.
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return as_value(answer.read(), answer.headers.get_content_type())
    except urllib.error.HTTPError as error:
        with error:
            text = message_of(error.read(), _SHOWN)
        raise ServiceFailedError(f"{uri} answered {error.code}: {text}", error.code) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EngineError(
            f"{uri} does not answer: {reason}. `paceline service list` shows how services stand."
        ) from error


def as_body(data: Any) -> bytes:
    """The bytes of a request.

    Raises:
        ServiceError: it is neither text, bytes nor what JSON can say.
    """
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    if isinstance(data, str):
        return data.encode()
    try:
        return json.dumps(data, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ServiceError(
            f"the data can't be sent as JSON: {error}. Give text, bytes, or lists, dicts, numbers and strings; of an array, "
            "its .tolist()."
        ) from error


def as_value(body: bytes, content_type: str) -> Any:
    """What these bytes of an answer say."""
    if content_type == "application/json":
        return json.loads(body)
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body
