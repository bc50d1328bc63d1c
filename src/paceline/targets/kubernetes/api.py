"""Requests to a cluster's API in one namespace, as a kubeconfig's user.

Requests and WebSockets share one proxy, one TLS context and one login. Only the submitting machine loads this module.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar, cast

import httpx2
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import KubeConfig
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from paceline.errors import EngineError, TargetError
from paceline.targets.kubernetes.objects import KubeObject
from paceline.targets.kubernetes.settings import Json, KubeContext, Manifest, find_context

T = TypeVar("T")

#: Kind of object -> group and version of the API; other kinds are in the group without a name.
_GROUPS = {
    "jobs": "apis/batch/v1",
    "deployments": "apis/apps/v1",
    "workloads": "apis/kueue.x-k8s.io/v1beta1",
    "localqueues": "apis/kueue.x-k8s.io/v1beta1",
}
_TIMEOUT_S = 10.0
_PAGE = 500
#: Media types of one object and of a list of objects: whole, or only their metadata.
_OBJECT, _OBJECTS = (
    ("application/json", f"application/json;as=PartialObjectMetadata{suffix};g=meta.k8s.io;v=v1")
    for suffix in ("", "List")
)
#: Seconds after which the API ends a watch.
_WATCH_S = 120
#: Time limit, in seconds, of a credential plug-in if there is no terminal on which it can ask the user.
_PLUGIN_S = 60.0


class ApiRefusedError(TargetError):
    """The error that the API refuses a request, with the HTTP status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Cluster:
    """A thread-safe client of one namespace of a Kubernetes cluster.

    title: The compute target, for error messages. context: A context of the file `kubeconfig`; None for the usual file.
    """

    def __init__(self, title: str, context: str, namespace: str, kubeconfig: str | None) -> None:
        self.title, self.namespace = title, namespace
        found = find_context(title, kubeconfig, context)
        self.server = str(found.cluster["server"])
        host, scheme = httpx2.URL(self.server).host, self.server.partition(":")[0]
        usual = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme)
        self._proxy = str(found.cluster.get("proxy-url") or usual or "") or None
        self._http, self._tls = _client(title, found, self._proxy)

    def get(self, kind: str, name: str, *, only_metadata: bool = False) -> KubeObject | None:
        """Return a Kubernetes object, or None if it does not exist.

        Raises:
            EngineError: The API does not answer.
            ApiRefusedError: The user may not read the object.
        """
        found: KubeObject | None = None
        with _accepting(404):
            found = cast(KubeObject, self._json(self.path(kind, name), {}, _OBJECT[only_metadata]))
        return found

    def items(self, kind: str, *, only_metadata: bool = False, **params: str) -> list[KubeObject]:
        """Return all objects of a kind that match the selectors in `params`."""
        return self.listed(kind, only_metadata=only_metadata, **params)[0]

    def listed(self, kind: str, *, only_metadata: bool = False, **params: str) -> tuple[list[KubeObject], str]:
        """Return the objects of a kind, and the resource version for `watch`."""
        found: list[KubeObject] = []
        params = {**params, "limit": str(_PAGE)}
        while True:
            page = self._json(self.path(kind), params, _OBJECTS[only_metadata])
            found += page.get("items") or []
            about = page.get("metadata") or {}
            if not about.get("continue"):
                return found, str(about.get("resourceVersion"))
            params["continue"] = about["continue"]

    def watch(self, kind: str, version: str, **params: str) -> Iterator[tuple[str, KubeObject]]:
        """Yield (type, object) of events after a resource version, until the watch ends.

        Raises:
            EngineError: The connection broke, or the version is too old for the API.
            ApiRefusedError: The user may not watch these objects.
        """
        params |= {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        params["allowWatchBookmarks"] = "true"
        for line in self._lines(self.path(kind), params, f"watch {kind}"):
            try:
                event = json.loads(line)
            except ValueError as error:
                raise self._away(error) from error
            if event["type"] == "ERROR":
                raise EngineError(f"{self.title}: the watch of {kind} failed: {event['object'].get('message')}.")
            yield event["type"], event["object"]

    def follow_log(self, pod: str, container: str, since: str) -> Iterator[tuple[str, str]]:
        """Follow a container's log. Yield (time, text) of each line.

        since: Time of an earlier line, as this method yields it; "" for the whole log.

        Raises:
            EngineError: The connection broke, or the container was silent for two minutes.
            ApiRefusedError: The container has not started, or the user may not read logs.
        """
        given = {"container": container, "follow": "true", "timestamps": "true", "sinceTime": since}
        params = {name: text for name, text in given.items() if text}
        for line in self._lines(f"{self.path('pods', pod)}/log", params, f"read the log of {pod}"):
            stamp, _, text = line.partition(" ")
            if stamp > since:  # skip lines that were read before: `sinceTime` counts in whole seconds
                yield stamp, text

    def _lines(self, path: str, params: Mapping[str, str], what: str) -> Iterator[str]:
        timeout = httpx2.Timeout(_TIMEOUT_S, read=_WATCH_S + _TIMEOUT_S)
        try:
            with self._http.stream("GET", path, params=dict(params), timeout=timeout) as response:
                if not response.is_success:
                    response.read()
                    raise self._refusal(response, what)
                yield from response.iter_lines()
        except (httpx2.HTTPError, OSError) as error:
            raise self._away(error) from error

    def create(self, kind: str, body: Manifest, *, dry_run: bool = False) -> tuple[KubeObject, list[str]]:
        """Create an object. Return it and the API's warnings.

        Raises:
            ApiRefusedError: With code 409, an object of this name exists.
        """
        params = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        response = self.request("POST", self.path(kind), params, body)
        # Take the quoted text from the response header Warning, which has the form `299 - "text"` (RFC 7234).
        warnings = [text.partition(' "')[2].rstrip('"') for text in response.headers.get_list("warning")]
        return cast("KubeObject", response.json()), warnings

    def replace(self, kind: str, name: str, body: Manifest) -> KubeObject:
        """Replace an object, even if others have changed it meanwhile, and return it."""
        params = {"fieldValidation": "Strict"}
        return cast("KubeObject", self.request("PUT", self.path(kind, name), params, body).json())

    def ensure(self, kind: str, body: Manifest) -> KubeObject | None:
        """Create a Kubernetes object and return it, or return None if it exists."""
        made: KubeObject | None = None
        with _accepting(409):
            made, _ = self.create(kind, body)
        return made

    def delete(self, kind: str, name: str) -> None:
        """Delete an object, and the objects it owns, if it exists."""
        with _accepting(404):
            self.request("DELETE", self.path(kind, name), {"propagationPolicy": "Background"})

    def log(self, pod: str, container: str) -> bytes:
        """Return the log of a pod's container."""
        return self.request("GET", f"{self.path('pods', pod)}/log", {"container": container}).content

    def review(self, kind: str, spec: Manifest) -> dict[str, Any]:
        """Return the answer to a review of this user's rights, such as a SelfSubjectAccessReview."""
        body: Manifest = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        path = f"/apis/authorization.k8s.io/v1/{kind.lower()}s"
        return dict(self.request("POST", path, {}, body).json()["status"])

    def may(self, verb: str, resource: str) -> bool:
        """Return whether the user may use a verb, such as "create", on a resource."""
        resource, _, part = resource.partition("/")
        group = _GROUPS.get(resource, "//").split("/")[1]
        about = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource, "subresource": part}
        return bool(self.review("SelfSubjectAccessReview", {"resourceAttributes": about}).get("allowed"))

    def version(self) -> str:
        return str(self._json("/version", {}).get("gitVersion"))

    def websocket(self, path: str, params: Mapping[str, str], protocol: str) -> ClientConnection:
        """Open a WebSocket to a path of the API, and return the connection.

        Raises:
            EngineError: The API or the pod can't be reached.
            ApiRefusedError: The API refuses the WebSocket, for example because the user may not open it.
        """
        request = self._http.build_request("GET", path, params=dict(params))
        logins = (self._http.auth or httpx2.Auth()).sync_auth_flow(request)
        next(logins)  # adds the header Authorization
        url = str(request.url)
        while True:
            try:
                return connect(
                    f"ws{url.removeprefix('http')}",
                    ssl=self._tls if url.startswith("https") else None,
                    proxy=self._proxy,
                    additional_headers=[("Authorization", text) for text in request.headers.get_list("authorization")],
                    subprotocols=[Subprotocol(protocol)],
                    compression=None,
                    max_size=None,
                    open_timeout=_TIMEOUT_S,
                )
            except InvalidStatus as error:
                response = httpx2.Response(error.response.status_code, content=bytes(error.response.body or b""))
                try:
                    logins.send(response)  # renews an expired login
                except StopIteration:
                    raise self._refusal(response, f"open {path.rpartition('/')[2]}") from error
            except (WebSocketException, OSError) as error:
                raise self._away(error) from error

    def path(self, kind: str, name: str = "") -> str:
        return f"/{_GROUPS.get(kind, 'api/v1')}/namespaces/{self.namespace}/{kind}/{name}".rstrip("/")

    def patiently(self, call: Callable[[], T], limit_s: float, tell: Callable[[str], None] = lambda text: None) -> T:
        """Return the result of `call`, retried for `limit_s` while the API is unreachable."""
        deadline, pause_s, was_away = time.monotonic() + limit_s, 0.5, False
        while True:
            try:
                return call()
            except (EngineError, ApiRefusedError) as error:
                # Retry a 403 after an outage: an API server that has just started refuses requests until it has loaded all Roles.
                was_away = was_away or isinstance(error, EngineError)
                is_final = isinstance(error, ApiRefusedError) and (error.code != 403 or not was_away)
                if is_final or time.monotonic() + pause_s > deadline:
                    raise
                tell(f"{error} Trying again for {deadline - time.monotonic():.0f} s.")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)

    def request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Manifest | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """Send a request. If the API is busy, wait and retry.

        Raises:
            EngineError: The API does not answer.
            ApiRefusedError: The API refuses the request; the message has its text.
        """
        for left in reversed(range(6)):
            try:
                response = self._http.request(method, path, params=dict(params), json=body, headers=headers)
            except (httpx2.HTTPError, OSError) as error:
                raise self._away(error) from error
            # Wait and retry only after 429, which means that the API limits the number of requests.
            if response.status_code != 429 or not left:
                break
            told = response.headers.get("retry-after", "")  # seconds, or an HTTP date
            time.sleep(min(float(told) if told.isdecimal() else 1.0, 5.0))
        if response.is_success:
            return response
        raise self._refusal(response, f"{method} {path.rpartition('/')[2]}")

    def _json(self, path: str, params: Mapping[str, str], accept: str = "application/json") -> dict[str, Any]:
        response = self.request("GET", path, params, headers={"accept": accept})
        try:
            return dict(response.json())
        except ValueError as error:
            raise EngineError(f"{self.title}: {self.server} gives no JSON. Is it a Kubernetes API?") from error

    def _away(self, error: Exception) -> EngineError:
        said = str(error) or type(error).__name__
        return EngineError(f"{self.title}: the cluster at {self.server} does not answer: {said}.")

    def _refusal(self, response: httpx2.Response, what: str) -> EngineError | ApiRefusedError:
        try:
            said = str(response.json().get("message") or response.text)
        except (ValueError, AttributeError):
            said = response.text[:300] or response.reason_phrase
        said, code = said.rstrip("."), response.status_code
        if code >= 500 or code == 429:
            return EngineError(f"{self.title}: the cluster at {self.server} fails to {what} ({code}): {said}.")
        if code == 401:
            hint = "The credentials of the kubeconfig are wrong or have expired: log in again"
            return ApiRefusedError(f"{self.title}: {self.server} does not know this user ({said}). {hint}.", code)
        hint = f" `paceline compute doctor` prints the Role to ask for ({self.namespace})." if code == 403 else ""
        return ApiRefusedError(f"{self.title}: {said}.{hint}", code)


