"""Simulated nodes: the real agent and its guardian, and workers that do what the world's plan says."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, port_count
from paceline.remote.agent import commands as agent_commands
from paceline.remote.agent import guardian, machine
from paceline.remote.agent.agent import Agent
from paceline.remote.agent.send_queue import SendQueue
from paceline.remote.link.bootstrap import Ends
from paceline.remote.link.link import Link
from paceline.remote.link.nodes import AgentNodes
from paceline.remote.wire import Header, ping_s
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.record import RunRecord
from paceline.runs.remote_status import JobStatus
from paceline.system import processes, spare_client
from paceline.system.run_variables import GENERATION_VARIABLE
from paceline.targets import local_nodes
from paceline.targets.base import Nodes, Waiting
from paceline.testing.sim.node import DISK, SimAgent, _about, _library, _replaced
from paceline.testing.sim.worker import _prepare
from tests.worlds import disks, patches
from tests.worlds.descriptors import Socket, Wire, socket_ends
from tests.worlds.engine import Engine
from tests.worlds.kernel import Host, Kernel, Process


class Machine(Host):
    """A node of the cluster. `wires` lead from the supervisor to the node and back."""

    def __init__(self, name: str, folder: str) -> None:
        super().__init__(name)
        self.folder, self.cores = folder, 8
        self.wires: list[tuple[Wire, Wire]] = []
        self.agents: list[Process] = []


class NodeAgent(Agent):
    """The real agent, on a simulated machine: paths on its disk lead into the world's folder."""

    # Replace these operations: no simulated process uses the remote shell or the scratch folder, and the machine's load
    # is invented.
    _op_scratch = SimAgent._op_scratch
    _op_oom_kills = SimAgent._op_oom_kills

    def __init__(self, out: SendQueue, sock: Any, settings: dict[str, Any], host: Machine) -> None:
        super().__init__(out, sock, settings)
        self._host = host

    def _hear(self, header: Header, data: bytes) -> None:
        super()._hear(_replaced(header, DISK, self._host.folder), data)

    def _fail(self, request: int, error: Exception) -> None:
        path = getattr(error, "filename", None)
        if isinstance(error, OSError) and isinstance(path, str):
            error = OSError(error.errno, error.strerror, path.replace(self._host.folder, DISK))
        super()._fail(request, error)

    def _op_load(self, header: Header, data: bytes) -> Header:
        return {"found": {"cpu_percent": 50.0, "memory_gib": 2.0, "memory_total_gib": 64.0, "ranks": {}}}

    def _op_file(self, header: Header, data: bytes) -> Header:
        return {} if os.path.dirname(header["path"]) in self._scratch else self._files.op_file(header, data)


class Plan:
    """The steps, failures and signals of a run's workers.

    steps: How many steps each worker does, and `step_s` the time of each.
    fails: (attempt, rank) -> step at which the worker raises an exception.
    exits: (attempt, rank) -> (step, exit code) of a worker that ends early.
    ignores_sigterm: Whether workers ignore SIGTERM.
    """

    def __init__(self, chance: Any) -> None:
        self.steps, self.step_s = chance.randint(1, 12), chance.choice((0.02, 0.1, 0.3, 0.7, 2.0))
        self.start_s = chance.choice((0.01, 0.3, 1.5))
        self.fails: dict[tuple[int, int], int] = {}
        self.exits: dict[tuple[int, int], tuple[int, int]] = {}
        #: (attempt, step) at which all workers hang.
        self.hangs: tuple[int, int] | None = None
        self.ignores_sigterm = chance.random() < 0.1
        self.has_tags = chance.random() < 0.3
        self.has_outputs, self.has_checkpoints = chance.random() < 0.5, chance.random() < 0.4


class Written:
    """The lines, metrics and files that a worker has written by calls that have returned."""

    def __init__(self, host: Host, process: Process) -> None:
        self.host, self.process = host, process
        self.lines: list[str] = []
        self.metrics: list[tuple[str, float]] = []
        self.files: dict[str, bytes] = {}
        self.tags: list[str] = []
        self.code: int | None = None


