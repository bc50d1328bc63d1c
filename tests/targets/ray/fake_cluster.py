"""A stand-in for a Ray cluster's dashboard, as far as Paceline uses it. Its answers were taken from Ray 2.60."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeCluster:
    """jobs: submission id -> what Ray says of it. asked: the requests, as "METHOD path". logs: what each job wrote."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.jobs: dict[str, dict[str, Any]] = {}
        self.nodes: list[dict[str, Any]] = []
        self.packages: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.address = ""
        self.logs = "said\n"

    def add_node(self, name: str, *, state: str = "ALIVE", **resources: float) -> None:
        self.nodes.append(
            {
                "node_id": name * 2,
                "node_ip": name,
                "node_name": name,
                "is_head_node": not self.nodes,
                "state": state,
                "state_message": None,
                "resources_total": resources,
            }
        )

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path == "/api/jobs/" and method == "POST":
            given = json.loads(body)
            if given["submission_id"] in self.jobs:
                return (
                    500,
                    f"Traceback ...\nValueError: Job with submission_id {given['submission_id']} already exists.\n",
                )
            self.jobs[given["submission_id"]] = {
                **given,
                "type": "SUBMISSION",
                "status": "PENDING",
                "message": "Wait. So.",
            }
            return 200, {"submission_id": given["submission_id"]}
        if path == "/api/jobs/":
            return 200, [*self.jobs.values(), {"type": "DRIVER", "submission_id": None, "status": "RUNNING"}]
        if path == "/api/v0/nodes":
            return 200, {"result": True, "data": {"result": {"result": self.nodes}}}
        if path == "/api/cluster_status":
            usage = {node["node_id"]: {"CPU": [1.5, 4.0], "GPU": [1.0, 2.0]} for node in self.nodes}
            return 200, {"data": {"clusterStatus": {"loadMetricsReport": {"usageByNode": usage}}}}
        if path == "/api/version":
            return 200, {"ray_version": "2.60.0"}
        parts = path.split("/")
        if parts[2] == "packages":
            if method == "PUT":
                self.packages[parts[4]] = body
            return (200, None) if parts[4] in self.packages else (404, "Package does not exist")
        job = self.jobs.get(parts[3])
        if job is None:
            return 404, f"Job {parts[3]} does not exist"
        if parts[-1] == "stop":
            job["status"] = "STOPPED"
            return 200, {"stopped": True}
        return 200, {"logs": self.logs} if parts[-1] == "logs" else job


@contextlib.contextmanager
def fake_cluster(token: str | None = None) -> Iterator[FakeCluster]:
    cluster = FakeCluster(token)

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            cluster.asked.append(f"{self.command} {self.path}")
            cluster.headers.append({name.lower(): value for name, value in self.headers.items()})
            given = self.headers.get("Authorization") or self.headers.get("X-Ray-Authorization")
            if cluster.token is not None and given is None:
                status, answer = 401, "Unauthorized: Missing authentication token"
            elif cluster.token is not None and given != f"Bearer {cluster.token}":
                status, answer = 403, "Forbidden: Invalid authentication token"
            else:
                status, answer = cluster.answer(self.command, self.path, body)
            data = b"" if answer is None else (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        cluster.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield cluster
        finally:
            server.shutdown()
            thread.join()
