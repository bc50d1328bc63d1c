"""Hosts and their slots, as `-H` and `--hostfile` name them, and the place of each rank on them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.system.processes import kill_group

#: How often the script is asked.
_LOOK_S = 1.0
#: A script that takes longer is asked again.
_SCRIPT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine, by the name that reaches it, and how many ranks it takes."""

    name: str
    slots: int = 1


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one rank. cross_rank, cross_size: its place among the hosts that have as many ranks."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse(text: str) -> list[Host]:
    """The hosts of `a:2,b:4`; a host without a number has one slot.

    Raises:
        UserError: a part that is no host.
    """
    # From the right, for an address of IPv6 has colons of its own: `[fe80::1]:2`.
    return [_host(part.strip(), *part.strip().rpartition(":")[::2], of=f"-H {text!r}") for part in text.split(",")]


def read(path: str) -> list[Host]:
    """The hosts of a file with a line `name slots=2` for each; `name:2` and `name` are taken too, `#` begins a comment.

    Raises:
        UserError: the file can't be read, or has a line that is no host.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--hostfile {path!r} can't be read: {error}. Name a text file with `host slots=N` lines."
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # `name:2` is one word; `name slots=2` and `name slots = 2` are several.
        name, slots = words[0].rpartition(":")[::2] if len(words) == 1 else (words[0], " ".join(words[1:]))
        found.append(_host(" ".join(words), name, re.sub(r"^slots\s*=\s*", "", slots), of=f"line {number} of {path!r}"))
    if not found:
        raise UserError(f"--hostfile {path!r} names no host. Give it a line `host slots=N` for each.")
    return found


def named(hosts: str | None, hostfile: str | None, slots: int) -> list[Host]:
    """The hosts of `-H` or `--hostfile`. Without either this machine, with so many slots: more ranks than cores are allowed.

    Raises:
        UserError: they can't be read.
    """
    if hosts:
        return parse(hosts)
    return read(hostfile) if hostfile else [Host(name="localhost", slots=slots)]


def slots(hosts: Sequence[Host], ranks: int) -> list[Slot]:
    """The place of each rank: the hosts are filled in the order in which they are first named.

    Raises:
        UserError: there are fewer slots than ranks.
    """
    # A host that is named twice is one host: mpirun gives it all of its ranks at once.
    names = dict.fromkeys(host.name for host in hosts)
    hosts = [Host(name=name, slots=sum(host.slots for host in hosts if host.name == name)) for name in names]
    free = sum(host.slots for host in hosts)
    if ranks > free:
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UserError(
            f"-np {ranks} needs as many slots, but {named} has {free}. Name more hosts or slots, or lower -np."
        )
    sizes: list[int] = []
    # Hosts that the ranks don't reach keep a size of 0.
    for host in hosts:
        sizes.append(min(host.slots, ranks - sum(sizes)))
    result: list[Slot] = []
    for index, (host, size) in enumerate(zip(hosts, sizes, strict=True)):
        for local_rank in range(size):
            # Only hosts that have this local rank as well count for the cross rank: with `a:2,b:1` the second rank of `a`
            # is alone.
            peers = [number for number, other in enumerate(sizes) if other > local_rank]
            result.append(
                Slot(
                    rank=len(result),
                    host=host.name,
                    local_rank=local_rank,
                    local_size=size,
                    cross_rank=peers.index(index),
                    cross_size=len(peers),
                )
            )
    return result


def is_here(name: str) -> bool:
    """True if the name is this machine's.

    Raises:
        UserError: nobody knows the name.
    """
    # Without the resolver, for a machine that is off its network may not find its own name.
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"the host {name!r} is not known here ({error}). Check the name, or give its address."
        ) from error
    for family, kind, protocol, _, address in found:
        # Only an address of this machine's own can be bound.
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0, *address[2:]))
            return True
    return False


def _host(text: str, name: str, slots_text: str, *, of: str) -> Host:
    if not name:
        name, slots_text = text, "1"
    # The brackets only part the address from the slots; ssh and the resolver want it without them.
    name = name.removeprefix("[").removesuffix("]")
    # What begins with a dash would be an option of ssh.
    if not re.fullmatch(r"[\w.:%][\w.:%-]*", name) or not slots_text.isdigit() or int(slots_text) < 1:
        raise UserError(f"{text!r} in {of} is no host with its slots. Write it as name:2, the slots from 1 on.")
    return Host(name=name, slots=int(slots_text))


def from_script(command: str, slots: int | None) -> Callable[[], list[Host]]:
    """Return a function that runs the command in a shell, as Horovod does: it prints a line `host:slots` or `host` for each host.

    command: or the path of a program or a shell script. slots: of a host without a number, 1.

    Raises (the function):
        UserError: it can't be run, ends with another code than 0, takes too long, or prints what is no host.
    """
    line = shlex.quote(os.path.abspath(command)) if os.path.exists(command) else command

    def ask() -> list[Host]:
        try:
            code, output, errors = _run(line)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--host-discovery-script {command!r} can't be run: {error}. Name a program or a shell command."
            ) from error
        if code:
            said = errors.strip().splitlines()[-1:]
            raise UserError(
                f"--host-discovery-script {command!r} ended with exit code {code}{': ' + said[0] if said else ''}. "
                "It prints a line host:slots for each host, and ends with 0."
            )
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        named = [line if _has_slots(line) else f"{line}:{slots or 1}" for line in lines]
        return parse(",".join(named)) if named else []

    return ask


def _run(line: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a shell's line."""
    # A group of its own: of a shell that takes too long its programs have to end too.
    process = subprocess.Popen(
        line,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_SCRIPT_S)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"it took more than {_SCRIPT_S:g} s") from None
    finally:
        if process.poll() is None:
            kill_group(process.pid)
            process.communicate()
    return process.returncode, output, errors


class HostWatch:
    """The hosts that there are now, asked for in a thread, without those that have failed.

    cooldown: seconds (from, to) after which a failed host may come back: the first number after its first failure, then twice as
    long each time, at most the second. None: never.
    """

    def __init__(
        self,
        ask: Callable[[], list[Host]],
        cooldown: Sequence[int] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._cooldown, self._clock = ask, cooldown, clock
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}
        # At once, and in this thread: a script that does not work is told before anything starts.
        self._found: list[Host] = ask()
        self.error: UserError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="horovodrun-hosts", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def usable(self) -> list[Host]:
        """The hosts, in the order in which they are told, without those that have failed."""
        now = self._clock()
        return [host for host in self._found if self._until.get(host.name, 0.0) <= now]

    def failed(self, name: str) -> None:
        """Leave this host out."""
        number = self._failures[name] = self._failures.get(name, 0) + 1
        if self._cooldown is None:
            self._until[name] = float("inf")
            return
        first, most = self._cooldown
        self._until[name] = self._clock() + min(first * 2 ** (number - 1), most)

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self._found, self.error = self._ask(), None
            except UserError as error:
                # The hosts of before: a script that fails once says nothing of them.
                self.error = error


def _has_slots(line: str) -> bool:
    return line.rpartition(":")[2].isdigit() and not line.endswith("]")
