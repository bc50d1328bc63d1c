"""The job that `horovodrun` or `horovod.run` requests, from options to end."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.compat.horovod.runner import hosts as host_lists
from paceline.compat.horovod.runner import start
from paceline.compat.horovod.runner.driver import RanksDriver
from paceline.compat.horovod.runner.elastic_driver import ElasticDriver, ElasticLimits
from paceline.compat.horovod.runner.hosts import Host, HostWatch, Slot, from_script
from paceline.compat.horovod.runner.output import Output
from paceline.compat.horovod.runner.ranks import RankOutcome
from paceline.compat.horovod.runner.start import RanksJob
from paceline.errors import UserError

#: Default start timeout in seconds, which is Horovod's default, too.
_START_TIMEOUT_S = 30.0

#: Option -> environment variable for the option's value. `_SWITCHES` lists options without a value.
_VARIABLES = {
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "timeline_filename": "HOROVOD_TIMELINE",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "log_level": "HOROVOD_LOG_LEVEL",
}
_SWITCHES = {"timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES", "log_hide_timestamp": "HOROVOD_LOG_HIDE_TIME"}
_AUTOTUNE = (
    "--autotune: nothing is tuned. --fusion-threshold-mb and --cycle-time-ms set what autotuning would choose; their "
    "defaults fit the machine"
)
#: Options that Paceline accepts but ignores -> the reason.
_WITHOUT_MEANING = {
    "hierarchical_allreduce": "--hierarchical-allreduce: MPI chooses its own way",
    "hierarchical_allgather": "--hierarchical-allgather: MPI chooses its own way",
    "torus_allreduce": "--torus-allreduce: MPI chooses its own way",
    "num_nccl_streams": "--num-nccl-streams: the engine has one stream for each process set",
    "thread_affinity": "--thread-affinity: the engine's threads are not bound to cores",
    "mpi_threads_disable": "--mpi-threads-disable: the engine needs MPI's threads",
    "gloo_timeout_seconds": "--gloo-timeout-seconds: --start-timeout says how long ranks may take to come up",
    "autotune": _AUTOTUNE,
    "autotune_log_file": _AUTOTUNE,
    "autotune_warmup_samples": _AUTOTUNE,
    "autotune_steps_per_sample": _AUTOTUNE,
    "autotune_bayes_opt_max_samples": _AUTOTUNE,
    "autotune_gaussian_process_noise": _AUTOTUNE,
}


def run(
    options: Namespace, output: Output, argv: Sequence[str], files: Mapping[str, bytes], python: str | None = None
) -> RankOutcome:
    """Run the job that `options` describe, elastic or not. Return its outcome.

    `files` maps names to the contents of files for each rank's scratch folder. `python`: the interpreter whose Open MPI is used.
    """
    if options.ssh_identity_file and not os.path.isfile(options.ssh_identity_file):
        raise UserError(f"--ssh-identity-file {options.ssh_identity_file!r} is not a file. Name the private key.")
    limits = elastic_limits(options, options.np)

    def job(slots: Sequence[Slot]) -> RanksJob:
        return RanksJob(
            argv=tuple(argv),
            slots=tuple(slots),
            environment=environment_of(os.environ) | variables(options),
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
    """Return "mpi" or "gloo". By default prefer "mpi", but "gloo" for an elastic job."""
    # Don't check here whether torch is installed: only the ranks can check this, in their own interpreter.
    if options.gloo:
        return "gloo"
    # Prefer Gloo for elastic jobs: if a host is lost, mpirun ends all ranks, and their commits would be lost.
    if options.mpi or (not (is_elastic and has_torch()) and start.has_mpi()):
        return "mpi"
    if not has_torch():
        raise UserError(
            "there is no Open MPI, and no torch with its Gloo, for the ranks to talk over. "
            "Install one: pip install 'paceline[mpi]'."
        )
    return "gloo"


def has_torch() -> bool:
    """Return whether torch, and with it Gloo, is installed."""
    from importlib.util import find_spec

    return find_spec("torch") is not None


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the ranks' environment, without variables that are for this process only."""
    from paceline.launchers.environment import inherited

    kept = inherited(environ)
    # `inherited` drops PACELINE_WORKSPACE, because Paceline sets this variable in a run. Outside of a run, the user has set the
    # variable, so keep it.
    if "PACELINE_RUN_ID" not in environ and "PACELINE_WORKSPACE" in environ:
        kept["PACELINE_WORKSPACE"] = environ["PACELINE_WORKSPACE"]
    return kept


