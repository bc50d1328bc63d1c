"""The elastic job that is asked for: how many ranks it may have, and on which hosts."""

from __future__ import annotations

from typing import Any

from paceline.compat.horovod.runner import hosts as host_lists
from paceline.compat.horovod.runner.discovery import HostWatch, from_script
from paceline.compat.horovod.runner.elastic_driver import ElasticLimits
from paceline.compat.horovod.runner.hosts import Host
from paceline.errors import UserError


def elastic_limits(options: Any, np: int) -> ElasticLimits | None:
    """What the options say of an elastic job; None where they ask for none.

    Raises:
        UserError: numbers that contradict each other.
    """
    given = (options.min_np, options.max_np, options.host_discovery_script, options.slots, options.elastic_timeout)
    if all(value is None for value in (*given, options.reset_limit, options.blacklist_cooldown_range)):
        return None
    least, most = options.min_np or np, options.max_np
    if not least <= np <= (np if most is None else most):
        told = f"--min-np {least}, -np {np}" + ("" if most is None else f", --max-np {most}")
        raise UserError(f"{told}: they have to grow in this order. -np is the number of ranks to start with.")
    cooldown = options.blacklist_cooldown_range
    if cooldown is not None and not 1 <= cooldown[0] <= cooldown[1]:
        raise UserError(
            f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]}: seconds, the smaller number first, from 1 on."
        )
    wait_s = 600.0 if options.elastic_timeout is None else float(options.elastic_timeout)
    return ElasticLimits(start=np, least=least, most=most, wait_s=wait_s, resets=options.reset_limit)


def elastic_hosts(options: Any, np: int) -> HostWatch:
    """The hosts of an elastic job, which are asked for from now on. Without any, all ranks are on this machine.

    Raises:
        UserError: the hosts can't be read, or the script does not work.
    """
    if options.host_discovery_script:
        ask = from_script(options.host_discovery_script, options.slots)
    else:
        fixed = host_lists.named(options.hosts, options.hostfile, options.max_np or np)

        def ask() -> list[Host]:
            return fixed

    return HostWatch(ask, options.blacklist_cooldown_range)
