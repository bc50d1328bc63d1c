"""By which address the nodes of a run reach each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import TargetError

#: Networks that every machine may have for itself, with the same numbers.
_OWN_PREFIXES = (
    "lo",
    "docker",
    "podman",
    "cni",
    "virbr",
    "br-",
    "veth",
    "lxc",
    "lxd",
    "flannel",
    "cali",
    "tun",
    "kube",
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of one. interfaces: name -> (IPv4 address, length of the network's prefix).

    arrived_at: the address at which the engine reaches it, as the machine itself sees it: ssh's connection, or what a
        node's name in Slurm stands for; empty where that is not known.
    """

    name: str
    interfaces: Mapping[str, tuple[str, int]]
    arrived_at: str = ""


def choose(machines: Sequence[Machine], interface: str | None = None) -> list[tuple[str, str | None]]:
    """(address, interface) of each machine: what all others of them reach it by.

    interface: the one to use, on each machine. Otherwise that at which the engine reaches it, where it is in one network
    with the others' or there is no network that all are in; otherwise the first network that all are in. The interface of
    an address that the machine does not know is None.

    Raises:
        TargetError: a machine has no such interface; those that it has are named.
    """
    if interface is not None:
        return [_named(machine, interface) for machine in machines]
    arrived = [_arrival(machine) for machine in machines]
    # An address of `arrived` is one of the machine's own, so its interface is known.
    networks = {
        _network(*machine.interfaces[found[1] or ""]) for machine, found in zip(machines, arrived, strict=True) if found
    }
    # One network holds them all: nothing speaks for another than the one that the engine uses.
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
    """The address at which the engine reaches it, and its interface; None where that is no other machine's to use."""
    # A loopback address is where a tunnel on the machine itself ends; no other machine reaches it.
    for name, (address, _) in machine.interfaces.items():
        if address == machine.arrived_at and not ipaddress.ip_address(address).is_loopback:
            return address, name
    return None


def _shared(machines: Sequence[Machine]) -> list[tuple[str, str | None]] | None:
    """An address for each in the first network that all are in, with different addresses."""
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
            # A machine may have several addresses in the network, of which the first will do.
            found += inside[:1]
        # Equal addresses are those of networks that every machine has for itself, such as one of virtual machines.
        if len({other for other, _ in found}) == len(machines):
            return [(other, its_name) for other, its_name in found]
    return None


def _outward(machine: Machine) -> tuple[str, str] | None:
    for name, (address, _) in machine.interfaces.items():
        if not _is_own(name, address):
            return address, name
    return None


def _is_own(name: str, address: str) -> bool:
    found = ipaddress.ip_address(address)
    return name.startswith(_OWN_PREFIXES) or found.is_loopback or found.is_link_local


def _network(address: str, prefix: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(f"{address}/{prefix}", strict=False)
