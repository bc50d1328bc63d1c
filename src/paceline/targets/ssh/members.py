"""Start agents on several hosts in parallel, and lease the hosts' cores and GPUs through them."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EngineError, TargetError
from paceline.remote.foreign_python import bootstrap_words
from paceline.remote.link.link import Link
from paceline.remote.link.messages import LinkError
from paceline.targets import host_leases
from paceline.targets.polling import all_within
from paceline.targets.ssh.command import PASSING, Ssh, explain
from paceline.targets.ssh.hosts import SshHost

if TYPE_CHECKING:
    from paceline.targets.leases import LeaseAnswer, Ticket

_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HostMember:
    """A host that may become a node, and the connection to its agent."""

    host: SshHost
    link: Link

    @property
    def identity(self) -> tuple[str, str]:
        """A sort key of the machine, independent of user and host name."""
        return self.link.hello.boot_id, self.link.hello.host

    @property
    def offered(self) -> int:
        """The number of cores that the host offers to runs."""
        return self.host.slots or self.link.hello.cores

    def ask(self, verb: str, given: Ticket) -> LeaseAnswer:
        """Call a function of the module `paceline.targets.host_leases` on the host.

        verb, given: The function's name, and its argument.

        Raises:
            EngineError: The host did not answer.
            TargetError: The host can't grant leases.
        """
        try:
            answer: LeaseAnswer = self.link.call(f"{host_leases.__name__}:{verb}", given)
            return answer
        except LinkError:
            raise
        except OSError as error:
            raise TargetError(
                f"{self.host.name}: its share of the machine can't be leased: {error.strerror or error}."
            ) from error


def open_member(ssh: Ssh, host: SshHost, *, python: str, library_dir: Path, folder: str) -> HostMember:
    """Start an agent on a host, and return the host with the connection.

    Raises:
        EngineError: The agent can't be started; the message says why, and what to do.
    """
    argv = ssh.words(host, [shlex.join(bootstrap_words(python))])
    try:
        link = Link.open(
            argv, name=host.name, library_dir=library_dir, folder=folder, shared_library=True, silence_s=ssh.silence_s
        )
    except LinkError as error:
        if error.exit_code in (255, 126, 127) or "timed out" in error.stderr:
            why = explain(host, error.stderr, error.exit_code, ssh.login_words(host), python)
        else:
            why = str(error).removeprefix(f"{host.name}: ")
        raise EngineError(why) from error
    return HostMember(host=host, link=link)


class Opening:
    """A parallel start of agents on several hosts, through ssh."""

    def __init__(self, ssh: Ssh, *, python: str, library_dir: Path, folder: str) -> None:
        self._ssh, self._python, self._library_dir, self._folder = ssh, python, library_dir, folder
        # Lock for all fields below. For each host, a thread starts the agent process there, and then notifies waiting threads.
        self._changed = threading.Condition()
        self._asked: dict[SshHost, bool] = {}
        self._members: dict[SshHost, HostMember] = {}
        self.failures: dict[SshHost, str] = {}
        self._closed = False
        self._slots: threading.Semaphore | None = None
        self._began = time.monotonic()
        self._first_s: float | None = None

    def open(self, hosts: Iterable[SshHost]) -> None:
        """Start the missing agents on these hosts, without waiting for them."""
        with self._changed:
            for host in hosts:
                # The ssh configuration of the first host determines how many connections may be opened at the same time.
                self._slots = self._slots or threading.Semaphore(self._ssh.at_once(host))
                if self._asked.get(host) or (host in self._members and not self._members[host].link.lost):
                    continue
                self._members.pop(host, None)
                self._asked[host] = True
                # Use a daemon thread, so that a host that never answers does not keep the program alive.
                threading.Thread(target=self._open, args=(host,), name=f"paceline-ssh-{host.name}", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all hosts are open or failed. Return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._asked.values()), timeout_s)

    def wait_for_those_alike(self, longest_s: float, more_s: float) -> None:
        """Wait for the first agent, then about as long for the others.

        longest_s, more_s: Maximum of each wait, and minimum of the second.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._first_s is not None, longest_s)
            first_s = self._first_s if self._first_s is not None else longest_s
        self.wait(min(max(first_s, more_s), longest_s))

    @property
    def pending(self) -> list[SshHost]:
        with self._changed:
            return [host for host, asked in self._asked.items() if asked]

    def members(self, hosts: Sequence[SshHost]) -> list[HostMember]:
        """Return the `hosts` whose agents are alive, in the same order."""
        with self._changed:
            found = [self._members[host] for host in hosts if host in self._members]
            # If a host's link has broken, record the host as a failure.
            for member in found:
                if member.link.lost:
                    self.failures[member.host] = member.link.lost
            return [member for member in found if not member.link.lost]

    def close(self, but: Iterable[HostMember] = ()) -> None:
        """End all running and starting agents, except the agents of hosts in `but`."""
        kept = {member.host for member in but}
        with self._changed:
            self._closed = True
            ending = [member for host, member in self._members.items() if host not in kept]
        # Wait at most 3 s for an agent process to end. It also ends by itself when its connection is closed.
        all_within({member.host: member.link.close for member in ending}, 3.0)

    def _open(self, host: SshHost) -> None:
        assert self._slots is not None
        with self._slots:
            member, why = self._try(host)
            if why.startswith(PASSING):
                time.sleep(_AGAIN_S)
                member, why = self._try(host)
        with self._changed:
            self._asked[host] = False
            self._first_s = self._first_s or time.monotonic() - self._began
            is_late = self._closed
            if member is None:
                self.failures[host] = why
            elif not is_late:
                self._members[host] = member
                self.failures.pop(host, None)
            self._changed.notify_all()
        # If `close` was called while the agent started, end the agent. Don't hold the lock, because this may take seconds.
        if member is not None and is_late:
            member.link.close()

    def _try(self, host: SshHost) -> tuple[HostMember | None, str]:
        try:
            library, folder = self._library_dir, self._folder
            return open_member(self._ssh, host, python=self._python, library_dir=library, folder=folder), ""
        except (TargetError, OSError) as error:
            return None, str(error)