@contextlib.contextmanager
def _accepting(code: int) -> Iterator[None]:
    """Ignore ApiRefusedError with this HTTP status in a `with` block."""
    try:
        yield
    except ApiRefusedError as error:
        if error.code != code:
            raise


@functools.lru_cache(maxsize=8)
def cluster_of(title: str, context: str, namespace: str, kubeconfig: str | None) -> Cluster:
    """Return the client that this process shares for equal arguments of `Cluster`."""
    return Cluster(title, context, namespace, kubeconfig)


def _client(title: str, context: KubeContext, proxy: str | None) -> tuple[httpx2.Client, ssl.SSLContext]:
    plugin = context.user.get("exec")
    user: dict[str, Json] = {key: value for key, value in context.user.items() if key not in ("exec", "auth-provider")}
    # Don't use lightkube's login programs: it supports neither client certificates from them nor version v1 of their protocol.
    login = _Login(title, plugin) if isinstance(plugin, dict) else None
    try:
        named: dict[str, Any] = {
            "clusters": [{"name": "own", "cluster": context.cluster}],
            "users": [{"name": "own", "user": user | (login.certificate() if login else {})}],
            "contexts": [{"name": "own", "context": {"cluster": "own", "user": "own"}}],
        }
        config = KubeConfig.from_dict(named).get("own")
        assert config is not None
        params = ConnectionParams(proxy=proxy, trust_env=False).httpx_params(config)
    except (OSError, ValueError) as error:
        raise TargetError(f"{title}: context {context.name!r} of the kubeconfig can't be used: {error}.") from error
    # Allow 48 connections: 16 for simultaneous requests, and 32 for two watches of each of 16 workspaces.
    params |= {"timeout": httpx2.Timeout(_TIMEOUT_S), "limits": httpx2.Limits(max_connections=48)}
    return httpx2.Client(**(params | {"auth": login} if login else params)), params["verify"]


