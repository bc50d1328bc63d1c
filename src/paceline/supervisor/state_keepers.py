"""Start processes that keep a run's newest training states in the memory of its nodes (`paceline.node.states`).

The process of each node keeps the states of its own ranks, and copies of the states of the preceding node. After the
loss of a node, the remaining nodes write the states as checkpoints. Paceline copies these checkpoints to all nodes of
the next attempt, so all ranks find the same newest checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence

from paceline.errors import EngineError
from paceline.job.plan import Command, Launch, ProcessExit
from paceline.launchers import environment
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json
from paceline.system.spare_client import KEY_VARIABLE, address_file
from paceline.targets import Nodes


class StateKeepers:
    """A manager of processes that hold a run's training states in nodes' memory.

    key: The secret that these processes and the workers share, as hexadecimal digits.
    """

    def __init__(self) -> None:
        self.key = os.urandom(32).hex()
        self._pids: dict[int, int] = {}
        #: Node rank -> attempt that started the node's process for copies of states; `_ports`: node rank -> its port.
        self._begun: dict[int, int] = {}
        self._ports: dict[int, int] = {}

    def forget(self) -> None:
        """Forget the processes, since the run has other nodes now."""
        self._pids, self._begun, self._ports = {}, {}, {}

    def look(self, folder: RunFolder, launch: Launch, nodes: Nodes, shells: Sequence[Mapping[str, str]]) -> None:
        """Start missing processes, and send each process's address to the preceding node."""
        put: Callable[[int, str, bytes], None] | None = getattr(nodes, "put", None)
        if not launch.states_key or put is None:
            return
        for node in launch.nodes:
            rank = node.node_rank
            if rank not in self._begun:
                self._begun[rank] = launch.attempt
                try:
                    command = environment.with_paths(_command(launch, rank), launch, shells[rank])
                    self._pids[rank] = nodes.start(command, launch.run_dir, shells[rank]).pid
                except (OSError, EngineError) as error:
                    say(f"node {node.name} keeps no states in memory: {error}")
            report = None if rank in self._ports else read_json(folder.keeper(self._begun[rank], rank))
            if not report:
                continue
            self._ports[rank] = int(report["port"])
            before = (rank - 1) % len(launch.nodes)
            spare = launch.spare.replace("%", str(before))
            try:
                put(before, address_file(spare), json.dumps([node.address, self._ports[rank]]).encode())
            except OSError as error:
                say(f"node {launch.nodes[before].name} copies no states to node {node.name}: {error}")

    def ended(self, ended: ProcessExit, launch: Launch) -> None:
        """Log a crash if `ended` is one of these processes."""
        if self._pids.get(ended.node_rank) == ended.pid and ended.exit_code:
            del self._pids[ended.node_rank]
            name = launch.nodes[ended.node_rank].name
            say(f"node {name} keeps no states in memory any more: the process ended with exit code {ended.exit_code}")


def _command(launch: Launch, node_rank: int) -> Command:
    folder = RunFolder(launch.run_dir)
    return Command(
        argv=(
            *(launch.prepared[node_rank].python, "-m", "paceline.node.states"),
            launch.spare.replace("%", str(node_rank)),
            launch.nodes[node_rank].address,
            str(folder.checkpoints),
            str(folder.keeper(launch.attempt, node_rank)),
        ),
        environment=environment.of_run(launch) | {KEY_VARIABLE: launch.states_key},
        node_rank=node_rank,
        log=folder.driver_log,
        is_spare=True,
    )
