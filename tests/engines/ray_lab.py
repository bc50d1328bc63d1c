"""A Ray cluster of a head and two nodes, each on a separate host, with token authentication.

The hosts see this machine's files except /tmp and a test's `tmp_path`, which each host has separately. So a workspace below
`RayLab.folder` is shared with the cluster, and one below a `tmp_path` is not.

A run on Ray on two nodes starts five processes that load Ray, of which four fifths of its time are what it imports. So on each
host a program that has loaded that (`tests.warm`) forks them, once the cluster has had a job: the first run meets Ray's processes
as they are anywhere.

    raylet ── python ~~ asks ~~> program ── ray::JobSupervisor ── sh ── python ~~ asks ~~> program ── driver
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.system import processes
from paceline.targets import configured
from tests.engines.hosts import Hosts
from tests.engines.hosts import missing as hosts_missing
from tests.helpers import wait_until, write_program

TOKEN = "paceline-test-" + "7" * 40
#: Name of the variable that contains the token in a test's environment.
TOKEN_VARIABLE = "RAY_LAB_TOKEN"
_CPUS = 2
#: Ray gives up a node after three failed health checks, at these times in milliseconds. The default is half a minute.
_HEALTH = {"initial_delay": "1000", "period": "500", "timeout": "5000"}
#: Switch off Ray's metrics, timeline and reports, which no test reads. Also start no workers ahead of their tasks, because a
#: worker costs as much CPU time as everything that Paceline starts for a run.
_FRUGAL = {
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_num_workers_soft_limit": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
#: Program that runs `ray start` with the tests' Python.
_START = Path(__file__).with_name("ray_start.py")
_WARM = Path(__file__).parents[1] / "warm"
_CLONE = Path(__file__).parents[2]
#: The socket of a process on each host that has loaded modules and forks Python processes. The folder is empty when a
#: host starts.
_SOCKET = "/dev/shm/for-ray"
#: The modules that this process has loaded, because Ray's workers, Ray's job supervisors and Paceline's drivers need
#: them. Ray itself is missing, because while it loads it reads to which worker it belongs.
_LOADED = (
    *(
        "asyncio",
        "concurrent.futures.thread",
        "logging.handlers",
        "multiprocessing.connection",
        "pdb",
        "tarfile",
        "sysconfig",
    ),
    *("google.protobuf.internal.builder", "google.protobuf.json_format", "google.protobuf.timestamp_pb2"),
    *(
        "aiohttp",
        "click",
        "colorful",
        "filelock",
        "jsonschema",
        "msgpack",
        "packaging.version",
        "psutil",
        "pydantic",
        "requests",
    ),
    *("tqdm", "uvloop", "wcwidth", "yaml"),
)
#: This shell script is the Python of Ray. For some Python scripts, it asks the process with loaded modules for a fork.
#: For all others, it runs the interpreter of the tests.
_PYTHON = """\
#!/bin/bash
case $1 in
*/ray/_private/workers/setup_worker.py | */ray/_private/workers/default_worker.py | */paceline/targets/ray/driver.py)
    [ ! -S {socket} ] || exec {real} -IS -c {asks} "$0" "$@" ;;
