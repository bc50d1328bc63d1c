"""Choose the addresses by which the nodes of a run reach each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import TargetError

#: Name prefixes of interfaces to a network inside one machine, such as Docker's. Two machines may have equal addresses in it.
_OWN_PREFIXES = (
    *("lo", "docker", "podman", "cni", "virbr", "br-", "veth", "lxc"),
    *("lxd", "flannel", "cali", "tun", "kube"),
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The known network interfaces of a machine.

    Attributes:
        interfaces: Interface name -> (IPv4 address, prefix length), such as {"eth0": ("10.0.0.5", 24)}.
        arrived_at: The machine's own address, to which ssh or Slurm connects; "" if unknown.
    """

    name: str
    interfaces: Mapping[str, tuple[str, int]]
    arrived_at: str = ""


def choose(machines: Sequence[Machine], interface: str | None = None) -> list[tuple[str, str | None]]:
    """Return the (address, interface) at which the other machines reach each machine.

    With `interface`, return each machine's address on that interface. Otherwise return the addresses to which ssh or Slurm
    connects, if all are in one network. If not, return addresses in the first network that all machines share. Without such
    a network, return the address of an interface of the machine, preferably the address that ssh or Slurm uses. A machine
    without a usable interface gets the address or name that ssh or Slurm uses, and None as the interface.

    Raises:
        TargetError: A machine lacks `interface`; the message lists its interfaces.
    """
    if interface is not None:
        return [_named(machine, interface) for machine in machines]
    arrived = [_arrival(machine) for machine in machines]
    # `_arrival` returns only addresses of the machine's interfaces, so this lookup by interface never fails.
    networks = {
        _network(*machine.interfaces[found[1] or ""]) for machine, found in zip(machines, arrived, strict=True) if found
    }
    # ssh or Slurm has reached all machines at addresses of one network, so use these addresses.
    if len(networks) == 1 and None not in arrived:
        return [found for found in arrived if found is not None]
    shared = _shared(machines)
    if shared is not None:
        return shared
    return [
        found or _outward(machine) or (machine.arrived_at or machine.name, None)
        for machine, found in zip(machines, arrived, strict=True)
    ]


def _named(machine: Machine, interface: str) -> tuple[str, str | None]:
    if interface not in machine.interfaces:
        raise TargetError(
            f"{machine.name!r} has no network interface {interface!r} with an IPv4 address; it has "
            f"{', '.join(sorted(machine.interfaces)) or 'none'}. Set `interface` to one that all nodes have."
        )
    return machine.interfaces[interface][0], interface


def _arrival(machine: Machine) -> tuple[str, str | None] | None:
    """Return (address, interface) at which ssh or Slurm reaches a machine, or None."""
    # Skip a loopback address: it is the end of a tunnel, and other machines can't reach it.
    found = ((address, name) for name, (address, _) in machine.interfaces.items() if address == machine.arrived_at)
    return next((one for one in found if not ipaddress.ip_address(one[0]).is_loopback), None)


def _shared(machines: Sequence[Machine]) -> list[tuple[str, str | None]] | None:
    """Return (address, interface) of each machine in their first common network, or None."""
    if len(machines) < 2:
        return None
    for name, (address, prefix) in machines[0].interfaces.items():
        if _is_own(name, address):
            continue
        network, found = _network(address, prefix), []
        for machine in machines:
            inside = [
                (other, its_name)
                for its_name, (other, its_prefix) in machine.interfaces.items()
                if not _is_own(its_name, other) and _network(other, its_prefix) == network
            ]
            # Add only the machine's first address in this network, because a machine may have several.
            found += inside[:1]
        # Skip a network in which two machines have equal addresses: it is a network inside each machine.
        if len({other for other, _ in found}) == len(machines):
            return [(other, its_name) for other, its_name in found]
    return None


def _outward(machine: Machine) -> tuple[str, str] | None:
    found = ((address, name) for name, (address, _) in machine.interfaces.items() if not _is_own(name, address))
    return next(found, None)


def _is_own(name: str, address: str) -> bool:
    found = ipaddress.ip_address(address)
    return name.startswith(_OWN_PREFIXES) or found.is_loopback or found.is_link_local


def _network(address: str, prefix: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(f"{address}/{prefix}", strict=False)
