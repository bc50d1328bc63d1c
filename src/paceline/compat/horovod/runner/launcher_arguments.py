"""A job as launchers built on Horovod describe it: `_HorovodArgs`, which `launch._run` takes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

#: Attribute -> option of `horovodrun`, where the names differ.
_RENAMED = {
    "num_proc": "np",
    "min_num_proc": "min_np",
    "max_num_proc": "max_np",
    "cooldown_range": "blacklist_cooldown_range",
    "tcp_flag": "tcp",
    "prefix_output_with_timestamp": "prefix_timestamp",
    "use_gloo": "gloo",
    "use_mpi": "mpi",
    "use_jsrun": "jsrun",
}
_ALIKE = (
    "ssh_port",
    "ssh_identity_file",
    "start_timeout",
    "output_filename",
    "verbose",
    "hosts",
    "hostfile",
    "host_discovery_script",
    "mpi_args",
    "binding_args",
    "fusion_threshold_mb",
    "cycle_time_ms",
    "cache_capacity",
    "hierarchical_allreduce",
    "hierarchical_allgather",
    "torus_allreduce",
    "autotune",
    "autotune_log_file",
    "autotune_warmup_samples",
    "autotune_steps_per_sample",
    "autotune_bayes_opt_max_samples",
    "autotune_gaussian_process_noise",
    "slots",
    "elastic_timeout",
    "reset_limit",
    "timeline_filename",
    "timeline_mark_cycles",
    "stall_check_warning_time_seconds",
    "stall_check_shutdown_time_seconds",
    "mpi_threads_disable",
    "num_nccl_streams",
    "thread_affinity",
    "gloo_timeout_seconds",
    "log_level",
)
#: Options of `horovodrun` that say the opposite of an attribute.
_OPPOSITES = {"no_stall_check": "stall_check", "log_with_timestamp": "log_hide_timestamp"}
#: What has no option of the same meaning; `options` looks at these.
_OWN = ("command", "run_func", "executable", "nics", "nic", "disable_cache", "check_build", "config_file")


class _HorovodArgs:
    """Every attribute is None until it is set, num_proc is 1. They are the options of `horovodrun`; see docs/horovodrun.md.

    command: a list of words. run_func: a function without arguments, in place of a command; executable: its interpreter.
    nics: names of network interfaces, a list or `eth0,eth1`.
    """

    def __init__(self) -> None:
        for name in (*_RENAMED, *_ALIKE, *_OPPOSITES, *_OWN):
            setattr(self, name, None)
        self.num_proc = 1


def options(args: Any, defaults: Namespace) -> Namespace:
    """The options of `horovodrun` for such a job. defaults: those of an empty command line."""
    found = Namespace(**vars(defaults))
    for name, option in (*_RENAMED.items(), *((name, name) for name in _ALIKE)):
        # Launchers also hand over objects of their own, which have only some of these attributes.
        value = getattr(args, name, None)
        if value is not None and value != (None,):  # as Horovod's own class begins with
            setattr(found, option, value)
    for name, option in _OPPOSITES.items():
        if (value := getattr(args, name, None)) is not None:
            setattr(found, option, not value)
    nics = getattr(args, "nics", None) or getattr(args, "nic", None)
    if nics:
        found.network_interfaces = nics if isinstance(nics, str) else ",".join(nics)
    command = getattr(args, "command", None) or []
    found.command = command.split() if isinstance(command, str) else list(command)
    return found