esac
exec -a "$0" {real} "$@"
"""
_ASKS = """\
import sys
sys.path.insert(0, {here!r})
from hand_over import hand_over
hand_over({socket!r}, sys.argv[2:], python=sys.argv[1], frees=False)
"""


def missing() -> str | None:
    """Return what this machine lacks for a Ray cluster, in words; None if nothing is missing."""
    if importlib.util.find_spec("ray") is None:
        return "Ray (ray[default])"
    return hosts_missing()


@contextlib.contextmanager
def cluster(private: Sequence[str] = ("/tmp",)) -> Iterator[RayLab]:
    """A cluster that is up, and gone afterwards. private: folders of which each node has its own."""
    lab = RayLab(private).up()
    try:
        yield lab
    finally:
        lab.down()


class RayLab:
    """The cluster. head: the name of its head's host; nodes: those of the others."""

    def __init__(self, private: Sequence[str] = ("/tmp",)) -> None:
        self.hosts = Hosts("pc", private=private)
        self.head = ""
        self.nodes: tuple[str, ...] = ()
        self._lost: list[str] = []
        #: Host -> its process that has loaded the modules and forks Python processes.
        self._programs: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> RayLab:
        self.hosts.up(3)
        self.head, *nodes = self.hosts.names
        self.nodes = tuple(nodes)
        try:
            self._make_python()
            self._start_head()
            # Start all nodes at the same time, because most of a start is waiting.
            starting = [self._start_node(name) for name in self.nodes]
            for name, started in zip(self.nodes, starting, strict=True):
                self._finish_node(name, started)
            self.wait_for_nodes(3)
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End the hosts, and with them all that runs on them."""
        self.hosts.down()
        for program in self._programs.values():
            program.communicate()
        self._programs.clear()

    @property
    def address(self) -> str:
        return f"http://{self.hosts.addresses[self.head]}:8265"

    @property
    def folder(self) -> Path:
        """Seen by all nodes and by this machine under the same path."""
        return self.hosts.folder

    def add_target(self, workspace_dir: Path, name: str = "cluster", **settings: Any) -> str:
        """Let the workspace have this cluster as a compute target."""
        settings = {"address": self.address, "token_env": TOKEN_VARIABLE, **settings}
        configured.add(workspace_dir, configured.Configured(name=name, kind="ray", settings=settings), replace=True)
        return name

    def ask(self, path: str, method: str = "GET") -> Any:
        """What the cluster's dashboard answers."""
        request = urllib.request.Request(
            self.address + path, method=method, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:  # close the socket now, not when a later test collects garbage
                raise

    def wait_for_nodes(self, count: int) -> None:
        """Return once Ray counts this many living nodes."""

        def are_there() -> bool:
            with contextlib.suppress(OSError, KeyError, TypeError):
                found = self.ask("/api/v0/nodes")["data"]["result"]["result"]
                return sum(node["state"] == "ALIVE" for node in found) == count
            return False

        wait_until(are_there, f"{count} nodes are alive", 60)

    def lose(self, name: str) -> None:
        """Let a node crash; it stays away until somebody wants all nodes, for the start of one takes ten seconds."""
        self.hosts.kill(name)
        self._lost.append(name)

    def lose_ray(self, name: str) -> None:
        """Let a node end without its host: what Ray itself has there dies. `lose` takes the rest, for the node to come back."""
        os.kill(self._raylet(name), signal.SIGKILL)

    def _raylet(self, name: str) -> int:
        found = [pid for pid, line in self.hosts.processes(name).items() if "/raylet/raylet " in line]
        # Ignore forked children. Until a child calls exec, it has the command line of its parent.
        return next(pid for pid in found if int((processes.stat_of(pid) or ["", "0"])[1]) not in found)

    def whole(self) -> RayLab:
        """The cluster, once those that were lost are back."""
        lost, self._lost = self._lost, []
        self.revive(*lost)
        if self._programs or self.ask("/api/jobs/"):
            for name in self.hosts.names:
                self._start_program(name)
        return self

    def revive(self, *names: str) -> None:
        """Start killed nodes again."""
        for name in names:
            self.hosts.boot(name)
            self._finish_node(name, self._start_node(name))
        if names:
            self.wait_for_nodes(3)

    def left(self) -> dict[str, list[str]]:
        """Return host -> command lines of processes that are not Ray's own; `{}` if the runs have left none."""
        found = {}
        # Remove these paths from the command lines: Ray's own processes also have them, and a path may contain
        # "paceline".
        folders = [str(folder) for folder in (self._python.parents[1], sys.prefix, _CLONE)]
        for name in self.hosts.up_now:
            lines = list(self.hosts.processes(name).values())
            for folder in folders:
                lines = [line.replace(folder, "") for line in lines]
            lines = [line for line in lines if "paceline" in line]
            if lines:
                found[name] = lines
        return found

    def _start_head(self) -> None:
        address = self.hosts.addresses[self.head]
        words = ["--head", "--port", "6379", "--dashboard-host", "0.0.0.0", "--include-dashboard", "true"]
        _finish(self.head, self._ray(self.head, [*words, "--node-ip-address", address]))

    def _start_node(self, name: str) -> subprocess.Popen[str]:
        words = ["--address", f"{self.hosts.addresses[self.head]}:6379"]
        return self._ray(name, [*words, "--node-ip-address", self.hosts.addresses[name]])

    def _finish_node(self, name: str, started: subprocess.Popen[str]) -> None:
        """Once more where it has not started: Ray itself waits for 30 s, which a busy machine may need."""
        try:
            _finish(name, started)
        except AssertionError:
            self.hosts.run(name, [str(self._python), str(_START), "stop", "--force"])
            _finish(name, self._start_node(name))

    @property
    def _python(self) -> Path:
        return self.folder / "environment" / "bin" / Path(sys.executable).name

    def _make_python(self) -> None:
        """An environment of the same packages as the tests' own, with the Python that asks a program."""
        self._python.parent.mkdir(parents=True)
        for name in ("pyvenv.cfg", "lib"):
            (self._python.parents[1] / name).symlink_to(Path(sys.prefix) / name)
        asks = shlex.quote(_ASKS.format(here=str(_WARM), socket=_SOCKET))
        write_program(self._python, _PYTHON.format(real=shlex.quote(sys.executable), asks=asks, socket=_SOCKET))

    def _start_program(self, name: str) -> None:
        """Start a host's program if it has none, and wait until it accepts scripts."""
        if ended := self._programs.get(name):
            if ended.poll() is None:
                return
            ended.communicate()
        # The raylet is the parent of Ray's job supervisors. Paceline finds Ray's Python and the host's address in the
        # raylet's command line.
        words = Path(f"/proc/{self._raylet(name)}/cmdline").read_text().split("\0")
        told = [
            word.split()[0] for word in words if word.startswith(("--python_worker_command=", "--node_ip_address="))
        ]
        self._programs[name] = self.hosts.popen(
            name,
            [sys.executable, str(_WARM / "program.py"), _SOCKET, *_LOADED, *told],
            stdin=subprocess.PIPE,
            env=self._environment(name),
        )
        self.hosts.run(name, ["bash", "-c", f"until [ -S {_SOCKET} ]; do sleep 0.05; done"], timeout=240)

    def _ray(self, name: str, words: list[str]) -> subprocess.Popen[str]:
        common = ["--num-cpus", str(_CPUS), "--object-store-memory", "80000000", "--disable-usage-stats"]
        common += ["--include-log-monitor", "false"]
        return self.hosts.popen(
            name,
            [str(self._python), str(_START), "start", *words, *common],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(name),
        )

    def _environment(self, name: str) -> dict[str, str]:
        """That of Ray on this host."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PACELINE_", "PYTEST"))}
        environment = {**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_LAB_HOST": name}
        # Each host has a /tmp of its own, but all hosts may share the folder in TMPDIR.
        environment["TMPDIR"] = "/tmp"
        environment |= {f"RAY_health_check_{key}_ms": value for key, value in _HEALTH.items()}
        return environment | {"RAY_health_check_failure_threshold": "3", **_FRUGAL}


def _finish(name: str, started: subprocess.Popen[str]) -> None:
    try:
        output, _ = started.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        started.kill()
        started.communicate()
        raise AssertionError(f"Ray did not start on {name} within 180 s") from None
    assert started.returncode == 0, f"Ray did not start on {name}: {output}"
