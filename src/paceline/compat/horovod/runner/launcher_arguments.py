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
#: Options of `horovodrun` that say the opposite of an attribute.
_OPPOSITES = {"no_stall_check": "stall_check", "log_with_timestamp": "log_hide_timestamp"}
#: What has no option of the same meaning; `options` looks at `nics` and `nic`.
_OWN = ("run_func", "executable", "nics", "nic")


class _HorovodArgs:
    """Every attribute is None until it is set, num_proc is 1. They are the options of `horovodrun`; see docs/horovodrun.md.

    command: a list of words. run_func: a function without arguments, in place of a command; executable: its interpreter.
    nics: names of network interfaces, a list or `eth0,eth1`.
    """

    def __init__(self) -> None:
        from paceline.compat.horovod.runner.options import parse

        for name in (*_attributes(parse([])), *_OPPOSITES, *_OWN):
            setattr(self, name, None)
        self.num_proc = 1


def options(args: Any, defaults: Namespace) -> Namespace:
    """The options of `horovodrun` for such a job. defaults: those of an empty command line."""
    found = Namespace(**vars(defaults))
    for name, option in _attributes(defaults).items():
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


def _attributes(defaults: Namespace) -> dict[str, str]:
    """Attribute -> option of `horovodrun`, which has the same name unless `_RENAMED` says another."""
    of_others = (*_RENAMED.values(), *_OPPOSITES.values(), "network_interfaces", "version")
    return _RENAMED | {name: name for name in vars(defaults) if name not in of_others}
