"""The common part of `horovodrun` and `horovod.run`: the job that is asked for, run to its end."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence

from paceline.compat.horovod.runner import hosts as host_lists
from paceline.compat.horovod.runner import settings, start
from paceline.compat.horovod.runner.asked_elastic import elastic_hosts, elastic_limits
from paceline.compat.horovod.runner.driver import RanksDriver
from paceline.compat.horovod.runner.elastic_driver import ElasticDriver
from paceline.compat.horovod.runner.hosts import Slot
from paceline.compat.horovod.runner.output import Output
from paceline.compat.horovod.runner.ranks import RankOutcome
from paceline.compat.horovod.runner.start import RanksJob
from paceline.errors import UserError

#: As long as Horovod's own launcher waits.
_START_TIMEOUT_S = 30.0


def run(
    options: Namespace, output: Output, argv: Sequence[str], files: Mapping[str, bytes], python: str | None = None
) -> RankOutcome:
    """Run the job that the options describe, an elastic one too, and return its outcome. argv, files, python: see `RanksJob`.

    Raises:
        UserError: the job can't be run as it is.
        LauncherError, RunFailedError: there is no Open MPI; there are not enough hosts for too long.
    """
    if options.ssh_identity_file and not os.path.isfile(options.ssh_identity_file):
        raise UserError(f"--ssh-identity-file {options.ssh_identity_file!r} is no file. Name the private key.")
    limits = elastic_limits(options, options.np)

    def job(slots: Sequence[Slot]) -> RanksJob:
        return RanksJob(
            argv=tuple(argv),
            slots=tuple(slots),
            # What is asked for here stands over this process's own GLOO_SOCKET_IFNAME and the like.
            environment=environment_of(os.environ) | settings.variables(options),
            transport=transport_of(options, is_elastic=limits is not None),
            files=files,
            ssh_port=options.ssh_port,
            ssh_identity_file=options.ssh_identity_file,
            start_timeout_s=start_timeout_s(options.start_timeout),
            interfaces=options.network_interfaces,
            mpi_args=options.mpi_args,
            binding_args=options.binding_args,
            tcp=options.tcp,
            python=python,
            verbose=bool(options.verbose),
        )

    if limits is None:
        hosts = host_lists.named(options.hosts, options.hostfile, options.np)
        return RanksDriver(job(host_lists.slots(hosts, options.np)), output).run()
    with contextlib.closing(elastic_hosts(options, options.np)) as watch:
        return ElasticDriver(job, output, watch, limits).run()


def transport_of(options: Namespace, *, is_elastic: bool) -> str:
    """ "mpi" or "gloo": as asked; unasked, MPI where there is one.

    Raises:
        UserError: there is neither.
    """
    # --gloo is taken at its word. Whether there is a torch is for the ranks to say, whose interpreter may be another one.
    if options.gloo:
        return "gloo"
    # Where a host is lost, mpirun ends all ranks, and what they have committed with them.
    if options.mpi or (not (is_elastic and has_torch()) and start.has_mpi()):
        return "mpi"
    if not has_torch():
        raise UserError(
            "there is no Open MPI, and no torch with its Gloo, for the ranks to talk over. "
            "Install one: pip install 'paceline[mpi]'."
        )
    return "gloo"


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