class Cluster:
    """The machines of a world, and the target that gives them to runs."""

    def __init__(
        self, kernel: Kernel, home: Host, machines: Sequence[Machine], plan: Plan, chance: Any, **values: Any
    ) -> None:
        self.kernel, self.home, self.machines, self.plan, self.chance = kernel, home, machines, plan, chance
        self.is_shared: bool = values["is_shared"]
        self.silence_s: float = values["silence_s"]
        self.latency_s: float = values["latency_s"]
        self.waits_s: float = values["waits_s"]
        self.leaves_at: float | None = values["leaves_at"]
        #: (attempt, rank, generation) -> what this worker has written. The generation grows each time a lost worker is
        #: replaced.
        self.written: dict[tuple[int, int, int], Written] = {}
        self.links: list[Link] = []
        #: The engine in whose job the supervisor runs, if any.
        self.engine: Engine | None = None
        #: (machine of a process that has released the run's nodes, claim to the run at that time).
        self.releases: list[tuple[str, str]] = []
        #: Attempt -> the newest generation of its workers. A generation begins when a lost worker is replaced.
        self.generations: dict[int, int] = {}

    # --- the target, in the supervisor

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        until = self.kernel.now + self.waits_s
        while self.kernel.now < until:
            if waiting("2 runs ahead"):
                return None
            self.kernel.sleep(0.2)
        able = [one for one in self.machines if not one.is_off]
        if len(able) < job.least_nodes:
            raise TargetError(f"{len(able)} nodes are left, and the run needs {job.least_nodes}.")
        chosen = able[: job.node_count]
        links: list[Link] = []
        try:
            for one in chosen:
                links.append(self._link(one))
        except BaseException:
            for link in links:
                link.close(0.1)
            raise
        nodes = tuple(
            Node(node_rank=rank, name=one.name, address=f"10.0.0.{rank + 1}", cores=one.cores)
            for rank, one in enumerate(chosen)
        )
        found = AgentNodes(links, nodes, range(20000, 20000 + port_count(job)), folder=DISK, is_shared=self.is_shared)
        found.leave_reason = self._leave_reason
        self.links += links
        return found

    def nodes_to_be_had(self, job: Job, run_dir: Path, nodes: Nodes) -> int:
        return min(sum(not one.is_off for one in self.machines), (job.node_range or (1, 1))[1])

    def release(self, run_dir: Path) -> None:
        self.kernel.note("released")
        self.releases.append((self.kernel.process.host.name, RunFolder(run_dir).lock.read_text()))

    def look(self, folder: RunFolder, record: RunRecord) -> JobStatus:
        assert self.engine is not None
        return self.engine.look()

    def cancel(self, folder: RunFolder, record: RunRecord) -> None:
        assert self.engine is not None
        self.engine.cancel("ann")

    def channel(self, folder: RunFolder) -> None:
        return None

    def _leave_reason(self) -> str:
        if self.leaves_at is not None and self.kernel.now > self.leaves_at:
            self.leaves_at = None
            return "another run needs the nodes"
        return ""

    def _link(self, host: Machine) -> Link:
        there, back = (Wire(self.latency_s, self.latency_s * 2) for _ in range(2))
        host.wires.append((there, back))
        ours, theirs = socket_ends(self.kernel, (there, back))
        fd = ours.open()
        self._start_agent(host, theirs)
        link = Link(Ends(fd, fd), host.name, self.silence_s)
        link.begin()
        link.wait_for_hello(Ends(fd, fd), 10.0)
        return link

    def _start_agent(self, host: Machine, end: Any) -> None:
        kernel = self.kernel
        keeper = Process(kernel, f"{host.name}-guardian", host, None)
        agent = Process(kernel, f"{host.name}-agent", host, keeper)
        keepers, agents = socket_ends(kernel)
        host.agents.append(agent)
        settings = {"silence_s": self.silence_s, "library": _library(), "folder": DISK}

        def keep() -> None:
            sock: Any = Socket(fileno=keepers.open())
            keeper.end(guardian._guard(agent.pid, sock) << 8)

        def serve() -> None:
            fd, sock = end.open(), Socket(fileno=agents.open())
            out = SendQueue(fd, ping_s(self.silence_s))
            code = 1
            try:
                code = NodeAgent(out, sock, settings, host).run(fd)
            finally:
                agent.end(code << 8)

        # A process that is killed before its first instruction still closes its ends of the connections.
        for process, one in ((keeper, keepers), (agent, agents), (agent, end)):
            process.on_end = _then(process.on_end, functools.partial(_close_unopened, one))
        kernel.spawn(keeper, keep)
        kernel.spawn(agent, serve)

    # --- programs on the nodes

    def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None, stdin: int, stdout: int, stderr: int
    ) -> int:
        """Start a simulated program, in the place of `commands._spawn`. Return its pid."""
        kernel, parent = self.kernel, self.kernel.process
        names = [word.rpartition("/paceline/")[2] for word in argv]
        if "worker/__main__.py" in names and "PACELINE_RANK" in env:
            name, work = f"rank{env['PACELINE_RANK']}.{env['PACELINE_ATTEMPT']}", self._work
        elif "paceline.node" in argv:
            name, work = argv[argv.index("paceline.node") + 1], _prepare_node
        elif names[-4:-3] and names[-4] in ("observe/node/look.py", "observe/node/sampler.py"):
            name, work = "look", _look
        else:
            name, work = "spare", _idle
        process = Process(kernel, name, parent.host, parent)
        process.env = dict(env)
        # The parent has opened this file for the child, which closes it at its end.
        process.stdout = disks._os["dup"](stdout)
        kernel_disks = self.disks
        kernel_disks.paths[process.stdout] = kernel_disks.paths.get(stdout, "")
        process.on_end = functools.partial(os.close, process.stdout)

        def run() -> None:
            process.end(work(process, list(argv)) << 8)

        kernel.spawn(process, run)
        return process.pid

    disks: disks.Disks

    def _work(self, process: Process, argv: list[str]) -> int:
        kernel, plan, env = self.kernel, self.plan, process.env
        attempt, rank = int(env["PACELINE_ATTEMPT"]), int(env["PACELINE_RANK"])
        folder = RunFolder(Path(env["PACELINE_RUN_DIR"]))
        written = Written(process.host, process)
        generation = sum(key[:2] == (attempt, rank) for key in self.written)
        self.written[attempt, rank, generation] = written
        if plan.ignores_sigterm:
            process.handlers[signal.SIGTERM] = lambda *_: None
        else:
            process.handlers[signal.SIGTERM] = lambda *_: process.end(signal.SIGTERM)
        kernel.sleep(plan.start_s * (0.5 + kernel.random()))
        try:
            group = int(env.get(GENERATION_VARIABLE, "0"))
            self.generations[attempt] = max(group, self.generations.get(attempt, 0))
            report = {"pid": process.pid, "host": process.host.name, "time": kernel.time()}
            _put(folder.worker_start(attempt, rank), report, process.pid)
            self._meet(folder, attempt, rank, process.pid)
            log = MetricLog(folder.metric_log(rank, attempt), attempt=attempt)
            for step in range(plan.steps):
                kernel.sleep(plan.step_s)
                if group < self.generations[attempt]:
                    group = self.generations[attempt]
                    self._meet(folder, attempt, rank, process.pid)
                if plan.hangs == (attempt, step):
                    kernel.sleep(1e9)
                if plan.fails.get((attempt, rank)) == step:
                    raise ValueError("bad batch")
                if plan.exits.get((attempt, rank), (None, 0))[0] == step:
                    written.code = plan.exits[attempt, rank][1]
                    return written.code
                self._line(process, written, f"attempt {attempt} rank {rank}.{generation} step {step}\n")
                log.scalar("loss", float(step), step)
                written.metrics.append(("loss", float(step)))
                if plan.has_tags:
                    tag = f"r{rank}_{attempt}_{generation}_{step}"
                    tags_and_properties.set_tags(folder.notes, {tag: "worker"})
                    written.tags.append(tag)
                if plan.has_outputs:
                    self._file(written, folder, f"outputs/r{rank}_{attempt}_{generation}_{step}.bin", 1 << 10)
                if plan.has_checkpoints and rank == 0:
                    self._file(written, folder, f"checkpoints/step_{attempt}_{generation}_{step}/state", 1 << 12)
        except (OSError, ValueError) as error:
            written.code = 1
            text = f"{type(error).__name__}: {error}"
            told = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(kernel.time()))}}
            end = {"message": told, "exception": text, "type": type(error).__name__, "exit_code": 1, "is_memory": False}
            try:
                self._line(process, written, f"{text}\n")
                _put(folder.worker_error(attempt, rank), {**end, "time": kernel.time()}, process.pid)
            except OSError:
                pass
            return 1
        written.code = 0
        return 0

    def _meet(self, folder: RunFolder, attempt: int, rank: int, pid: int) -> None:
        """Report that a rank is in the newest group, as a script in `hvd.elastic.run` does."""
        group = {"generation": self.generations[attempt], "why_not": "", "hands_over": True}
        _put(folder.worker_group(attempt, rank), group, pid)

    def _line(self, process: Process, written: Written, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(process.stdout, data) :]
        written.lines.append(text)

    def _file(self, written: Written, folder: RunFolder, name: str, size: int) -> None:
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self.chance.randbytes(size)
        beside = path.with_name(f".{path.name}.new")
        with open(beside, "wb") as file:
            file.write(data)
        os.replace(beside, path)
        written.files[name] = data


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _close_unopened(end: Any) -> None:
    if end.references == 0 and not end.outbound.is_refused:
        end.shut(2)


