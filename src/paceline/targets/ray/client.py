"""A client of a Ray cluster's HTTP interface: jobs, nodes, packages.

Sources: https://docs.ray.io/en/latest/cluster/running-applications/job-submission/openapi.html, and
ray/dashboard/modules/job/job_head.py for requests not described there. Tokens: `Authorization: Bearer`; HTTP 401 without a
token, 403 with a wrong token (Ray 2.52 and later).

All runs of a workspace share a query for jobs for some seconds:

    <workspace>/engines/ray-<hash of the address>.json     {"told", "time", "jobs": {id: {...}}} or {"told", "error"}
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.errors import EngineError, PacelineError, TargetError
from paceline.remote.foreign_python import library_digest, packed_library
from paceline.system import listening
from paceline.targets.polling import answer, answers_dir
from paceline.targets.ray.settings import RaySettings, token

_TIMEOUT_S = 20.0
#: Maximum bytes of an uploaded package. Ray keeps packages in its head node's memory, in total at most 512 MiB.
PACKAGE_BYTES = 256 << 20


class UnreachableError(EngineError):
    """The error that a Ray cluster does not answer; its jobs may go on."""


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A job as Ray reports it.

    Attributes:
        status: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        message, error_type: Ray's description of the state, and its name for the cause of a failure.
        run_id, user: The run of the job and its submitter; "" for jobs of other programs.
    """

    submission_id: str
    status: str
    message: str = ""
    error_type: str | None = None
    run_id: str = ""
    user: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RayJob:
        # If another program has submitted the job, its metadata may have values of other types.
        metadata = data.get("metadata") or {}
        return cls(
            run_id=str(metadata.get("paceline_run_id") or ""),
            user=str(metadata.get("paceline_user") or ""),
            submission_id=data["submission_id"],
            status=str(data.get("status")),
            message=str(data.get("message") or ""),
            error_type=data.get("error_type"),
        )


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node as Ray reports it.

    Attributes:
        total: The amount of each resource that the node has.
        used: The amount of each resource in use; empty if the use is unknown or was not queried.
    """

    node_id: str
    name: str
    address: str
    is_alive: bool
    is_head: bool
    message: str
    total: Mapping[str, float]
    used: Mapping[str, float]


def is_loopback(address: str) -> bool:
    """Return whether a URL's host is a loopback address of this machine."""
    return listening.is_loopback(urllib.parse.urlsplit(address).hostname or "")


