"""Hosts from `-H`, `--hostfile` or a discovery script, and the slot of each rank."""

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

#: Seconds between two calls of the discovery script.
_LOOK_S = 1.0
#: Stop the discovery script if it runs for more than this many seconds. It is called again later.
_SCRIPT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine, by the name that reaches it, and its number of ranks."""

    name: str
    slots: int = 1


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A process's host, ranks and group sizes. `cross_rank` numbers processes of equal local rank."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse(text: str) -> list[Host]:
    """Parse hosts like `a:2,b:4`. A host without a number has one slot."""
    # Split at the last colon, because an IPv6 address contains colons: `[fe80::1]:2`.
    return [_host(part.strip(), *part.strip().rpartition(":")[::2], of=f"-H {text!r}") for part in text.split(",")]


def read(path: str) -> list[Host]:
    """Parse a host file: lines `name slots=2`, `name:2` or `name`, and `#` comments."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--hostfile {path!r} can't be read: {error}. Name a text file with `host slots=N` lines."
        ) from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # A line is a single word (`name:2`), or has several words (`name slots=2`, `name slots = 2`).
        name, slots = words[0].rpartition(":")[::2] if len(words) == 1 else (words[0], " ".join(words[1:]))
        hosts.append(_host(" ".join(words), name, re.sub(r"^slots\s*=\s*", "", slots), of=f"line {number} of {path!r}"))
    if not hosts:
        raise UserError(f"--hostfile {path!r} names no host. Give it a line `host slots=N` for each.")
    return hosts


def named(hosts: str | None, hostfile: str | None, slots: int) -> list[Host]:
    """Return the hosts that the options name, by default this machine."""
    if hosts:
        return parse(hosts)
    return read(hostfile) if hostfile else [Host(name="localhost", slots=slots)]


def slots(hosts: Sequence[Host], ranks: int) -> list[Slot]:
    """Return each rank's slot. Hosts are filled in order of their first mention."""
    # If a host is listed twice, add up its slots, because mpirun places all ranks of a host together.
    names = dict.fromkeys(host.name for host in hosts)
    hosts = [Host(name=name, slots=sum(host.slots for host in hosts if host.name == name)) for name in names]
    free = sum(host.slots for host in hosts)
    if ranks > free:
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UserError(f"-np {ranks} needs as many slots, but {named} has {free}. Name more slots, or lower -np.")
    sizes: list[int] = []
    for host in hosts:
        sizes.append(min(host.slots, ranks - sum(sizes)))
    result: list[Slot] = []
    for index, (host, size) in enumerate(zip(hosts, sizes, strict=True)):
        for local_rank in range(size):
            # The cross rank is the host's position among the hosts that have a rank with this local rank. With `a:2,b:1`, only
            # the host `a` has a local rank 1.
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
    """Return whether the name means this machine."""
    # First check the name without the resolver: without a network, a machine may be unable to resolve its own name.
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"the host {name!r} is not known here ({error}). Check the name, or give its address."
        ) from error
    for family, kind, protocol, _, address in addresses:
        # Try to bind the address. This succeeds only if the address belongs to this machine.
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0, *address[2:]))
            return True
    return False


def _host(text: str, name: str, slots_text: str, *, of: str) -> Host:
    if not name:
        name, slots_text = text, "1"
    # Remove the brackets around an IPv6 address, because ssh and the resolver refuse brackets.
    name = name.removeprefix("[").removesuffix("]")
    # Refuse a name that begins with a dash, because ssh would treat it as an option.
    if not re.fullmatch(r"[\w.:%][\w.:%-]*", name) or not slots_text.isdecimal() or int(slots_text) < 1:
        raise UserError(f"{text!r} in {of} is not a host with its slots. Write it as name:2, the slots from 1 on.")
    return Host(name=name, slots=int(slots_text))


def from_script(command: str, slots: int | None) -> Callable[[], list[Host]]:
    """Return a function that runs a discovery command.

    The command prints a line `host:slots` or `host` for each host. A line `host` means `slots` slots, by default 1. The
    function raises UserError if the command cannot run, fails, takes too long, or prints an invalid line.
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
            last_error = errors.strip().splitlines()[-1:]
            raise UserError(
                f"--host-discovery-script {command!r} ended with exit code {code}{': ' + last_error[0] if last_error else ''}. "
                "It prints a line host:slots for each host, and ends with 0."
            )
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        named = [line if _has_slots(line) else f"{line}:{slots or 1}" for line in lines]
        return parse(",".join(named)) if named else []

    return ask


def _run(line: str) -> tuple[int, str, str]:
    # Start the script in a new process group, so that all programs that it has started can be ended together.
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
    """The available hosts, polled in a thread, without failed hosts.

    `cooldown` is (shortest, longest): seconds until a failed host may be used. After its first failure a host waits for
    the shortest time, then twice as long after each failure, at most the longest time. None: failed hosts never return.
    """

    def __init__(
        self, ask: Callable[[], list[Host]], cooldown: Sequence[int] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._cooldown, self._clock = ask, cooldown, clock
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}
        # Call the script for the first time in this thread: if the script is broken, the error comes before any rank starts.
        self._found: list[Host] = ask()
        self.error: UserError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="horovodrun-hosts", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def usable(self) -> list[Host]:
        """Return the hosts in their order, without those that have failed."""
        now = self._clock()
        return [host for host in self._found if self._until.get(host.name, 0.0) <= now]

    def failed(self, name: str) -> None:
        """Exclude a host that has failed, for its cooldown time or for good."""
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
                # The script has failed, which says nothing about the hosts. Keep the hosts that it returned before.
                self.error = error


def _has_slots(line: str) -> bool:
    return line.rpartition(":")[2].isdecimal() and not line.endswith("]")