def _put(path: Path, value: Mapping[str, object], pid: int) -> None:
    beside = f"{path}.{pid}"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(json.dumps(value))
    os.replace(beside, path)


def _prepare_node(process: Process, argv: list[str]) -> int:
    process.kernel.sleep(0.05)
    verb, run_dir, rank = argv[argv.index("paceline.node") + 1 :][:3]
    folder = RunFolder(Path(run_dir))
    try:
        _prepare(verb, folder, int(rank))
        if verb == "prepare":
            folder.work.mkdir(exist_ok=True)
    except OSError:
        return 1
    return 0


def _look(process: Process, argv: list[str]) -> int:
    asked = json.loads(argv[-1])
    frame = {"file": "train.py", "line": 41, "function": "all_reduce"}
    thread = {"name": "main", "current": True, "frames": [frame]}
    facts = {
        **{"pid": 1, "parent": 1, "state": "S", "wchan": "", "cpu_s": 0.0, "io_bytes": 0, "tracer": 0},
        **{"command": "python train.py", "threads": [thread], "by": "faulthandler", "board": [], "children": []},
    }
    here = {
        one.env.get("PACELINE_RANK")
        for one in process.kernel.processes.values()
        if one.is_alive and one.host is process.host
    }
    ranks = {str(rank): facts if str(rank) in here else {"silent": "its process has ended"} for rank in asked["ranks"]}
    try:
        with open(argv[-3], "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": process.kernel.time(), "ranks": ranks, "notes": []}) + "\n")
    except OSError:
        return 1
    return 0