class RayClient:
    """A client of a Ray cluster's HTTP interface."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        # Don't use a proxy from the environment for a loopback address, because the proxy can't reach this machine's loopback.
        own = [urllib.request.ProxyHandler({})] if is_loopback(settings.address) else []
        self._opener = urllib.request.build_opener(*own, _NoRedirects())

    @property
    def address(self) -> str:
        return self._settings.address

    # Methods that send requests about jobs

    def submit(
        self, entrypoint: str, submission_id: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> None:
        """Start a Ray job, unless a job with this id exists."""
        body = {
            "entrypoint": entrypoint,
            "submission_id": submission_id,
            "runtime_env": dict(runtime_env),
            "metadata": dict(metadata),
        }
        try:
            self._call("POST", "/api/jobs/", body)
        except _AnswerError as error:
            # If an earlier request arrived but its answer was lost, the job exists now, and Ray answers with HTTP 500.
            if "already exists" not in error.text and self.job(submission_id) is None:
                raise

    def jobs(self) -> list[RayJob]:
        """Return all jobs that any user has submitted to the cluster."""
        found = self._call("GET", "/api/jobs/")
        return [RayJob.from_json(data) for data in found if data.get("submission_id")]

    def job(self, submission_id: str) -> RayJob | None:
        """Return a job, or None if it does not exist."""
        found = self._known("GET", f"/api/jobs/{quote(submission_id, safe='')}")
        return None if found is None else RayJob.from_json(found)

    def stop(self, submission_id: str) -> None:
        """Stop a job by SIGTERM, then SIGKILL, if it is running."""
        self._known("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop")

    def logs(self, submission_id: str) -> str:
        """Return a job's output; "" if Ray no longer has it."""
        try:
            return str(self._call("GET", f"/api/jobs/{quote(submission_id, safe='')}/logs").get("logs") or "")
        except _AnswerError:
            return ""

    # Methods that send requests about the cluster and its nodes

    def version(self) -> str:
        return str(self._call("GET", "/api/version").get("ray_version"))

    def nodes(self, *, usage: bool = False) -> list[RayNode]:
        """Return the cluster's nodes, including nodes that died recently.

        usage: Also query the used resources, which takes another request.
        """
        found = self._call("GET", "/api/v0/nodes?limit=10000&detail=1")
        listed = found.get("data", {}).get("result", {}).get("result") or []
        used_on = self._usage() if usage else {}
        nodes = []
        for data in listed:
            node_id = str(data.get("node_id"))
            used = used_on.get(node_id, {})
            nodes.append(
                RayNode(
                    node_id=node_id,
                    name=str(data.get("node_name") or data.get("node_ip")),
                    address=str(data.get("node_ip")),
                    is_alive=data.get("state") == "ALIVE",
                    is_head=bool(data.get("is_head_node")),
                    message=str(data.get("state_message") or ""),
                    total={str(key): float(value) for key, value in (data.get("resources_total") or {}).items()},
                    used={str(key): float(value[0]) for key, value in used.items()},
                )
            )
        return nodes

    def _usage(self) -> dict[str, dict[str, Any]]:
        try:
            status = self._call("GET", "/api/cluster_status")["data"]["clusterStatus"]
            return dict(status["loadMetricsReport"]["usageByNode"])
        except (_AnswerError, KeyError, TypeError):
            return {}  # without a monitor process the cluster has no report of its load

    # Methods that send requests about packages in the cluster's package cache

    def has_package(self, name: str) -> bool:
        """Return whether the cluster caches a package (`_ray_pkg_<hash>.zip`)."""
        return self._known("GET", f"/api/packages/gcs/{quote(name, safe='')}") is not None

    def upload_package(self, name: str, data: bytes) -> None:
        """Upload a package, whose URI is then `gcs://<name>`."""
        self._call("PUT", f"/api/packages/gcs/{quote(name, safe='')}", data)

    # Methods that send HTTP requests

    def _known(self, method: str, path: str) -> Any:
        try:
            return self._call(method, path)
        except _RefusedError as error:
            if error.status == 404:
                return None
            raise

    def _call(self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None) -> Any:
        """Send a request. Return the answer's JSON, or {} without content.

        Raises:
            UnreachableError: The connection fails, the answer takes too long, or its status is HTTP 5xx.
            TargetError: The cluster refuses the request, or the answer is not JSON.
        """
        settings = self._settings
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(settings.address + path, data=data, method=method)
        for name, value in self._headers(is_json=not isinstance(body, bytes)).items():
            # Add the header so that urllib does not send it to the target of a redirect.
            request.add_unredirected_header(name, value)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                # Limit the read: the body of an error may be a whole HTML page.
                raise _refused(
                    settings, error.code, error.read(20_000).decode(errors="replace"), method, path
                ) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(
                f"compute target {settings.name!r}: the Ray cluster at {settings.address} does not answer: "
                f"{reason or type(error).__name__}. Is it up, and reachable from here? `ray status` on its head tells."
            ) from error
        try:
            return json.loads(text) if text else {}
        except ValueError:
            raise TargetError(
                f"compute target {settings.name!r}: {settings.address} answers, but not as a Ray dashboard does. "
                "Is the address right?"
            ) from None

    def _headers(self, *, is_json: bool) -> dict[str, str]:
        headers = {"Content-Type": "application/json" if is_json else "application/octet-stream"}
        for name, value in self._settings.headers.items():
            headers[name] = _from_place(self._settings.name, name, value)
        named = {name.lower() for name in headers}
        if (secret := token(self._settings)) is not None:
            # If a proxy needs the header Authorization, send the token as X-Ray-Authorization, which Ray accepts too.
            name = "X-Ray-Authorization" if "authorization" in named else "Authorization"
            headers[name] = f"Bearer {secret}"
        return headers


