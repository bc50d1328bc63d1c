"""The common part of `horovodrun` and `horovod.run`: the job that is asked for, and how its end is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from paceline.compat.horovod.runner import hosts as host_lists
from paceline.compat.horovod.runner import start
from paceline.compat.horovod.runner.hosts import Slot
from paceline.compat.horovod.runner.ranks import RankOutcome
from paceline.errors import UserError

#: As long as Horovod's own launcher waits.
_START_TIMEOUT_S = 30.0


def why(outcome: RankOutcome) -> tuple[int, int, str] | None:
    """(rank, exit code, sentence) of the rank that failed first; None where none did."""
    from paceline.supervisor.diagnosis.diagnose import WorkerEnd, first_failure, gone_before

    ends = [
        WorkerEnd(
            rank=rank,
            # The name that the host has for itself; for a rank that has never come up, the name that it was asked for by.
            node=end.hello.get("host", end.host),
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
    # A rank may leave with code 0 after its exception, by os._exit in a handler of the script's; then the error has the
    # code.
    code = first.exit_code or int((first.error or {}).get("exit_code", 1))
    what = f"its process ended with exit code {code}"
    if first.signal:
        what = f"killed by {signal.Signals(first.signal).name}"
    # The exception of sys.exit says no more than the exit code.
    if first.error is not None and first.error.get("type") != "SystemExit" and first.error.get("exception"):
        what = str(first.error["exception"])
    return first.rank, code, f"rank {first.rank} on {first.node} failed first: {what}{gone_before(first, ends)}"


def slots_of(np: int, hosts: str | None, hostfile: str | None) -> list[Slot]:
    """The place of each rank; without hosts, all on this machine.

    Raises:
        UserError: the hosts can't be read, are not known, or have too few slots.
    """
    named = host_lists.parse(hosts) if hosts else host_lists.read(hostfile) if hostfile else None
    # Without hosts, the one host has as many slots as there are ranks: more ranks than cores are allowed.
    return host_lists.slots(named or [host_lists.Host(name="localhost", slots=np)], np)


def transport_of(*, gloo: bool, mpi: bool) -> str:
    """ "mpi" or "gloo": as asked; unasked, MPI where there is one.

    Raises:
        UserError: there is neither.
    """
    # --gloo is taken at its word. Whether there is a torch is for the ranks to say, whose interpreter may be another one.
    if gloo or not (mpi or start.has_mpi()):
        if not gloo and not has_torch():
            raise UserError(
                "there is no Open MPI, and no torch with its Gloo, for the ranks to talk over. "
                "Install one: pip install 'paceline[mpi]'."
            )
        return "gloo"
    return "mpi"


def has_torch() -> bool:
    """True if torch, and with it Gloo, is installed beside this process."""
    from importlib.util import find_spec

    return find_spec("torch") is not None


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that ranks inherit: without what another launcher has set for this process alone."""
    from paceline.launchers.environment import inherited

    kept = inherited(environ)
    # Within a run the variable names that run's workspace, and `inherited` is right to drop it. Outside, it is the user's
    # own setting.
    if "PACELINE_RUN_ID" not in environ and "PACELINE_WORKSPACE" in environ:
        kept["PACELINE_WORKSPACE"] = environ["PACELINE_WORKSPACE"]
    return kept


def start_timeout_s(given: float | None, environ: Mapping[str, str] = os.environ) -> float:
    """The seconds that ranks may take to come up: as given, else as HOROVOD_START_TIMEOUT says."""
    text = environ.get("HOROVOD_START_TIMEOUT", "")
    if given is not None or not text:
        return _START_TIMEOUT_S if given is None else float(given)
    # Not float() alone, which also takes "nan", "inf" and "-5".
    if not text.replace(".", "", 1).isdigit():
        raise UserError(f"HOROVOD_START_TIMEOUT={text!r} is no number of seconds. Unset it, or give one.")
    return float(text)
