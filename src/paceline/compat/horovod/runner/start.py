"""The command lines that start all ranks: one mpirun, or plain processes and ssh."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path

from paceline.compat.horovod.runner import wire
from paceline.compat.horovod.runner.hosts import Slot, is_here
from paceline.errors import LauncherError, UserError

_RANK = str(Path(__file__).with_name("rank.py"))


@dataclass(frozen=True, kw_only=True)
class RanksJob:
    """A Horovod job: its ranks, hosts, command and environment.

    Attributes:
        slots: Each rank's host, its rank in the job, and its rank on the host.
        argv: The command of each rank.
        files: Contents of the files for each rank's scratch folder, by file name.
        environment: The environment of all ranks, without variables that differ between ranks.
        transport: "mpi" or "gloo".
        python: The interpreter whose Open MPI is used.
    """

    argv: tuple[str, ...]
    slots: tuple[Slot, ...]
    environment: Mapping[str, str]
    transport: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    directory: str = field(default_factory=os.getcwd)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    start_timeout_s: float = 30.0
    interfaces: str | None = None
    mpi_args: str | None = None
    binding_args: str | None = None
    tcp: bool = False
    python: str | None = None
    verbose: bool = False

    @cached_property
    def is_local(self) -> bool:
        """Return whether all ranks run on this machine."""
        return all(is_here(name) for name in dict.fromkeys(slot.host for slot in self.slots))


@dataclass(frozen=True, kw_only=True)
class Started:
    """A command line that starts ranks, with the text for its standard input."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    ranks: tuple[int, ...] = ()


def commands(job: RanksJob, contact: Mapping[str, object], scratch: str) -> list[Started]:
    """Return the command lines that start all ranks.

    `contact` has the address and key of this process. `scratch` is a temporary folder on this machine.
    """
    return (
        [_with_mpi(job, contact, scratch)]
        if job.transport == "mpi"
        else [_plain(job, contact, slot) for slot in job.slots]
    )


def _with_mpi(job: RanksJob, contact: Mapping[str, object], scratch: str) -> Started:
    """Return one mpirun command for all ranks."""
    from paceline.launchers.mpi import AS_ROOT, find_open_mpi, scratch_variables

    mpi = find_open_mpi(job.python or sys.executable)
    is_5 = mpi.version[0] >= 5
    parameter = "--prtemca" if is_5 else "--mca"
    arguments = [*_words("--binding-args", job.binding_args), *_words("--mpi-args", job.mpi_args)]
    # Accept both `--map-by=node` and `--map-by node`, with one dash or two.
    names = {word.partition("=")[0].lstrip("-") for word in arguments if word.startswith("-")}
    # If the user gives a mapping or a rankfile, add no mapping: mpirun 5 refuses two. To allow more ranks than slots, Open MPI 4
    # needs --oversubscribe, and version 5 a suffix of the mapping.
    words = [] if is_5 else ["--oversubscribe"]
    if not names & {"map-by", "rankfile", "rf"}:
        words += ["--map-by", "slot:OVERSUBSCRIBE" if is_5 else "slot"]
    # Don't let mpirun bind a rank to a single core or socket, because the rank's threads would share it.
    if not job.binding_args and "bind-to" not in names:
        words += ["--bind-to", "none"]
    if not job.is_local:
        # `hosts.slots` lists all ranks of a host together, so `groupby` yields each host only once.
        per_host = [(host, len(list(group))) for host, group in groupby(job.slots, key=lambda slot: slot.host)]
        # To other hosts, mpirun passes only its own variables, and the variables that -x names.
        words += ["--host", ",".join(f"{host}:{count}" for host, count in per_host), "-x", wire.VARIABLE]
        words += [parameter, "plm_ssh_args" if is_5 else "plm_rsh_args", shlex.join(_ssh_options(job))]
        if is_5:
            # Set keep-alive probes. By default, TCP takes more than two hours to detect that a host has vanished.
            for name, value in (("time", "20"), ("intvl", "10"), ("probes", "4")):
                words += [parameter, f"oob_tcp_keepalive_{name}", value]
    if job.tcp:
        # Use Open MPI's message layer ob1 with two transports: TCP between ranks, and `self` for a rank's messages to itself.
        words += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
    if job.interfaces:
        words += ["--mca", "btl_tcp_if_include", job.interfaces]
        words += [] if job.is_local else [parameter, "oob_tcp_if_include", job.interfaces]
    words += arguments
    # Pass the key in an environment variable, because every user of the machine can read a command line.
    variables = {wire.VARIABLE: json.dumps(contact)}
    # The scratch folder exists only on this machine, so set it only if all ranks run here.
    if job.is_local:
        variables |= scratch_variables(scratch, mpi.version[0])
        if not job.tcp and not job.interfaces and "OMPI_MCA_btl" not in job.environment:
            # Disable TCP, because Open MPI would listen at every address of the machine. The ranks use shared memory.
            variables["OMPI_MCA_btl"] = "^tcp"
    if os.geteuid() == 0:
        variables |= AS_ROOT
    return Started(
        argv=(mpi.mpirun, *words, "-n", str(len(job.slots)), sys.executable, _RANK),
        environment={**job.environment, **variables},
        ranks=tuple(slot.rank for slot in job.slots),
    )


def exported(mpi_args: str | None) -> dict[str, str]:
    """Return {name: value} from the `-x NAME=value` options in mpirun's arguments."""
    words = _words("--mpi-args", mpi_args)
    # Skip `-x NAME` without a value, because the ranks get this variable of the shell in any case.
    pairs = [value.partition("=") for word, value in pairwise(words) if word == "-x" and "=" in value]
    return {name: value for name, _, value in pairs}


def _plain(job: RanksJob, contact: Mapping[str, object], slot: Slot) -> Started:
    """Return the command for one rank, through ssh if its host is another machine."""
    argv = [sys.executable, _RANK, str(slot.rank)]
    if not is_here(slot.host):
        if shutil.which("ssh") is None:
            raise UserError(f"the host {slot.host!r} is reached by ssh, which is not installed here. Install it.")
        # Quote the command for the shell of the other host, because ssh joins its arguments by spaces.
        argv = ["ssh", *_ssh_options(job), slot.host, shlex.join(argv)]
    # Pass the key on standard input, because every user of either machine could read it on a command line.
    text = json.dumps(contact) + "\n"
    return Started(argv=tuple(argv), environment=job.environment, text=text, ranks=(slot.rank,))


def _ssh_options(job: RanksJob) -> list[str]:
    # With BatchMode, ssh fails instead of asking for a password. With accept-new, ssh accepts the key of a new host, and refuses
    # a changed key.
    words = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new"]
    words += ["-p", str(job.ssh_port)] if job.ssh_port else []
    words += ["-i", os.path.abspath(job.ssh_identity_file)] if job.ssh_identity_file else []
    return words


def has_mpi() -> bool:
    """Return whether Open MPI is installed."""
    from paceline.launchers.mpi import find_open_mpi

    try:
        find_open_mpi(sys.executable)
    except LauncherError:
        return False
    return True


def for_host(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the ranks' environment for `host`, without this machine's variables if remote."""
    if is_here(host):
        return dict(environment)
    return {name: value for name, value in environment.items() if not wire.is_of_host(name)}


def _words(option: str, text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UserError(f"{option} {text!r} can't be split into words: {error}. Close its quotes.") from error
