"""The ranks of a job: results, first failure and environment variables."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from paceline.compat.horovod.runner.hosts import Slot

if TYPE_CHECKING:
    from paceline.compat.horovod.runner.wire import RankHello
    from paceline.supervisor.diagnosis.diagnose import ErrorFile


@dataclass
class RankEnd:
    """The state of one rank, as `horovodrun` knows it."""

    host: str
    connection: Connection | None = None
    hello: RankHello | None = None
    exit_code: int | None = None
    error: ErrorFile | None = None
    ended_at: float | None = None
    #: Name of a file that the rank sends -> the part that has arrived so far. `sizes` has the file's final size.
    files: dict[str, bytearray] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    stopped: bool = False
    is_lost: bool = False

    def whole_files(self) -> dict[str, bytes]:
        """Return the rank's completely received files: name -> content."""
        return {name: bytes(content) for name, content in self.files.items() if len(content) == self.sizes[name]}


@dataclass
class RankOutcome:
    """The end of a Horovod job, or of its last attempt.

    `problem` is the reason why the ranks could not start; None if they started. `stopped_by` is the signal that ended
    `horovodrun`; None without a signal.
    """

    ranks: list[RankEnd]
    problem: str | None = None
    stopped_by: int | None = None


def why(outcome: RankOutcome) -> tuple[int, int, str] | None:
    """Return (rank, exit code, sentence) of the first failure, or None."""
    from paceline.supervisor.diagnosis.diagnose import WorkerEnd, first_failure, gone_before, script_exit_code

    ends = [
        WorkerEnd(
            rank=rank,
            # Use the name that the host has reported. For a rank that has never connected, use the name in the list of hosts.
            node=end.hello["host"] if end.hello else end.host,
            exit_code=end.exit_code,
            error=end.error,
            ended_at=end.ended_at,
            stopped=end.stopped,
        )
        for rank, end in enumerate(outcome.ranks)
    ]
    first = first_failure(ends)
    if first is None:
        return None
    code = script_exit_code(first.exit_code, first.error) or 1
    what = f"its process ended with exit code {code}"
    if first.signal:
        what = f"killed by {signal.Signals(first.signal).name}"
    if first.error is not None and first.error.get("type") != "SystemExit" and first.error.get("exception"):
        what = str(first.error["exception"])
    return first.rank, code, f"rank {first.rank} on {first.node} failed first: {what}{gone_before(first, ends)}"


def variables(slot: Slot, size: int, transport: str, master: tuple[str, int]) -> dict[str, str]:
    """Return one rank's environment variables. `master` is the address of torch's rendezvous."""
    return {
        "HOROVOD_CONTROLLER": transport,
        "HOROVOD_CPU_OPERATIONS": transport,
        "HOROVOD_HOSTNAME": slot.host,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def threads(slots: Sequence[Slot], ranks: Sequence[RankEnd]) -> list[int]:
    """Return each rank's number of cores: an equal share of its host's cores."""
    cores: dict[str, set[int]] = {}
    for slot, rank in zip(slots, ranks, strict=True):
        # mpirun may have bound each rank to its own cores, so combine the cores of all ranks on a host.
        assert rank.hello is not None, "every rank has come up"
        cores.setdefault(slot.host, set()).update(rank.hello["cores"])
    return [max(1, len(cores[slot.host]) // slot.local_size) for slot in slots]


def with_defaults(environment: Mapping[str, str], threads: int, *, is_one_machine: bool) -> dict[str, str]:
    """Return the ranks' environment with defaults: OMP_NUM_THREADS (`threads`), loopback interfaces (`is_one_machine`)."""
    # The ranks write to pipes, and Python would buffer this output. The fault handler shows where a rank has crashed.
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONHASHSEED": "0",
    }
    if is_one_machine:
        # Name the network interface: Gloo and NCCL would resolve the host's name, which fails on a laptop without a network.
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return defaults | dict(environment)


def named(ranks: Sequence[int], places: Sequence[RankEnd]) -> str:
    """Describe ranks and their hosts, such as "ranks 1, 3 on a, b"."""
    hosts = ", ".join(dict.fromkeys(places[rank].host for rank in ranks))
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} on {hosts}"
