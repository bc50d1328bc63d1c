"""Options of `horovodrun` as the variables that the engine reads, and a word on those that mean nothing here."""

from __future__ import annotations

from argparse import Namespace

#: option's name in the namespace -> variable; True: a switch.
_VARIABLES = {
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "timeline_filename": "HOROVOD_TIMELINE",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "log_level": "HOROVOD_LOG_LEVEL",
}
_SWITCHES = {
    "timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "log_hide_timestamp": "HOROVOD_LOG_HIDE_TIME",
}
_AUTOTUNE = (
    "--autotune: nothing is tuned. --fusion-threshold-mb and --cycle-time-ms set what autotuning would choose; their "
    "defaults fit the machine"
)
#: Options that are accepted and do nothing, with the reason.
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


def variables(options: Namespace) -> dict[str, str]:
    """The environment variables that these options make; those that were not given make none."""
    found = {name: str(value) for dest, name in _VARIABLES.items() if (value := getattr(options, dest)) is not None}
    found |= {
        name: str(int(value)) for dest, name in _SWITCHES.items() if (value := getattr(options, dest)) is not None
    }
    if options.fusion_threshold_mb is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = str(int(options.fusion_threshold_mb * 1024 * 1024))
    if options.stall_check is not None:
        # The variable says the opposite of the option.
        found["HOROVOD_STALL_CHECK_DISABLE"] = str(int(not options.stall_check))
    if options.tcp:
        # Without this NCCL would still take InfiniBand where there is some.
        found["NCCL_IB_DISABLE"] = "1"
    return found | of_interfaces(options.network_interfaces)


def of_interfaces(names: str | None) -> dict[str, str]:
    """The variables that hold Gloo and NCCL to these interfaces ("eth0,eth1"); none for None."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names) if names else {}


def without_meaning(options: Namespace) -> list[str]:
    """A line for each option that was given and changes nothing here; one line for all of autotuning's."""
    given = {dest: getattr(options, dest) for dest in _WITHOUT_MEANING}
    # A number of 0 is given, a switch that is turned off changes nothing anyway.
    meant = (_WITHOUT_MEANING[dest] for dest, value in given.items() if value is not None and value is not False)
    return list(dict.fromkeys(meant))
