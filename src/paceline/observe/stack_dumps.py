"""Take stack dumps and profiles of an attempt's workers, by a program on each node.

The program is `paceline.observe.node.look` or `paceline.observe.node.sampler`. Paceline starts this program like a
worker. So the program ends with the run, and its output is transferred like a log file.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.job.plan import Command, Launch, ProcessExit
from paceline.launchers import environment
from paceline.observe.node.messages import NodeReport, WorkerFacts, WorkersReport
from paceline.runs.folder import RunFolder
from paceline.targets import Nodes

#: Seconds without an answer after which a node counts as silent.
LIMIT_S = 20.0


@dataclass
class _Look:
    """A request for workers' stacks or profiles. `done` is called with the result."""

    number: int
    done: Callable[[WorkersReport], None]
    begun_s: float
    limit_s: float
    asked_ranks: frozenset[int]
    #: (pid, node rank) of a program that has not answered -> ranks that it examines, and its output file
    waiting: dict[tuple[int, int], tuple[tuple[int, ...], Path]] = field(default_factory=dict)
    ranks: dict[str, WorkerFacts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ended: set[tuple[int, int]] = field(default_factory=set)


class Looks:
    """A maker of stack dumps and profiles of one attempt's workers.

    shells: The environment variables of each node's shell.
    about: Returns a rank's facts that only the supervisor knows, such as its node.
    command_of: Returns the command that runs a program in the environment of a rank's worker.
    """

    def __init__(
        self,
        launch: Launch,
        folder: RunFolder,
        nodes: Nodes,
        shells: Sequence[Mapping[str, str]],
        about: Callable[[int], WorkerFacts],
        command_of: Callable[..., Command],
    ) -> None:
        self._launch, self._folder, self._nodes, self._shells = launch, folder, nodes, shells
        self._about, self._command_of = about, command_of
        self._under_way: list[_Look] = []
        self._count = 0

    def begin(self, done: Callable[[WorkersReport], None], *, native: bool = False) -> None:
        """Start to dump all workers' stacks, with C frames if `native`. `done` gets the result."""
        every = [place.rank for place in self._launch.places]
        self._begin(done, "observe/node/look.py", every, {"native": native}, LIMIT_S)

    def begin_profile(
        self, done: Callable[[WorkersReport], None], *, seconds: float, rate: float, ranks: Sequence[int] | None = None
    ) -> None:
        """Start to sample the stacks of `ranks`, by default of all. `done` gets the result."""
        every = [place.rank for place in self._launch.places]
        asked = {"seconds": seconds, "rate": rate}
        # Wait longer than the sampling takes. The sampler program itself ends py-spy in time.
        self._begin(done, "observe/node/sampler.py", every if ranks is None else ranks, asked, seconds + 2 * LIMIT_S)

    def _begin(
        self,
        done: Callable[[WorkersReport], None],
        program: str,
        wanted: Sequence[int],
        asked: Mapping[str, float],
        limit_s: float,
    ) -> None:
        self._count += 1
        one = _Look(
            number=self._count, done=done, begun_s=time.monotonic(), limit_s=limit_s, asked_ranks=frozenset(wanted)
        )
        self._under_way.append(one)
        for ranks in self._groups(one.asked_ranks):
            node_rank = self._launch.places[ranks[0]].node_rank
            name = f"look_{one.number}_{ranks[0]}"
            output = self._folder.exec_output(self._launch.attempt, name)
            there = RunFolder(self._launch.run_dir).exec_output(self._launch.attempt, name)
            words = (str(there), str(environment.watch_dir(self._launch)), json.dumps({"ranks": ranks, **asked}))
            command = self._command_of(ranks[0], program, *words)
            try:
                # Start in "/": the file server of the workers' folder may be hanging.
                started = self._nodes.start(command, Path("/"), self._shells[node_rank])
            except OSError as error:
                one.notes.append(f"{self._launch.nodes[node_rank].name} can't be asked: {error.strerror or error}")
                continue
            one.waiting[started.pid, node_rank] = (ranks, output)
        self.look()

    def look(self) -> None:
        """Read new results, and end programs that take too long."""
        for one in list(self._under_way):
            late = time.monotonic() - one.begun_s > one.limit_s
            for key, (ranks, output) in list(one.waiting.items()):
                told = _read(output)
                if told is not None:
                    one.ranks |= told["ranks"]
                    one.notes += told["notes"]
                elif key in one.ended or late or key[1] in self._nodes.lost():
                    name = self._launch.nodes[key[1]].name
                    one.notes.append(f"{name} has not told of ranks {', '.join(map(str, ranks))}")
                else:
                    continue
                if late:
                    self._nodes.signal(key[0], key[1], 9)
                with contextlib.suppress(OSError):
                    output.unlink()
                del one.waiting[key]
            if not one.waiting:
                self._under_way.remove(one)
                one.done(self._told(one))

    def ended(self, ended: ProcessExit) -> None:
        """Record the end of a process, if it is one of the started programs."""
        for one in self._under_way:
            if (ended.pid, ended.node_rank) in one.waiting:
                one.ended.add((ended.pid, ended.node_rank))

    def close(self) -> None:
        """Abandon all open requests; their `done` is not called."""
        for one in self._under_way:
            for _, output in one.waiting.values():
                output.unlink(missing_ok=True)
        self._under_way.clear()

    def _told(self, one: _Look) -> WorkersReport:
        ranks: dict[str, WorkerFacts] = {}
        for place in self._launch.places:
            if place.rank not in one.asked_ranks:
                continue
            found = one.ranks.get(str(place.rank)) or {"silent": "its node has not told of it"}
            found.update(self._about(place.rank))
            found["node"] = self._launch.nodes[place.node_rank].name
            ranks[str(place.rank)] = found
        return {
            "run_id": self._launch.run_id,
            "attempt": self._launch.attempt,
            "time": time.time(),
            "took_s": round(time.monotonic() - one.begun_s, 3),
            "work_dir": str(self._launch.source_dir or self._launch.work_dir),
            "ranks": ranks,
            "notes": sorted(set(one.notes)),
        }

    def _groups(self, wanted: frozenset[int]) -> list[tuple[int, ...]]:
        """Return groups of ranks that one program can examine, by node or container."""
        apart = self._launch.prepared[0].container is not None and self._launch.job.launcher != "mpi"
        groups: dict[int, list[int]] = {}
        for place in self._launch.places:
            if place.rank in wanted:
                groups.setdefault(place.rank if apart else place.node_rank, []).append(place.rank)
        return [tuple(ranks) for ranks in groups.values()]


def _read(path: Path) -> NodeReport | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if not data.endswith(b"\n"):
        return None
    told: NodeReport = json.loads(data)
    return told
