"""The network that the nodes share: the address and the interface of each by which the others reach it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

#: Bridges of containers and virtual machines: every host has the same address on them, and none reaches another.
_OF_NO_USE = ("docker", "podman", "cni", "virbr", "veth", "br-", "lxc", "lxdbr", "tailscale-")

#: interface -> (IPv4 address, prefix length)
Interfaces = Mapping[str, tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class NetworkPlace:
    """The address at which others reach a node. network: as "10.0.0.0/24"."""

    interface: str
    address: str
    network: str


def common_network(nodes: Mapping[str, Interfaces], wanted: str | None = None) -> dict[str, NetworkPlace] | None:
    """A place for each node in one network that all of them are in; None where there is none.

    wanted: only this interface counts. Of several networks the largest one wins, then the first. A single node is
    reached by its loopback.
    """
    places = {name: _places(interfaces, wanted, len(nodes) == 1) for name, interfaces in nodes.items()}
    networks = [{place.network for place in found} for found in places.values()]
    # Compared by the network itself: interfaces have other names on other nodes.
    common = set.intersection(*networks) if networks else set()
    # The same address on two nodes: a bridge of each node's own.
    common = {network for network in common if len(_addresses(places, network)) == len(nodes)}
    if not common:
        return None
    # The shortest prefix is the largest network; ties are broken by text, so that every examination chooses alike.
    best = min(common, key=lambda network: (ipaddress.ip_network(network).prefixlen, network))
    return {name: next(place for place in found if place.network == best) for name, found in places.items()}


def same_machine(nodes: Mapping[str, Interfaces]) -> list[str]:
    """The first two or more nodes that can't be told apart by their addresses; none of a node of its own."""
    alike: dict[frozenset[str], list[str]] = {}
    for name, interfaces in nodes.items():
        alike.setdefault(addresses_of(interfaces), []).append(name)
    return next((names for addresses, names in alike.items() if addresses and len(names) > 1), [])


def addresses_of(interfaces: Interfaces) -> frozenset[str]:
    """The addresses by which others may reach a node, those of networks of its own too."""
    return frozenset(
        address
        for name, (address, _) in interfaces.items()
        if not name.startswith(_OF_NO_USE) and not ipaddress.ip_address(address).is_loopback
    )


def _places(interfaces: Interfaces, wanted: str | None, alone: bool) -> list[NetworkPlace]:
    places = []
    for name, (address, prefix) in interfaces.items():
        is_loopback = ipaddress.ip_address(address).is_loopback
        if (name != wanted) if wanted else (name.startswith(_OF_NO_USE) or is_loopback != alone):
            continue
        places.append(NetworkPlace(interface=name, address=address, network=_network(address, prefix)))
    return places


def _network(address: str, prefix: int) -> str:
    return str(ipaddress.ip_network(f"{address}/{prefix}", strict=False))


def _addresses(places: Mapping[str, list[NetworkPlace]], network: str) -> set[str]:
    return {place.address for found in places.values() for place in found if place.network == network}
