"""The command lines that start `runner.rank` once for each rank: one mpirun, or plain processes and ssh."""

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
    """A job to run.

    Attributes:
        slots: The place of each rank.
        argv: The command of each rank.
        files: The files for each rank's scratch folder, by name.
        environment: The ranks' environment, without their ranks' own variables.
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
    """A command line, with the text for its input."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    ranks: tuple[int, ...] = ()


def commands(job: RanksJob, contact: Mapping[str, object], scratch: str) -> list[Started]:
    """Return the command lines that start all ranks.

    `contact` is the address and key of this process, and `scratch` a folder on this machine.
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
    # `--map-by=node` and `--map-by node` alike, with one dash or two.
    names = {word.partition("=")[0].lstrip("-") for word in arguments if word.startswith("-")}
    # mpirun 5 refuses duplicate options; a file of ranks is a mapping too.
    # Open MPI 4 needs --oversubscribe for more ranks than slots; in version 5 it is part of the mapping.
    words = [] if is_5 else ["--oversubscribe"]
    if not names & {"map-by", "rankfile", "rf"}:
        words += ["--map-by", "slot:OVERSUBSCRIBE" if is_5 else "slot"]
    # mpirun binds ranks to cores or sockets otherwise, where the threads of each would crowd.
    if not job.binding_args and "bind-to" not in names:
        words += ["--bind-to", "none"]
    if not job.is_local:
        # `hosts.slots` keeps the ranks of a host together, so each host is one group.
        per_host = [(host, len(list(group))) for host, group in groupby(job.slots, key=lambda slot: slot.host)]
        # On other hosts mpirun hands on nothing of its environment but its own variables, and what -x names.
        words += ["--host", ",".join(f"{host}:{count}" for host, count in per_host), "-x", wire.VARIABLE]
        words += [parameter, "plm_ssh_args" if is_5 else "plm_rsh_args", shlex.join(_ssh_options(job))]
        if is_5:
            # Only ssh itself notices a host that vanishes; TCP alone would take two hours.
            for name, value in (("time", "20"), ("intvl", "10"), ("probes", "4")):
                words += [parameter, f"oob_tcp_keepalive_{name}", value]
    if job.tcp:
        # Of Open MPI's message layers, ob1 is the one that uses these transports; `self` is a rank's way to itself.
        words += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
    if job.interfaces:
        words += ["--mca", "btl_tcp_if_include", job.interfaces]
        words += [] if job.is_local else [parameter, "oob_tcp_if_include", job.interfaces]
    words += arguments
    # In the environment, for the key in it would be seen by every user of the machine on the command line.
    variables = {wire.VARIABLE: json.dumps(contact)}
    # On several hosts nothing of it: the folder is this machine's alone.
    if job.is_local:
        variables |= scratch_variables(scratch, mpi.version[0])
        if not job.tcp and not job.interfaces and "OMPI_MCA_btl" not in job.environment:
            # Here ranks share memory; Open MPI's TCP would listen at every address of the machine.
            variables["OMPI_MCA_btl"] = "^tcp"
    if os.geteuid() == 0:
        variables |= AS_ROOT
    return Started(
        argv=(mpi.mpirun, *words, "-n", str(len(job.slots)), sys.executable, _RANK),
        environment={**job.environment, **variables},
        ranks=tuple(slot.rank for slot in job.slots),
    )


def exported(mpi_args: str | None) -> dict[str, str]:
    """Return the ranks' variables from `-x NAME=value` for mpirun."""
    words = _words("--mpi-args", mpi_args)
    # `-x NAME` without a value names a variable of the shell, which the ranks have anyway.
    pairs = [value.partition("=") for word, value in pairwise(words) if word == "-x" and "=" in value]
    return {name: value for name, _, value in pairs}


def _plain(job: RanksJob, contact: Mapping[str, object], slot: Slot) -> Started:
    """Return the command for one rank, over ssh on another host."""
    argv = [sys.executable, _RANK, str(slot.rank)]
    if not is_here(slot.host):
        if shutil.which("ssh") is None:
            raise UserError(f"the host {slot.host!r} is reached by ssh, which is not installed here. Install it.")
        # ssh joins its words by spaces, and a shell on the other host splits them again.
        argv = ["ssh", *_ssh_options(job), slot.host, shlex.join(argv)]
    # On standard input, for a command line with the key could be read by every user of either machine.
    text = json.dumps(contact) + "\n"
    return Started(argv=tuple(argv), environment=job.environment, text=text, ranks=(slot.rank,))


def _ssh_options(job: RanksJob) -> list[str]:
    # BatchMode makes ssh fail instead of asking for a password. accept-new accepts a new host's key and refuses a changed
    # one.
    words = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new"]
    words += ["-p", str(job.ssh_port)] if job.ssh_port else []
    words += ["-i", os.path.abspath(job.ssh_identity_file)] if job.ssh_identity_file else []
    return words


def has_mpi() -> bool:
    """Return whether there is an Open MPI."""
    from paceline.launchers.mpi import find_open_mpi

    try:
        find_open_mpi(sys.executable)
    except LauncherError:
        return False
    return True


def for_host(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the environment that another host may have."""
    if is_here(host):
        return dict(environment)
    return {name: value for name, value in environment.items() if not wire.is_of_host(name)}


def _words(option: str, text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UserError(f"{option} {text!r} can't be split into words: {error}. Close its quotes.") from error
