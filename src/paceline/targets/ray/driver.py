"""A program, `python .../driver.py`, that holds a placement group for the supervisor that started it.

Only this module loads Ray. It runs in the cluster's interpreter with the cluster's PYTHONPATH, is started by its path, and
imports nothing else of Paceline. Standard input has a request as one line of JSON; standard output reports events as lines of
JSON. When standard input ends or has another line, the program releases its nodes and ends. So it never outlives its supervisor.

    {"bundles": [{"CPU": 2}, ...], "name": ..., "port": ..., "token": ...}   the request. "host": where nodes connect to,
                                                                             if not to this machine; "least": how many
                                                                             bundles suffice; "avoid": ids of nodes to skip

    {"is": "connected", "python": ..., "version": ...}
    {"is": "waiting", "nodes": [{"name", "node_id", "total", "free"}, ...]}   every second, until placement
    {"is": "placed", "count": 3}                                              number of bundles
    {"is": "spare", "count": 1}                                               with "least": number of further free nodes
    {"is": "ended", "rank": 1, "why": ...}                                    a node's task has ended
    {"is": "failed", "why": ...}                                              everything has ended

On each node a Ray task connects to the supervisor and passes the connection to an agent (`hold`).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from typing import Any

_WAIT_S = 1.0
#: Seconds to wait for more nodes, because Ray takes a while to free resources that were returned.
_SETTLE_S = 3.0
#: Seconds after which a chosen node counts as lost, or as used by other programs, if Ray has not placed its bundle there.
_PLACE_S = 5.0
#: Seconds for which Ray may list a lost node as alive, since Ray's health checks take a minute.
_AVOID_S = 90.0
#: Modules that `import ray` loads although this program does not use them. They take a quarter of the import's time.
_LOADED_ON_USE = ("requests", "jsonschema")


def hold(host: str, port: int, token: str, rank: int) -> str:
    """Run an agent in a node's Ray worker process. Return how it ended.

    Ray pickles this function by value, since the node has no Paceline.
    """
    import contextlib
    import importlib
    import json
    import os
    import socket
    import subprocess
    import sys

    ray: Any = importlib.import_module("ray")
    # Use the environment that `ray start` gave to the raylet, because Ray has changed this worker process's environment.
    environment = dict(os.environ)
    with (
        contextlib.suppress(OSError, KeyError, ValueError),
        open(f"/proc/{os.environ['RAY_RAYLET_PID']}/environ", "rb") as file,
    ):
        words = file.read().decode(errors="surrogateescape").split("\0")
        found = dict(word.split("=", 1) for word in words if "=" in word)
        environment = found or environment
    if "LD_PRELOAD" not in os.environ:
        environment.pop("LD_PRELOAD", None)  # it names the raylet's memory allocator, which workers must not load
    environment = {name: value for name, value in environment.items() if not name.startswith(("RAY_", "__RAY"))}
    devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    told = {
        "token": token,
        "rank": rank,
        "address": ray.util.get_node_ip_address(),
        "hostname": socket.gethostname(),
        "node_id": ray.get_runtime_context().get_node_id(),
        "python": sys.executable,
        "gpus": [str(device) for device in devices],
    }
    with contextlib.suppress(OSError):
        link = socket.create_connection((host, port), timeout=20)
        link.settimeout(None)
        link.sendall(json.dumps(told).encode() + b"\n")
        # If Ray kills this process, for example for lack of memory, the kernel (prctl) kills the child. Then the agent ends, too.
        die_with_ray = f"import ctypes,os;ctypes.CDLL(None).prctl(1,9,0,0,0);os.getppid()=={os.getpid()} or os._exit(1)"
        words = [
            *(sys.executable, "-S", "-c"),
            f"{die_with_ray if sys.platform.startswith('linux') else ''}\nimport sys;exec(sys.stdin.buffer.readline())",
        ]
        agent = subprocess.Popen(
            words, stdin=link.fileno(), stdout=link.fileno(), env=environment, cwd="/", start_new_session=True
        )
        link.close()
        code = agent.wait()
        return f"its agent ended with exit code {code}" if code >= 0 else f"its agent was killed by signal {-code}"
    return f"it can't reach the supervisor at {host}, port {port}"


class Driver:
    """A holder of one placement group, which reports its events by calling `say`."""

    def __init__(self, ray: Any, request: dict[str, Any], say: Any) -> None:
        self._ray = ray
        self._request = request
        self._say = say
        self._group: Any = None
        self._begun = time.monotonic()
        self._spare = 0

    def run(self) -> None:
        """Hold a placement group until the tasks on all its nodes have ended."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        host = self._request.get("host") or self._ray.util.get_node_ip_address()
        task = self._ray.remote(hold)
        bundles = self._place_some() if "least" in self._request else self._place(self._request["bundles"])
        assert bundles is not None, "without a limit of time it comes back with its bundles"
        self._say({"is": "placed", "count": len(bundles)})
        ranks = {}
        for rank, bundle in enumerate(bundles):
            others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
            reference = task.options(
                name=f"paceline node {rank}",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources=others,
                max_retries=0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank
                ),
            ).remote(host, self._request["port"], self._request["token"], rank)
            ranks[reference] = rank
        homes = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        while ranks:
            self._tell_spare(set(homes.values()))
            for reference in self._ray.wait(list(ranks), timeout=_WAIT_S)[0]:
                self._say({"is": "ended", "rank": ranks.pop(reference), "why": self._why(reference)})
            # Check whether the nodes are alive, too: if a node dies before its task starts, Ray never reports an end of the task.
            alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
            for reference, rank in list(ranks.items()):
                if homes[rank] not in alive:
                    del ranks[reference]
                    self._say({"is": "ended", "rank": rank, "why": f"Ray says: node {homes[rank][:12]} is dead"})

    def _place(self, bundles: list[dict[str, float]], limit_s: float | None = None) -> list[dict[str, float]] | None:
        """Return the placed bundles, or remove the group after `limit_s` and return None."""
        groups = importlib.import_module("ray.util.placement_group")
        self._group = groups.placement_group(bundles, strategy="STRICT_SPREAD", name=self._request["name"])
        begun = told = time.monotonic()
        # Poll, because Ray's `wait` accepts only whole seconds.
        while not self._group.wait(0):
            now = time.monotonic()
            time.sleep(0.005 if now - begun < _WAIT_S else 0.2)
            if limit_s is not None and now - begun > limit_s:
                self._ray.util.remove_placement_group(self._group)
                self._group = None
                return None
            if now - told > _WAIT_S:
                told = now
                self._say({"is": "waiting", "nodes": self._nodes()})
        return bundles

    def _place_some(self) -> list[dict[str, float]]:
        """Place at least `least` bundles, one per free node. Return the placed bundles.

        Each bundle is bound to a chosen node. Otherwise Ray might choose a lost node that it still lists as alive.
        """
        wanted, least = self._request["bundles"], self._request["least"]
        since = told = time.monotonic()
        while True:
            found, now = self._holding(wanted[0]), time.monotonic()
            if len(found) >= len(wanted) or (len(found) >= least and now - since > _SETTLE_S):
                bundles = [{**bundle, f"node:{address}": 0.001} for bundle, address in zip(wanted, found, strict=False)]
                if (placed := self._place(bundles, _PLACE_S)) is not None:
                    return placed
                since = time.monotonic()
            elif now - since > _SETTLE_S and len(found) < least:
                # Request the minimum number of nodes from Ray, because a cluster with autoscaling adds nodes for queued requests.
                if (placed := self._place(wanted[:least], 2 * _PLACE_S)) is not None:
                    return placed
                since = time.monotonic() - _SETTLE_S
            elif now - told > _WAIT_S:
                told = now
                self._say({"is": "waiting", "nodes": self._nodes()})
            time.sleep(0.2)

    def _holding(self, bundle: dict[str, float], but: Any = ()) -> list[str]:
        """Return addresses of nodes that can hold a bundle now, except nodes `but`."""
        # Compare ids and not names, because a lost node that returns has a new id.
        avoid = self._request.get("avoid", []) if time.monotonic() - self._begun < _AVOID_S else []
        return [
            node["address"]
            for node in self._nodes()
            if node["node_id"] not in avoid
            and node["node_id"] not in but
            and all((node["free"] or node["total"]).get(name, 0.0) >= amount - 1e-4 for name, amount in bundle.items())
        ]

    def _tell_spare(self, homes: Any) -> None:
        if "least" in self._request:
            count = len(self._holding(self._request["bundles"][0], homes))
            if count != self._spare:
                self._spare = count
                self._say({"is": "spare", "count": count})

    def close(self) -> None:
        """Remove the placement group from Ray, and disconnect."""
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _why(self, reference: Any) -> str:
        try:
            return str(self._ray.get(reference))
        except Exception as error:
            text = " ".join(str(error).split())
            return f"Ray says: {type(error).__name__}: {text[:400]}"

    def _nodes(self) -> list[dict[str, Any]]:
        try:
            free = importlib.import_module("ray._private.state").available_resources_per_node()
        except (ImportError, AttributeError):
            free = {}  # this version of Ray lacks the module, so the free resources are unknown
        return [
            {
                "node_id": node["NodeID"],
                "name": node.get("NodeName") or node["NodeManagerAddress"],
                "address": node["NodeManagerAddress"],
                "total": node["Resources"],
                "free": free.get(node["NodeID"], {} if free else None),
            }
            for node in self._ray.nodes()
            if node["Alive"]
        ]