class _Login(httpx2.Auth):
    """A request authenticator that runs a kubeconfig's login program."""

    def __init__(self, title: str, plugin: Manifest) -> None:
        self._title, self._plugin = title, plugin
        self._lock = threading.Lock()
        self._status: dict[str, Json] = {}

    def certificate(self) -> dict[str, Json]:
        """Return the login program's client certificate and key in kubeconfig form."""
        self._ask()
        keys = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
        return {
            key: base64.b64encode(str(self._status[name]).encode()).decode()
            for key, name in keys.items()
            if self._status.get(name)
        }

    def sync_auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Add the login token to a request. After HTTP 401, fetch a new one."""
        for again in (False, True):
            with self._lock:
                if again or not self._status:
                    self._ask()
                token = self._status.get("token")
            if token:
                request.headers["Authorization"] = f"Bearer {token}"
            response = yield request
            if response.status_code != 401 or not token:
                return

    def _ask(self) -> None:
        plugin, is_terminal = self._plugin, sys.stdin is not None and sys.stdin.isatty()
        words = [str(plugin["command"]), *map(str, cast("list[Json]", plugin.get("args") or []))]
        listed = cast("list[dict[str, str]]", plugin.get("env") or [])
        info = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": {"interactive": is_terminal}}
        variables = {entry["name"]: entry["value"] for entry in listed}
        variables["KUBERNETES_EXEC_INFO"] = json.dumps(info)
        where = f"{self._title}: the kubeconfig's login program {words[0]!r}"
        hint = f" {plugin['installHint']}" if plugin.get("installHint") else ""
        if shutil.which(words[0]) is None:
            raise TargetError(f"{where} is not installed.{hint}")
        try:
            # Let the login program write to this process's standard error, because it may ask a person to open a web page.
            done = subprocess.run(
                words,
                env={**os.environ, **variables},
                stdin=None if is_terminal else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=None if is_terminal else _PLUGIN_S,
                check=False,
            )
            status = json.loads(done.stdout)["status"]
        except subprocess.TimeoutExpired as error:
            told = f"{where} waits for a person. Run it at a terminal first: {' '.join(words)}"
            raise TargetError(told) from error
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise TargetError(f"{where} gave no credentials. Run it at a terminal: {' '.join(words)}") from error
        self._status = status