def _idle(process: Process, argv: list[str]) -> int:
    process.kernel.sleep(1e9)
    return 0


def install(kernel: Kernel) -> None:
    """Replace the functions of Paceline that ask the real machine."""

    def environment(pid: int) -> bytes:
        found = kernel.processes.get(pid)
        env = found.env if found is not None else {}
        return b"".join(f"{name}={value}".encode() + b"\0" for name, value in env.items())

    def state(pid: int) -> str:
        return next((state for child, _, state in patches.table(kernel) if child == pid), "Z")

    def about(settings: dict[str, Any]) -> Header:
        host: Any = kernel.process.host
        return {**_about(host), "pid": os.getpid(), "interfaces": {}, "python": [sys.executable, [3, 11, 0]]}

    def spawn(*args: Any) -> int:
        return int(kernel.cluster.spawn(*args))

    real_access = os.access

    def access(path: Any, mode: int, **values: Any) -> bool:
        # The scratch folders of runs lie in the world's folder.
        return path != "/dev/shm" and real_access(path, mode, **values)

    def refuse(*_: Any) -> Any:
        raise FileNotFoundError(2, "simulated machines have no warm processes")

    changes: list[tuple[Any, str, Any]] = [
        (processes, "_table", lambda: patches.table(kernel)),
        (processes, "_environment", environment),
        (processes, "_state", state),
        (processes, "stat_of", lambda pid: None),
        (processes, "is_ending", lambda pid: state(pid) == "Z"),
        (processes, "boot_id", lambda: kernel.process.host.boot_id),
        (processes, "become_subreaper", lambda: None),
        (processes, "leave", lambda code: kernel.process.end(code << 8)),
        (processes, "_session_of", lambda pid: pid),
        (machine, "about", about),
        (machine, "_is_free", lambda port: True),
        (spare_client, "ask", refuse),
        (processes, "cores", lambda: set(range(8))),
        (local_nodes, "oom_kills", lambda: 0),
        (local_nodes.LocalNodes, "loads", lambda self, workers: {}),
        (os, "access", access),
        (agent_commands, "_spawn", spawn),
    ]
    for owner, name, new in changes:
        assert hasattr(owner, name), name
        setattr(owner, name, new)