class _AnswerError(PacelineError):
    """The error that the cluster answered with an HTTP error status."""

    def __init__(self, message: str, status: int, text: str) -> None:
        super().__init__(message)
        self.status = status
        self.text = text


class _RefusedError(_AnswerError, TargetError):
    """The error that the cluster refuses a request."""


class _FailedError(_AnswerError, UnreachableError):
    """The error that the dashboard or a proxy answered with HTTP 5xx."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects, so that no other server gets the token."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _refused(settings: RaySettings, status: int, text: str, method: str, path: str) -> _AnswerError:
    title = f"compute target {settings.name!r}: the Ray cluster at {settings.address}"
    if status == 401:
        message = (
            f"{title} wants a token, and there is none. `ray get-auth-token` on its head prints it; "
            "set token_file (mode 600) or token_env."
        )
    elif status == 403:
        message = f"{title} does not take this token. Is it this cluster's? `ray get-auth-token` on its head prints it."
    else:
        said, asked = _last_line(text), f"{method} {path.partition('?')[0]}"
        answer = f"HTTP {status}{f': {said}' if said else ''}"
        if status >= 500:
            message = (
                f"{title} could not answer {asked}: {answer}. Try again; `ray status` on its head tells how it is."
            )
            return _FailedError(message, status, text)
        message = f"{title} refuses {asked}: {answer}."
    return _RefusedError(message, status, text)


def _last_line(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".")[:500] if lines else ""


def _from_place(target: str, header: str, value: str) -> str:
    if not value.startswith("env:"):
        return value
    found = os.environ.get(value[4:])
    if found is None:
        raise TargetError(
            f"compute target {target!r}: the environment has no {value[4:]}, which its header {header!r} needs."
        )
    return found


def send_library(client: RayClient, library_dir: Path) -> str:
    """Upload Paceline unless the cluster has this version. Return the package's URI."""
    # The package's name is a hash of its content. So each version of Paceline is packed and uploaded only once.
    name = f"_ray_pkg_{library_digest(library_dir)[:16]}.zip"
    if not client.has_package(name):
        data = packed_library(library_dir)
        assert len(data) < PACKAGE_BYTES
        client.upload_package(name, data)
    return f"gcs://{name}"


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Ray's jobs by id as of one query, and the query's Unix time."""

    time: float
    jobs: dict[str, RayJob] = field(default_factory=dict)


def all_jobs(workspace_dir: Path, address: str, ask: Callable[[], list[RayJob]], prefix: str) -> Jobs:
    """Return Ray's jobs whose ids begin with `prefix`. Call `ask` if the cached jobs are too old.

    Raises:
        UnreachableError: The cluster did not answer the last query.
    """
    path = answers_dir(workspace_dir) / f"ray-{hashlib.sha256(address.encode()).hexdigest()[:12]}.json"
    found = answer(path, lambda: _asked(ask, prefix))
    if "error" in found:
        raise UnreachableError(found["error"])
    return Jobs(time=found["time"], jobs={key: RayJob(**value) for key, value in found["jobs"].items()})


def _asked(ask: Callable[[], list[RayJob]], prefix: str) -> dict[str, object]:
    # Store the time before the call, because the answer may lack changes that happen during the call.
    asked = time.time()
    try:
        jobs = {job.submission_id: asdict(job) for job in ask() if job.submission_id.startswith(prefix)}
    # Cache failures too: otherwise each of hundreds of readers would wait for the timeout.
    except UnreachableError as error:
        return {"told": time.time(), "error": str(error)}
    return {"told": time.time(), "time": asked, "jobs": jobs}