def start_timeout_s(requested_s: float | None, environ: Mapping[str, str] = os.environ) -> float:
    """Return the requested start timeout, else HOROVOD_START_TIMEOUT or the default."""
    text = environ.get("HOROVOD_START_TIMEOUT", "")
    if requested_s is not None or not text:
        return _START_TIMEOUT_S if requested_s is None else float(requested_s)
    # float() would also accept "nan", "inf" and "-5", so check the characters.
    if not text.replace(".", "", 1).isdecimal():
        raise UserError(f"HOROVOD_START_TIMEOUT={text!r} is not a number of seconds. Unset it, or set a number.")
    return float(text)


def variables(options: Namespace) -> dict[str, str]:
    """Return the ranks' environment variables for these `horovodrun` options."""
    environment = {
        name: str(value) for dest, name in _VARIABLES.items() if (value := getattr(options, dest)) is not None
    }
    environment |= {
        name: str(int(value)) for dest, name in _SWITCHES.items() if (value := getattr(options, dest)) is not None
    }
    if options.fusion_threshold_mb is not None:
        environment["HOROVOD_FUSION_THRESHOLD"] = str(int(options.fusion_threshold_mb * 1024 * 1024))
    if options.stall_check is not None:
        # Invert the value, because the option enables the stall check, but the variable disables it.
        environment["HOROVOD_STALL_CHECK_DISABLE"] = str(int(not options.stall_check))
    if options.tcp:
        environment["NCCL_IB_DISABLE"] = "1"
    return environment | of_interfaces(options.network_interfaces)


def of_interfaces(names: str | None) -> dict[str, str]:
    """Return environment variables that restrict Gloo and NCCL to network interfaces."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names) if names else {}


def without_meaning(options: Namespace) -> list[str]:
    """Return a warning for each given option that Paceline ignores."""
    values = {dest: getattr(options, dest) for dest in _WITHOUT_MEANING}
    meant = (_WITHOUT_MEANING[dest] for dest, value in values.items() if value is not None and value is not False)
    return list(dict.fromkeys(meant))


def elastic_limits(options: Any, np: int) -> ElasticLimits | None:
    """Return the limits of an elastic job, or None for other jobs."""
    requested = (options.min_np, options.max_np, options.host_discovery_script, options.slots, options.elastic_timeout)
    if all(value is None for value in (*requested, options.reset_limit, options.blacklist_cooldown_range)):
        return None
    least, most = options.min_np or np, options.max_np
    if not least <= np <= (np if most is None else most):
        numbers = f"--min-np {least}, -np {np}" + ("" if most is None else f", --max-np {most}")
        raise UserError(f"{numbers}: they have to grow in this order. -np is the number of ranks to start with.")
    cooldown = options.blacklist_cooldown_range
    if cooldown is not None and not 1 <= cooldown[0] <= cooldown[1]:
        raise UserError(
            f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]}: seconds, the smaller number first, from 1 on."
        )
    wait_s = 600.0 if options.elastic_timeout is None else float(options.elastic_timeout)
    return ElasticLimits(start=np, least=least, most=most, wait_s=wait_s, resets=options.reset_limit)


def elastic_hosts(options: Any, np: int) -> HostWatch:
    """Start to poll the hosts of an elastic job, and return the poller."""
    if options.host_discovery_script:
        ask = from_script(options.host_discovery_script, options.slots)
    else:
        fixed = host_lists.named(options.hosts, options.hostfile, options.max_np or np)

        def ask() -> list[Host]:
            return fixed

    return HostWatch(ask, options.blacklist_cooldown_range)