def main() -> int:
    # Remove this file's folder, which Python has put first on sys.path: modules in it could shadow Ray's.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    # Ignore the signals that Ray sends to a stopped job: the workers need the nodes in their grace period.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # let Ray's prints go to standard error, because `out` sends messages on standard output

    def say(told: dict[str, object]) -> None:
        out.write(json.dumps(told).encode() + b"\n")

    lines = sys.stdin.buffer
    request: dict[str, object] = {}

    def wait_for_end() -> None:
        lines.readline()
        threading.Thread(target=_leave_at_last, daemon=True).start()
        if "driver" in held:
            held["driver"].close()
        os._exit(0)

    held: dict[str, Driver] = {}
    # Drop the supervisor's environment variables from the job's configuration: with them, tasks can't use Ray's idle processes.
    told = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({**told, "runtime_env": {}})
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    try:
        sys.meta_path.insert(0, _LoadOnUse())
        ray = importlib.import_module("ray")
        request = json.loads(lines.readline() or b"{}")
        if not request:
            return 0
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, configure_logging=False)
        # Ignore SIGTERM a second time, because `ray.init` has installed a handler for it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say({"is": "connected", "python": sys.executable, "version": ray.__version__})
        held["driver"] = Driver(ray, request, say)
        threading.Thread(target=wait_for_end, daemon=True).start()
        held["driver"].run()
        say({"is": "failed", "why": "every node's task has ended"})
    except Exception as error:
        text = " ".join(str(error).split())[:1000]
        say({"is": "failed", "why": f"{type(error).__name__}: {text}"})
        return 1
    threading.Event().wait()  # wait until the thread `wait_for_end` ends this process
    return 0


class _LoadOnUse(importlib.abc.MetaPathFinder):
    """An import finder that defers some modules until use, to start faster."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in _LOADED_ON_USE:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = importlib.util.LazyLoader(spec.loader)
                return spec
        return None


def _leave_at_last() -> None:
    time.sleep(5)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
