"""The ASGI application of a server.

    POST GET /score                                      the script, or the model served directly
    POST /v2/models/NAME[/versions/V]/infer              the model, by the Open Inference Protocol
    GET /   /livez   /v2/health/live                     liveness of the server
    GET /readyz   /v2/health/ready   /v2/models/.../ready    readiness of the model
    GET /swagger.json   /openapi.json   /metrics   /v2   /v2/models/NAME

/score and infer bypass Starlette's router, for speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from paceline.serving import wire
from paceline.serving.config import ServerConfig
from paceline.serving.front import metrics
from paceline.serving.front.connections import HEAD_BYTES
from paceline.serving.front.keys import is_allowed, is_right, refusal
from paceline.serving.front.metrics import AccessLog
from paceline.serving.front.pool import GONE, Pool
from paceline.serving.model.answers import error, in_protocol

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = Message
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

#: Maximum number of characters of a request's id. A longer id gets status 431, as from Azure's server.
_ID_LIMIT = 100
#: Seconds for which the unread rest of a refused body is read and discarded, so that the client reads the response.
_LINGER_S = 5.0
#: Paths that need no key, because their responses reveal nothing of the model.
_OPEN = ("/", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready")

#: Values of the query parameter `version` of /swagger.json and /openapi.json.
_SWAGGERS = ("2", "2.0", "3", "3.0")

#: Response headers that a browser may show to pages of other origins.
_EXPOSED = b"x-request-id, x-ms-request-id, x-ms-client-request-id, x-ms-run-fn-exec-ms, x-ms-run-function-failed"

_METHODS = {wire.SCORE: ("GET", "POST", "OPTIONS"), wire.INFER: ("POST",)}
#: Operation -> its name in the metrics. None stands for all requests that run no operation.
_NAMES: dict[int | None, str] = {wire.SCORE: "/score", wire.INFER: "infer", None: "other"}

_JSON = (b"content-type", b"application/json")
_CLOSE = (b"connection", b"close")


class RefusedError(Exception):
    """An error that refuses a request before it reaches the model.

    unread: Whether the server has left a part of the request's body unread.
    """

    def __init__(self, status: int, message: str, *headers: tuple[bytes, bytes], unread: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.headers, self.unread = status, message, headers, unread


class _Exchange:
    __slots__ = ("began", "ids", "receive", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.began = time.perf_counter()
        self.ids: list[tuple[bytes, bytes]] = []


class App:
    def __init__(self, pool: Pool, service: str, access: AccessLog) -> None:
        self.pool, self.access = pool, access
        self.metrics = metrics.Metrics(service)
        self.keys: tuple[bytes, ...] = ()
        self.is_draining = False
        self.connections: set[Any] = set()
        #: Path -> operation that the model runs for requests to this path.
        self._operations: dict[str, int] = {"/score": wire.SCORE}
        self._documents: wire.Documents = {}
        self._wants_head = False
        self._config: ServerConfig | None = None
        self._others = _routes(self)
        # A request's id is a random prefix and a counter, because creating a random id takes longer.
        self._ids, self._id_prefix = 0, os.urandom(8).hex().encode()

    def serve(self, config: ServerConfig, keys: tuple[bytes, ...]) -> None:
        """Use this configuration for requests from now on. Its model processes must be ready."""
        self._config, self.keys = config, keys
        process = self.pool.ready
        if process is None:
            return
        self._documents, self._wants_head = process.documents, process.wants_head
        self._operations = {"/score": wire.SCORE}
        if "metadata" in process.documents:
            for base in self.bases():
                self._operations[f"{base}/infer"] = wire.INFER

    def bases(self) -> list[str]:
        """Return the models' URL paths of the Open Inference Protocol, "/v2/models/NAME"."""
        paths = [(f"/v2/models/{model.name}", model.version) for model in (self._config.models if self._config else ())]
        return [base for path, version in paths for base in (path, f"{path}/versions/{version}")]

    def document(self, name: str) -> object:
        """Return the JSON document `name` about the model, such as "swagger3" (OpenAPI), or None."""
        return self._documents.get(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope, receive, send)
        path = scope["path"]
        operation = self._operations.get(path)
        try:
            headers_in = _wanted(scope)
            exchange.ids = self._request_ids(headers_in)
            reply = None if path in _OPEN else self._admit(exchange, headers_in)
            if reply is None:
                if operation is None:
                    await self._other(exchange)
                    return
                reply = await self._ask(scope, receive, headers_in, operation)
            if scope["state"]["connection"].is_lost:
                # Mark the request as disconnected: uvicorn reports a disconnect only to the last of several pipelined requests.
                vars(getattr(receive, "__self__", self))["disconnected"] = True
                raise _gone()
        except RefusedError as refused:
            await self._refuse(exchange, refused)
            return
        # The process pool makes bodies of 502 and 504 responses without knowing the path. Convert them to the path's protocol.
        body = in_words_of(path, reply.body) if reply.status in (502, 504) else reply.body
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers] or [_JSON]
        headers += exchange.ids
        headers.append((b"content-length", b"%d" % len(body)))
        if reply.ran_us:
            headers.append((b"x-ms-run-fn-exec-ms", b"%.3f" % (reply.ran_us / 1000)))
        if self.is_draining:
            headers.append(_CLOSE)
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
        self._note(exchange, reply.status, len(body), _NAMES[operation], reply.ran_us)

    def _admit(self, exchange: _Exchange, given: dict[bytes, bytes]) -> wire.Reply | None:
        scope, origin = exchange.scope, given.get(b"origin")
        config = self.pool.config
        if origin is not None and is_allowed(origin.decode("latin-1"), config.allow_origins):
            exchange.ids += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in given:
                wanted = given.get(b"access-control-request-headers", b"").decode("latin-1")
                headers = [("access-control-allow-methods", "GET, POST"), ("access-control-max-age", "600")]
                return wire.Reply(200, b"", [*headers, *([("access-control-allow-headers", wanted)] if wanted else [])])
        if self.keys:
            if not is_right(given.get(b"authorization"), self.keys):
                text = "the key is missing or wrong. Send `Authorization: Bearer KEY`."
                raise RefusedError(401, text, (b"www-authenticate", b"Bearer"), unread=True)
        elif (refused := refusal(given, config.host, config.allow_origins)) is not None:
            raise RefusedError(*refused, unread=True)
        return None

    async def _ask(self, scope: Scope, receive: Receive, given: dict[bytes, bytes], operation: int) -> wire.Reply:
        assert self._config is not None or self.pool.current is not None
        method, allowed = scope["method"], _METHODS[operation]
        if method not in allowed:
            header = (b"allow", ", ".join(allowed).encode())
            raise RefusedError(405, f"{method} is not answered here.", header, unread=True)
        if method == "OPTIONS":
            return wire.Reply(200, b"", [("allow", ", ".join(allowed))])
        encoding = given.get(b"content-encoding", b"identity").lower()
        if encoding not in (b"identity", b""):
            raise RefusedError(
                415,
                f"content-encoding {encoding.decode('latin-1')!r} is not supported. Send the body without encoding.",
                unread=True,
            )
        body = await self._body(receive, given)
        head = _head(scope) if self._wants_head or method != "POST" else b""
        if not self.is_loaded:
            raise _busy("the model is being loaded")
        waiting = self.pool.submit(operation, head, body)
        if waiting is None:
            raise _busy(f"{self.pool.config.max_queue} requests wait already")
        connection = scope["state"]["connection"]
        if connection.is_lost:
            self.pool.forget(waiting)
        connection.on_lost = partial(self.pool.forget, waiting)
        try:
            reply = await waiting.future
        finally:
            connection.on_lost = None
        if reply is None:
            raise _busy(f"no model process was free within {self.pool.config.timeout_s:g} s")
        return reply

    @property
    def is_loaded(self) -> bool:
        """Whether a model has been loaded since the server's start."""
        return self._config is not None

    async def _body(self, receive: Receive, given: dict[bytes, bytes]) -> bytes:
        limit = self.pool.config.max_body_bytes
        length = given.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        count, more = 0, True
        # The module `paceline.serving.front.connections` limits the time in which a request's body must arrive.
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _gone()
            part, more = message.get("body", b""), message.get("more_body", False)
            count += len(part)
            if count > limit:
                raise _too_large(limit)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _refuse(self, exchange: _Exchange, refused: RefusedError) -> None:
        path, send = exchange.scope["path"], exchange.send
        name = path if path in ("/score", "/metrics") else "other"
        if exchange.scope["state"]["connection"].is_lost:
            return self._note(exchange, refused.status, 0, name)
        body = in_words_of(path, error(refused.status, refused.message).body)
        size = len(body)
        headers = [_JSON, *exchange.ids, (b"content-length", b"%d" % size), *refused.headers]
        if self.is_draining or refused.unread:
            headers.append(_CLOSE)
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        if refused.unread:
            # Read and discard the remaining data: closing a connection with unread data could destroy the response.
            await send({"type": "http.response.body", "body": body, "more_body": True})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_forget(exchange.receive), _LINGER_S)
            body = b""
        await send({"type": "http.response.body", "body": body})
        self._note(exchange, refused.status, size, name)

    async def _other(self, exchange: _Exchange) -> None:
        status, size = 0, 0

        async def sent(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *exchange.ids, *([_CLOSE] if self.is_draining else ())]
            else:
                size += len(message.get("body", b""))
            await exchange.send(message)

        await self._others(exchange.scope, exchange.receive, sent)
        self._note(exchange, status, size, "other")

    def _request_ids(self, given: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        request_id = given.get(b"x-request-id")
        if request_id is None:
            self._ids += 1
            request_id = b"%s%x" % (self._id_prefix, self._ids)
        client = given.get(b"x-ms-client-request-id", b"")
        legacy = given.get(b"x-ms-request-id", b"")
        ids = {"x-request-id": request_id, "x-ms-client-request-id": client, "x-ms-request-id": legacy}
        if too_long := [name for name, value in ids.items() if len(value) > _ID_LIMIT]:
            raise RefusedError(431, f"{too_long[0]} must not exceed {_ID_LIMIT} characters", unread=True)
        headers = [(b"x-request-id", request_id), (b"x-ms-request-id", legacy or client or request_id)]
        if client or legacy:
            headers.append((b"x-ms-client-request-id", client or legacy))
        return headers

    def _note(self, exchange: _Exchange, status: int, size: int, name: str, ran_us: int | None = None) -> None:
        scope, ids = exchange.scope, exchange.ids
        # Use the status that the connection has sent, such as 408: the application only saw that the connection was closed.
        status = scope["state"]["connection"].status or status
        took = time.perf_counter() - exchange.began
        self.metrics.count(name, status, took, ran_us)
        # Don't log requests for health checks and metrics, because monitors send them every few seconds.
        if self.access.is_on and scope["path"] not in (*_OPEN, "/metrics"):
            self.access.add(scope["method"], scope["raw_path"], status, size, took, ids[0][1] if ids else b"-")

    def note_refused(self, status: int) -> None:
        """Count a refused request whose headers never arrived completely."""
        self.metrics.count("other", status, 0.0, None)
        self.access.add("-", b"-", status, 0, 0.0, b"-")


def in_words_of(path: str, body: bytes) -> bytes:
    """Convert an error response's body to the format of the protocol of this URL path."""
    return in_protocol(body) if path.startswith("/v2") else body


def _busy(why: str) -> RefusedError:
    return RefusedError(503, f"{why}; come again.", (b"retry-after", b"1"))


def _gone() -> RefusedError:
    return RefusedError(GONE, "the client has disconnected.")


def _too_large(limit: int) -> RefusedError:
    return RefusedError(413, f"the body has more than {limit} bytes, which is max_body_bytes.", unread=True)


async def _forget(receive: Receive) -> None:
    while (await receive()).get("more_body"):
        pass


_LOOKED_AT = frozenset(
    {
        *(b"authorization", b"content-length", b"content-encoding"),
        *(b"x-request-id", b"x-ms-request-id", b"x-ms-client-request-id"),
        *(b"host", b"origin", b"sec-fetch-site", b"access-control-request-method", b"access-control-request-headers"),
    }
)


def _wanted(scope: Scope) -> dict[bytes, bytes]:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    # Add 4 bytes for each header: ": " between its name and value, and the two bytes that end its line.
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size + len(scope["raw_path"]) + len(scope["query_string"]) > HEAD_BYTES:
        raise RefusedError(431, f"path and headers have more than {HEAD_BYTES} bytes.", unread=True)
    return {name: value for name, value in headers if name in _LOOKED_AT}


def _head(scope: Scope) -> bytes:
    return json.dumps(
        {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode("latin-1"),
            "scheme": scope["scheme"],
            "headers": [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
        }
    ).encode()


def _routes(app: App) -> Starlette:
    def answers(response: Response) -> _Handler:
        async def handler(request: Request) -> Response:
            return response

        return handler

    async def ready(request: Request) -> Response:
        is_ready = app.pool.ready is not None and app.is_loaded and not app.is_draining
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def swagger(request: Request) -> Response:
        version = request.query_params.get("version", "2")
        document = app.document(f"swagger{version.removesuffix('.0')}") if version in _SWAGGERS else None
        if document is None:
            there = [number for number in ("2.0", "3.0") if app.document(f"swagger{number[0]}")]
            raise HTTPException(
                404, f"Swagger version [{version}] is not supported. Supported versions: [{', '.join(there)}]."
            )
        return JSONResponse(document)

    async def openapi(request: Request) -> Response:
        if (document := app.document("openapi")) is None:
            raise HTTPException(404, "the model is not loaded yet, or has no description.")
        return JSONResponse(document)

    async def measured(request: Request) -> Response:
        return PlainTextResponse(app.metrics.text(app.pool, len(app.connections)), media_type=metrics.CONTENT_TYPE)

    async def server(request: Request) -> Response:
        from paceline import __version__

        return JSONResponse({"name": "paceline", "version": __version__, "extensions": []})

    async def model(request: Request) -> Response:
        path = request.url.path
        base = path.removesuffix("/ready")
        metadata = app.document("metadata")
        if base not in app.bases() or metadata is None:
            raise HTTPException(404, f"there is no model at {path!r}.")
        return await ready(request) if path != base else JSONResponse(metadata)

    async def no_model(request: Request) -> Response:
        raise HTTPException(404, f"there is no model at {request.url.path!r}.")

    async def wrong(request: Request, reason: Exception) -> Response:
        assert isinstance(reason, HTTPException)
        text = "there is nothing here." if reason.detail == "Not Found" else reason.detail
        return Response(
            in_words_of(request.url.path, json.dumps({"message": text}).encode()),
            reason.status_code,
            reason.headers,
            "application/json",
        )

    live = answers(JSONResponse({"live": True}))
    healthy = answers(PlainTextResponse("Healthy"))
    paths: dict[str, _Handler] = {
        **{"/": healthy, "/livez": live, "/v2/health/live": live},
        **{"/readyz": ready, "/v2/health/ready": ready},
        **{"/swagger.json": swagger, "/openapi.json": openapi, "/metrics": measured, "/v2": server},
    }
    routes = [Route(path, function) for path, function in paths.items()]
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        # Only unknown models get to these routes, since paths of existing models are handled before.
        routes += [
            Route(path, model),
            Route(f"{path}/ready", model),
            Route(f"{path}/infer", no_model, methods=["POST"]),
        ]
    return Starlette(routes=routes, exception_handlers={HTTPException: wrong})
