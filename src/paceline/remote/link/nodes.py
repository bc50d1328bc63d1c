"""Nodes of a run on which an agent runs commands, as a `paceline.targets.base.Nodes`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EngineError, TargetError
from paceline.job.plan import Command, Node, ProcessExit, RemotePaths, StartedCommand, Starter
from paceline.remote.agent.machine import REPORT_BYTES, disk_of, disks_here
from paceline.remote.link.copies import Copies
from paceline.remote.link.link import Link
from paceline.remote.link.messages import LinkError
from paceline.remote.link.rsh_calls import RshCalls, make_remote_shell
from paceline.remote.link.sending import all_or_error, ask_each, on_each, see_same
from paceline.runs.folder import RunFolder
from paceline.runs.work_dir import place
from paceline.system.files import read_json

if TYPE_CHECKING:
    from paceline.remote.link.link import Link


#: Seconds within which all nodes must start their commands.
_START_S = 20.0
#: For this many seconds, a cached answer to "is this process alive?" is used instead of a new query.
_FRESH_S = 0.3


class AgentNodes:
    """The nodes of a run by rank, with a link to each node's agent.

    ports: Free ports of the first node, or the number of ports to find there.
    folder: Absolute path of Paceline's folder on each node, used if the nodes do not see the supervisor's folders.
    python: The interpreter for jobs that name no interpreter; None for the interpreter of the first node's agent.
    is_shared: Whether the nodes see the supervisor's folders; None to find out.
    on_close: A callback that gives the nodes back to their engine; `close` calls it.
    on_hang: A callback that gets the start time of this run's hang, or None once the run continues. Other runs that wait
        for these nodes read the time.
    starter: The program that starts MPI workers instead of mpirun. The agents still signal and watch the workers.
    """

    def __init__(
        self,
        links: Sequence[Link],
        nodes: tuple[Node, ...],
        ports: Sequence[int] | int,
        *,
        folder: str,
        python: str | None = None,
        on_close: Callable[[], None] | None = None,
        on_hang: Callable[[str | None], None] = lambda since: None,
        is_shared: bool | None = None,
        starter: Starter | None = None,
    ) -> None:
        assert len(links) == len(nodes), "one agent a node"
        self.nodes = tuple(_with_network(node, link) for node, link in zip(nodes, links, strict=True))
        #: Seconds without a message after which a node counts as lost. The supervisor reads this attribute.
        self.silence_s = max(link.silence_s for link in links)
        self.ports = tuple(links[0].free_ports(ports) if isinstance(ports, int) else ports)
        self._links, self._python, self._on_close = tuple(links), python, on_close
        self._starter, self.note_hang = starter, on_hang
        #: A callback that returns the reason why the run has to leave its nodes, or "". The callback must not block.
        self.leave_reason: Callable[[], str] = lambda: ""
        self._top, self._is_shared = folder.rstrip("/") or "/", is_shared
        self._folder: RunFolder | None = None
        self._run_dir = ""
        #: The nodes' copies of the run's folder. None if all nodes see the supervisor's folder itself.
        self._copies: Copies | None = None
        self._calls: RshCalls | None = None
        self._attempt = 0
        self._started: set[tuple[int, int]] = set()
        self._over: set[tuple[int, int]] = set()
        #: (node rank, pid) -> time of the last query, and whether the process was alive then.
        self._looked: dict[tuple[int, int], tuple[float, bool]] = {}
        self._closed = False
        #: A callback that links call in their threads when a command has ended.
        self.on_news: Callable[[], None] = lambda: None
        #: A callback that ends this process if another one has taken over the run. The supervisor sets it before `send`.
        self.check: Callable[[], object] = lambda: None
        # Let links call `_tell`, which looks up `on_news` each time, because the supervisor sets `on_news` only later.
        for link in self._links:
            link.on_end = self._tell

    def renew_ports(self) -> None:
        """Choose other free ports on the first node, because one is in use."""
        self.ports = tuple(self._links[0].free_ports(len(self.ports)))

    def send(self, folder: RunFolder, library_dir: Path) -> RemotePaths:
        links, self._folder = self._links, folder
        if self._is_shared is None:
            self._is_shared = see_same(links, folder.path)
        if self._is_shared:
            self._run_dir = str(folder.path)
        else:
            self._copies = Copies(links, folder, self._top, self.check)
            self._run_dir = self._copies.path
            self._copies.send()
            self._copies.follow(self._attempt)
        if self._starter is not None:
            all_or_error(links, on_each(links, lambda link: link.adopt(folder.run_id)), "the run's processes")
        scratch, socket = self._make_scratch()
        environment = {"PACELINE_RUN_ID": folder.run_id, "PACELINE_RUN_DIR": self._run_dir}
        self._calls = RshCalls(links, self.nodes, environment, f"{self._run_dir}/logs/driver.log")
        library = links[0].hello.library
        if any(link.hello.library != library for link in links):
            places = ", ".join(f"{link.name}: {link.hello.library}" for link in links)
            raise TargetError(f"the nodes have the library in different places ({places}). Name one folder for all.")
        python = self._python or links[0].hello.python[0]
        return RemotePaths(
            run_dir=Path(self._run_dir),
            work_dir=Path(self._run_dir) / "work",
            scratch_dir=Path(scratch),
            library_dir=Path(library),
            python=python,
            is_shared=self._is_shared,
            sees_source=self._sees_source(folder),
            remote_shell=make_remote_shell(links[0], scratch, socket, python),
            starter=self._starter,
        )

    def _sees_source(self, folder: RunFolder) -> bool:
        source = place(read_json(folder.job)).source
        if not self._is_shared or not os.path.isdir(source):
            return bool(self._is_shared)
        found = on_each(self._links, lambda link: link.inode(source))
        return all(number == os.stat(source).st_ino for number in all_or_error(self._links, found, "the source"))

    def shell(self, node_rank: int) -> Mapping[str, str] | None:
        return self._links[node_rank].hello.env

    def begin(self, attempt: int) -> None:
        self._attempt = attempt
        assert self._folder is not None, "send comes first"
        self._folder.attempt(attempt).mkdir(parents=True, exist_ok=True)
        if self._copies is not None:
            self._copies.follow(attempt)

    def start(self, command: Command, work_dir: Path, shell: Mapping[str, str]) -> StartedCommand:
        environment = self._environment(command, shell)
        try:
            pid, cold = self._links[command.node_rank].start_worker(command, environment, str(work_dir))
        except LinkError as error:
            raise OSError(errno.EHOSTUNREACH, str(error)) from error
        return self._noted(command, pid, cold)

    def start_all(
        self, commands: Sequence[Command], work_dir: Path, shells: Mapping[int, Mapping[str, str]]
    ) -> list[StartedCommand | OSError]:
        """Start commands, by one request to each node. Return each command's StartedCommand or error.

        shells: Node rank -> environment variables of the node's shell. The commands' own variables override them.
        """
        of_node: dict[int, list[Command]] = {}
        for command in commands:
            of_node.setdefault(command.node_rank, []).append(command)
        asked = {
            self._links[rank]: _to_start(mine, [self._environment(one, shells[rank]) for one in mine], str(work_dir))
            for rank, mine in of_node.items()
        }
        found: dict[int, StartedCommand | OSError] = {}
        timeout_s = _START_S * max(map(len, of_node.values()))
        answers = ask_each(list(asked), "start_all", timeout_s, asked.__getitem__)
        for mine, answer in zip(of_node.values(), answers, strict=True):
            if isinstance(answer, Exception):
                found |= {id(command): OSError(errno.EHOSTUNREACH, str(answer)) for command in mine}
                continue
            for command, told in zip(mine, answer["started"], strict=True):
                error = OSError(*told["error"]) if "error" in told else None
                found[id(command)] = error or self._noted(command, int(told["pid"]), str(told["cold"]))
        return [found[id(command)] for command in commands]

    def _environment(self, command: Command, shell: Mapping[str, str]) -> dict[str, str]:
        if command.shells:
            assert self._calls is not None, "send comes first"
            self._calls.shells = {one.node_rank: one for one in command.shells}
        return {**command.defaults, **shell, **command.environment}

    def _noted(self, command: Command, pid: int, cold: str) -> StartedCommand:
        self._started.add((command.node_rank, pid))
        # Forget an earlier exit under this pid: pids are reused, so another process has exited.
        self._over.discard((command.node_rank, pid))
        if self._copies is not None:
            self._copies.note_start(command.node_rank)
        return StartedCommand(command=command, pid=pid, cold=cold)

    def grown(self) -> set[str] | None:
        """Return the names of logs with new lines since the last call; None if unknown."""
        return None if self._copies is None else self._copies.grown()

    def signal(self, pid: int, node_rank: int, number: int) -> bool:
        link = self._links[node_rank]
        if (node_rank, pid) in self._over or link.lost:
            return False
        try:
            # If the agent has started the process, don't wait for the answer, because the agent reports the exit anyway.
            wait = (node_rank, pid) not in self._started and not link.is_stuck
            return link.signal(pid, number, run_id=self._folder.run_id if self._folder else "", wait=wait)
        except (LinkError, OSError):
            return link.lost is None  # the node is slow, but the signal may still arrive

    def signal_all(self, pids: Mapping[int, Sequence[int]], numbers: Sequence[int]) -> None:
        """Send signals to processes, given as {node rank: pids}."""
        run_id = self._folder.run_id if self._folder else ""
        for rank, mine in pids.items():
            left = [pid for pid in mine if (rank, pid) not in self._over]
            self._links[rank].signal_all(left, numbers, run_id=run_id)

    def is_alive(self, pid: int, node_rank: int) -> bool:
        if (node_rank, pid) in self._over or self._links[node_rank].lost:
            return False
        link = self._links[node_rank]
        if (node_rank, pid) in self._started or link.is_stuck:
            return True
        asked, alive = self._looked.get((node_rank, pid), (0.0, True))
        if alive and time.monotonic() - asked > _FRESH_S:
            try:
                alive = link.is_alive(pid)
            except (LinkError, OSError):
                alive = link.lost is None
            self._looked[node_rank, pid] = (time.monotonic(), alive)
        return alive

    def ended(self) -> list[ProcessExit]:
        found = []
        for rank, link in enumerate(self._links):
            for pid, code, when, peak in link.ends():
                self._over.add((rank, pid))
                self._started.discard((rank, pid))
                found.append(ProcessExit(pid=pid, node_rank=rank, exit_code=code, time=when, peak_bytes=peak))
        return found

    def lost(self) -> dict[int, str]:
        return {rank: link.lost for rank, link in enumerate(self._links) if link.lost is not None}

    def fetch(self) -> None:
        if self._copies is not None:
            self._copies.fetch(self._attempt)

    def share_checkpoints(self) -> None:
        """Copy the run's checkpoints to nodes that lack them.

        Raises:
            TargetError: A disk is full, or a node is lost.
        """
        if self._copies is not None:
            self._copies.share_checkpoints()

    def kill_all(self) -> None:
        ask_each(self._living(), "kill_all", 5.0)

    def kill_session(self, pid: int, node_rank: int) -> None:
        with contextlib.suppress(LinkError, OSError):  # if the node is lost, the method `lost` reports it
            self._links[node_rank].kill_session(pid)

    def are_ending(self, pids: Mapping[int, Sequence[int]]) -> bool:
        asked = {self._links[rank]: {"pids": list(mine)} for rank, mine in pids.items()}
        told = ask_each(list(asked), "ending", 3.0, asked.__getitem__)
        return any(not isinstance(one, Exception) and one["ok"] for one in told)

    def oom_kills(self) -> dict[int, int]:
        asked = {rank: link for rank, link in enumerate(self._links) if not (link.lost or link.is_stuck)}
        told = ask_each(list(asked.values()), "oom_kills", 3.0)
        return {
            rank: int(one["found"]) for rank, one in zip(asked, told, strict=True) if not isinstance(one, Exception)
        }

    def is_disk_full(self) -> bool:
        if self._folder is not None and disk_of(str(self._folder.path))[0] < REPORT_BYTES:
            return True
        if self._copies is None:
            return False
        told = ask_each(self._living(), "disk", 5.0, lambda link: {"path": self._run_dir})
        return any(not isinstance(one, Exception) and one["found"][0] < REPORT_BYTES for one in told)

    def put(self, node_rank: int, path: str, data: bytes) -> None:
        try:
            self._links[node_rank].put_file(path, data, 0o600)
        except LinkError as error:
            raise OSError(errno.EHOSTUNREACH, str(error)) from error

    def loads(self, workers: Mapping[int, Mapping[str, object]]) -> dict[int, dict[str, object]]:
        """Return {node rank: resource use} of nodes that answer.

        workers: Node rank -> the workers on this node. The resource use of these workers is returned too.
        """
        asked = [
            (node, link) for node, link in zip(self.nodes, self._links, strict=True) if not (link.lost or link.is_stuck)
        ]
        about = {link: {"gpus": node.gpus, "workers": workers.get(node.node_rank)} for node, link in asked}
        told = ask_each([link for _, link in asked], "load", 2.0, about.__getitem__)
        return {
            node.node_rank: one["found"]
            for (node, _), one in zip(asked, told, strict=True)
            if not isinstance(one, Exception)
        }

    def disks(self, paths: Sequence[str]) -> Mapping[str, tuple[int, int, int]]:
        found = disks_here([str(self._folder.path)] if self._folder else [])
        living = [link for link in self._living() if not link.is_stuck]
        for path in paths:
            asked = {link: {"path": path} for link in living}
            for link, told in zip(living, ask_each(living, "disk", 5.0, asked.__getitem__), strict=True):
                if not isinstance(told, Exception):
                    free, total, number = told["found"]
                    found[f"{path} on {link.name}"] = (free, total, number)
        return found

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            # End all processes, fetch the last files that the processes wrote, then remove the nodes' copies of the run's folder.
            self.kill_all()
            if self._copies is not None:
                with contextlib.suppress(TargetError, EngineError):  # files that can't be fetched stay on the nodes
                    self._copies.fetch(self._attempt, is_last=True)
                self._copies.remove()
            asked = {link: link.begin_close() for link in self._links}
            on_each(self._links, lambda link: link.close(asked=asked[link]))
            if self._copies is not None:
                self._copies.close()
        finally:
            if self._on_close is not None:
                self._on_close()

    def _tell(self) -> None:
        self.on_news()

    def _living(self) -> list[Link]:
        return [link for link in self._links if link.lost is None]

    def _make_scratch(self) -> tuple[str, str]:
        """Create a temporary folder at the same short path on all nodes.

        Return the path, and the path of the first agent's socket for the remote shell.
        """
        name = f"paceline-{secrets.token_hex(4)}"
        path = f"/dev/shm/{name}"
        found = ask_each(self._links, "scratch", _START_S, lambda link: {"path": path})
        if any(isinstance(one, OSError) for one in found):
            made = [link for link, one in zip(self._links, found, strict=True) if isinstance(one, dict)]
            ask_each(made, "remove", _START_S, lambda link: {"path": f"/dev/shm/{name}"})
            path = f"/tmp/{name}"
            found = ask_each(self._links, "scratch", _START_S, lambda link: {"path": path})
        return path, str(all_or_error(self._links, found, f"{path} can't be made")[0]["socket"])


def _to_start(commands: Sequence[Command], environments: Sequence[dict[str, str]], cwd: str) -> dict[str, object]:
    first, *others = environments
    common = {name: value for name, value in first.items() if all(one.get(name) == value for one in others)}
    return {
        "env": common,
        "cwd": cwd,
        "commands": [
            {
                "argv": command.argv,
                "log": str(command.log),
                "env": {name: value for name, value in env.items() if name not in common},
                "spare": command.spare,
                "is_spare": command.is_spare,
            }
            for command, env in zip(commands, environments, strict=True)
        ],
    }


def _with_network(node: Node, link: Link) -> Node:
    for interface, (address, prefix) in link.hello.interfaces.items():
        if address == node.address:
            network = ipaddress.ip_network(f"{address}/{prefix}", strict=False)
            return dataclasses.replace(node, interface=node.interface or interface, network=str(network))
    return node


def script_python(given: str | None, submitter: str | None, links: Sequence[Link]) -> str | None:
    """Return the interpreter for jobs that name no interpreter, or None.

    None means the interpreter that runs the first node's agent.

    given: The target's interpreter, which takes precedence.
    submitter: The submitting process's interpreter, used if all nodes have it; None to ignore it.
    """
    if given is not None or submitter is None:
        return given
    return submitter if all(link.exists(submitter) for link in links) else None
