"""Send a request to a service, using the standard library alone."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request

from paceline.errors import EngineError, ServiceError, ServiceFailedError
from paceline.serving.api import message_of

_TIMEOUT_S = 60.0
_SHOWN = 2000


def call(
    uri: str, data: object, *, key: str | None = None, timeout_s: float = _TIMEOUT_S, certificate: str | None = None
) -> object:
    """Send a request to a service, and return the service's response.

    Args:
        uri: URL of the scoring endpoint.
        data: Text and bytes are sent unchanged; anything else as JSON.
        key: The service's key, sent as `Authorization: Bearer`.
        timeout_s: Limit on the connection and on each read.
        certificate: PEM file that is trusted besides the system's certificates.

    Raises:
        ServiceError: The data can't be encoded as JSON.
        ServiceFailedError: The service responded with an error, whose number is in `status`.
        EngineError: The service did not respond.
    """
    request = urllib.request.Request(uri, data=as_body(data), method="POST")
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with _opener(uri, certificate).open(request, timeout=timeout_s) as answer:
            return as_value(answer.read(), answer.headers.get_content_type())
    except urllib.error.HTTPError as error:
        with error:
            text = message_of(error.read(), _SHOWN)
        raise ServiceFailedError(f"{uri} answered {error.code}: {text}", error.code) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"{uri} does not answer: {reason}. `paceline service list` shows the states.") from error


def get(uri: str, *, key: str | None, timeout_s: float, certificate: str | None, most_bytes: int) -> bytes:
    """Return at most `most_bytes` of the response to a GET request.

    The other arguments have the same meaning as in `call`.

    Raises:
        OSError: The server does not answer, or answers with an error.
    """
    request = urllib.request.Request(uri)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    with _opener(uri, certificate).open(request, timeout=timeout_s) as answer:
        body: bytes = answer.read(most_bytes)
        return body


def _opener(uri: str, certificate: str | None) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context(cafile=None) if uri.startswith("https:") else None
    if context is not None and certificate is not None:
        context.load_verify_locations(certificate)
    # Use no proxy, because services run on this machine or in its network.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def as_body(data: object) -> bytes:
    """Encode the data of a request as the bytes of its body."""
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


def as_value(body: bytes, content_type: str) -> object:
    """Return the body of a response: JSON as Python values, text as str, else bytes."""
    if content_type == "application/json":
        return json.loads(body)
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body
