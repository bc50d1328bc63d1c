"""Frames between the front (the process that holds the clients' connections) and a model process, over a local socket.

    frame   kind, length of the payload
    SETUP   front -> process   JSON: the model to load
    READY   process -> front   JSON: the loaded model, and how it takes requests
    FAILED  process -> front   JSON: why it can't be loaded
    CALLS   front -> process   requests, each: number, operation, head, body
    REPLIES process -> front   responses, each: number, status, microseconds, headers, body

A head is JSON with the method, path, query and headers of a request; it is empty if the model does not need it. The
headers of a response are a JSON list of pairs, which is empty if the body is JSON.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict

from paceline.serving.config import ServerConfig

SETUP, READY, FAILED, CALLS, REPLIES = range(1, 6)

#: Operations of a call: score a request, or infer by the Open Inference Protocol.
SCORE, INFER = 0, 1

FRAME = struct.Struct("<BQ")
_CALL = struct.Struct("<QBIQ")
_REPLY = struct.Struct("<QHQIQ")


#: Folder in which `python -m` starts. Python puts it first in `sys.path`, and it has no modules that would shadow others.
STARTED_IN = "/"

#: JSON documents that the HTTP server returns, by name: "swagger2", "swagger3", "openapi", "metadata" (of the protocol).
Documents: TypeAlias = "dict[str, object]"


@dataclass(frozen=True)
class ModelSetup:
    """The message that gives a model process its configuration and a shared folder."""

    config: ServerConfig
    shared: str

    def to_json(self) -> dict[str, object]:
        return {"config": self.config.to_json(), "shared": self.shared}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ModelSetup:
        return cls(ServerConfig.from_json(value["config"]), value["shared"])


@dataclass(frozen=True)
class LoadedModel:
    """The message of a model process about the model that it has loaded."""

    kind: str
    wants_head: bool
    is_batched: bool
    documents: Documents


class RequestHead(TypedDict, total=False):
    """Method, path, query and headers of a request."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]


class ModelCall(NamedTuple):
    """A request to a model. Its head (method, URL, headers) may be empty."""

    number: int
    operation: int
    head: RequestHead
    body: bytes


class Reply(NamedTuple):
    """A response to a request.

    headers: Headers of the response that the server does not add itself; empty for a JSON body.
    ran_us: Microseconds that the model took.
    """

    status: int
    body: bytes
    headers: Sequence[tuple[str, str]] = ()
    ran_us: int = 0


def frame(kind: int, payload: bytes) -> bytes:
    return FRAME.pack(kind, len(payload)) + payload


def json_frame(kind: int, value: object) -> bytes:
    return frame(kind, json.dumps(value).encode())


def receive(link: socket.socket) -> tuple[int, bytes] | None:
    """Return the next message as (kind, payload), or None once the socket is closed.

    The socket must be blocking. The sender must wait for the response to a message before it sends the next message.

    Raises:
        TimeoutError: The socket's timeout has passed.
    """
    head = _exactly(link, b"", FRAME.size)
    if head is None:
        return None
    kind, size = FRAME.unpack_from(head)
    whole = _exactly(link, head, FRAME.size + size)
    return None if whole is None else (kind, whole[FRAME.size :])


def _exactly(link: socket.socket, begun: bytes, size: int) -> bytes | None:
    parts, count = [begun], len(begun)
    while count < size:
        try:
            part = link.recv(max(65536, min(size - count, 1 << 20)))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        count += len(part)
    return b"".join(parts)


def pack_call(number: int, operation: int, head: bytes, body: bytes) -> bytes:
    return b"".join((_CALL.pack(number, operation, len(head), len(body)), head, body))


def unpack_calls(payload: bytes) -> Iterator[ModelCall]:
    at = 0
    while at < len(payload):
        number, operation, head_size, body_size = _CALL.unpack_from(payload, at)
        at += _CALL.size
        head = payload[at : at + head_size]
        at += head_size
        yield ModelCall(number, operation, json.loads(head) if head else {}, payload[at : at + body_size])
        at += body_size


def pack_reply(number: int, reply: Reply) -> bytes:
    headers = json.dumps(reply.headers).encode() if reply.headers else b""
    return b"".join(
        (_REPLY.pack(number, reply.status, reply.ran_us, len(headers), len(reply.body)), headers, reply.body)
    )


def unpack_replies(payload: bytes | memoryview) -> Iterator[tuple[int, Reply]]:
    at = 0
    while at < len(payload):
        number, status, ran_us, headers_size, body_size = _REPLY.unpack_from(payload, at)
        at += _REPLY.size
        headers = [(name, value) for name, value in json.loads(bytes(payload[at : at + headers_size]) or b"[]")]
        at += headers_size
        yield number, Reply(status, bytes(payload[at : at + body_size]), headers, ran_us)
        at += body_size


class Servable(Protocol):
    """A loaded script or model, which answers requests.

    kind: A text for the log, such as "script".
    wants_head: Whether the model needs each request's method, query or headers.
    is_batched: Whether the script or model can answer several requests in one call.
    """

    kind: str
    wants_head: bool
    is_batched: bool

    def documents(self) -> Documents:
        """Return documents about the model to publish as JSON, such as OpenAPI."""
        ...

    def answer(self, calls: Sequence[ModelCall]) -> list[Reply]:
        """Return a response to each request. Bad requests never raise an exception."""
        ...
