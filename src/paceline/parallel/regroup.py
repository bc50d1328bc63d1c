"""Reconnect the ranks over Gloo after a worker is lost, in a run that replaces lost workers (`on_failure="replace"`).

A generation is a group of ranks that connected together. After the loss, each rank that stays closes its connections. So
operations fail on the other ranks too, and all ranks meet the new ranks in the next generation. torch's default process
group is then the group of that generation.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.collectives.rendezvous import Meeting, forget_store, place, place_to_meet
from paceline.errors import PacelineError
from paceline.parallel.exchange import from_rank, gather, journal
from paceline.system.files import read_json, write_json
from paceline.system.run_variables import GENERATION_VARIABLE, nested_rank

#: Seconds to wait until all ranks have reconnected after a loss. Afterwards all workers start again.
LIMIT_S = 300.0
#: Seconds between two polls of the store, and between two checks whether a rank has ended its script.
_POLL_S, _LOOK_S = 0.01, 0.5
_looked_s = 0.0
_gave_up = False

#: How many reconnections came before torch's default group. None if this module has not made the group.
generation: int | None = None
#: Descriptors of the sockets of the default group, each with the name of its socket.
_sockets: set[tuple[int, str]] = set()


_ENDED = "rank {} had ended its script"


class RegroupError(PacelineError, RuntimeError):
    """The ranks can't train together again, so all workers must start again."""


def first_generation() -> int | None:
    """Return the number of the generation that this process joins first.

    A generation is a group of ranks that connected together. None: the run replaces no workers.
    """
    text = os.environ.get(GENERATION_VARIABLE)
    # A launcher in the user's script may have started this process, which then is no worker of the run.
    return None if text is None or nested_rank() is not None else int(text)


def start() -> None:
    """Make torch's default process group at the start of this process.

    A rank that replaces a lost rank gets the other ranks' journal (results of set-up messages), and sets up its training alone.
    """
    atexit.register(_report_end)
    number = first_generation()
    if not number:
        _connect(0, lambda: dist.init_process_group("gloo"))
        # Keep a connection to torch's store, so that its server on rank 0 does not end with the process group.
        place_to_meet(os.environ, "parallel/0")
        return
    try:
        meet(number)
        journal.results = share_journal(is_new=True)[1]
        journal.is_read = True
    except RuntimeError as error:
        report(f"rank {os.environ['RANK']} could not join the other ranks ({error})", gave_up=True)
        raise


def report(why_not: str = "", *, gave_up: bool = False) -> None:
    """Tell the supervisor whether this rank can continue if another rank is lost (`supervisor.replacing`).

    why_not: Why this rank can't, or "". gave_up: Whether this rank fails because it could not join the other ranks again.
    """
    global _gave_up
    _gave_up = gave_up
    values = {"generation": generation, "why_not": why_not, "hands_over": True, "gave_up": gave_up}
    with contextlib.suppress(OSError):  # on a full disk the supervisor keeps the previous report
        write_json(_report_of(os.environ["RANK"]), values)


def _report_of(rank: object) -> Path:
    return Path(os.environ["PACELINE_RUN_DIR"], "attempts", os.environ["PACELINE_ATTEMPT"], f"group_{rank}.json")


def _report_end() -> None:
    if not _gave_up:
        report(_ENDED.format(os.environ["RANK"]))


def share_journal(*, is_new: bool) -> tuple[list[int], list[tuple[str, Any]]]:
    """Send the results of set-up messages (the journal) to new ranks.

    Every rank must call this. Return the new ranks and the journal. `is_new`: Whether this rank replaces a lost rank.
    """
    flags = gather(is_new)
    return [rank for rank, flag in enumerate(flags) if flag], from_rank(journal.results, flags.index(False))


def leave() -> None:
    """Close the connections of torch's default group, and drop the group."""
    port = int(os.environ["MASTER_PORT"])
    for descriptor, name in _sockets:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != name:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as one:
                # A listening socket has no peer, so it raises OSError and stays open: without it Gloo would abort the process.
                # Keep the connections of torch's store, which other ranks may have opened at the same time.
                if port not in (one.getpeername()[1], one.getsockname()[1]):
                    one.shutdown(socket.SHUT_RDWR)
    _sockets.clear()
    dist.destroy_process_group()


def meet(number: int, check: Callable[[], None] = lambda: None) -> None:
    """Connect to the other ranks of generation `number`, and make torch's default group.

    A generation is a group of ranks that connect together. check: Called again and again; may raise an error to end the wait.

    Raises:
        RuntimeError: Not all ranks have come within `LIMIT_S`, or a rank was lost.
    """
    meeting = _meeting(number, time.monotonic() + LIMIT_S, check)
    store, rank, size = meeting.raw_store("torch"), meeting.rank, meeting.size
    _connect(number, lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=size))


def _connect(number: int, make_group: Callable[[], object]) -> None:
    global generation
    before = _open_sockets()
    make_group()
    _sockets.update(_open_sockets() - before)
    generation = number


def _meeting(number: int, end_s: float, check: Callable[[], None]) -> Meeting:
    """Wait until all ranks have joined generation `number`, and return their rendezvous.

    A generation is a group of ranks that connect together. check: Called again and again; may raise an error to end the wait.
    """
    _, size, host, port = place(os.environ)
    while True:
        try:
            meeting = place_to_meet(os.environ, f"parallel/{number}")
            here, missing = meeting.signed("here"), set(range(size))
            here.set(str(meeting.rank), meeting.address)
            while missing := {rank for rank in missing if not here.has(str(rank))}:
                _wait(end_s, check, f"rank {', '.join(map(str, sorted(missing)))} of {size} ranks did not join")
            return meeting
        except RegroupError:
            raise
        except RuntimeError:
            pass
        # Rank 0, the store's server, was lost. Poll for the new rank 0 here, because torch pauses for seconds between attempts.
        forget_store(host, port)
        _wait(end_s, check, "the new rank 0 did not come")
        while not _is_served(host, port):
            _wait(end_s, check, "the new rank 0 did not come")


def _is_served(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return int(os.environ["RANK"]) == 0
    return True


def _wait(end_s: float, check: Callable[[], None], what: str) -> None:
    global _looked_s
    check()
    if time.monotonic() > end_s:
        raise RegroupError(f"{what} within {LIMIT_S:g} s")
    if time.monotonic() > _looked_s + _LOOK_S:
        _looked_s = time.monotonic()
        for rank in range(int(os.environ["WORLD_SIZE"])):
            if (ended := _ENDED.format(rank)) == (read_json(_report_of(rank)) or {}).get("why_not"):
                raise RegroupError(ended)
    time.sleep(_POLL_S)


def _open_sockets() -> set[tuple[int, str]]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                found.add((int(descriptor), name))
    return found
