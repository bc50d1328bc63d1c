"""Check the connections between nodes: a common network, and ports in this network."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress

from paceline.doctor.examination import (
    FAIL,
    OK,
    Examination,
    Finding,
    NoAnswerError,
    Patient,
    addresses_of,
    common_network,
    same_machine,
    skipped,
)
from paceline.doctor.on_node import Asked
from paceline.system.names import counted

#: Up to this number of nodes, each connects to all others. Beyond it, each connects to two other nodes only (`_peers`).
_ALL_PAIRS = 16
#: Time limit in seconds for all listeners to start and all connections to be made.
_CONNECT_S = 15.0
_LISTEN_S = _CONNECT_S + 15.0


def check_network(examination: Examination) -> Iterator[Finding]:
    """Find the network over which the nodes can reach each other."""
    interfaces = {patient.name: patient.link.hello.interfaces for patient in examination.well}
    examination.places = places = common_network(interfaces, examination.interface)
    if places:
        shown = [f"{name} {place.address} ({place.interface})" for name, place in places.items()]
        more = f" and {counted(len(shown) - 4, 'more node')}" if len(shown) > 4 else ""
        yield Finding(check="network", level=OK, seen=f"{', '.join(shown[:4])}{more}")
        return
    if same := same_machine(interfaces):
        yield Finding(
            check="network",
            level=FAIL,
            seen=f"{' and '.join(same)} have the same addresses ({', '.join(sorted(addresses_of(interfaces[same[0]])))})",
            advice="They look like one machine under several names: name each machine once, with all of its slots.",
        )
        return
    shown = [
        f"{name}: " + (", ".join(f"{key} {address}/{prefix}" for key, (address, prefix) in addresses.items()) or "none")
        for name, addresses in interfaces.items()
    ]
    wanted = f" with an interface {examination.interface!r}" if examination.interface else ""
    yield Finding(
        check="network",
        level=FAIL,
        seen=f"no network is common to all nodes{wanted} ({'; '.join(shown[:4])})",
        advice="Name an interface that all nodes have and that leads from one to the other, or take nodes of one network.",
    )


def check_ports(examination: Examination) -> Iterator[Finding]:
    """Check that each node can listen on a port, and accepts connections there."""
    places, patients = examination.places, examination.well
    if places is None:
        yield skipped("ports", "no common network to try")
        return
    patients = [patient for patient in patients if patient.name in places]
    ports, failed = examination.ask_all("ports", free_port, 20.0)
    yield from failed
    patients = [patient for patient in patients if patient.name in ports]
    peers = _peers([patient.name for patient in patients])
    token = secrets.token_hex(8)
    for patient in patients:
        # The listener of this node ends after this number of connections, one from each node that has it as a peer.
        count = sum(patient.name in others for others in peers.values())
        request = {"port": ports[patient.name], "address": places[patient.name].address, "token": token, "count": count}
        # Listen in threads while other nodes connect. Daemon threads end with the program.
        threading.Thread(target=_listen, args=(patient, {**request, "timeout_s": _LISTEN_S}), daemon=True).start()

    def question(patient: Patient) -> Asked:
        mine = [(name, places[name].address, ports[name]) for name in peers[patient.name]]
        request = {"peers": mine, "token": token, "timeout_s": _CONNECT_S}
        return patient.ask("on_node", "connect", request, timeout_s=_CONNECT_S + 15.0)

    found, failed = examination.ask_all("ports", question, _CONNECT_S + 15.0)
    yield from failed
    times = []
    for name, answers in found.items():
        for peer, answer in answers.items():
            if "ms" in answer:
                times.append(answer["ms"])
                continue
            yield Finding(
                check="ports",
                node=name,
                level=FAIL,
                seen=f"can't connect to {peer} ({places[peer].address}, port {ports[peer]}): {answer['error']}",
                advice="Let the nodes of this network reach each other on all ports from 1024 (a firewall?), or name another "
                "interface.",
            )
    if times:
        yield Finding(
            check="ports",
            level=OK,
            seen=f"{counted(len(times), 'connection')} between {counted(len(found), 'node')}, "
            f"the slowest in {max(times):.1f} ms",
        )


def free_port(patient: Patient) -> int:
    return patient.call(lambda: patient.link.free_ports(1)[0])


def _listen(patient: Patient, asked: Asked) -> None:
    # Ignore failures of the listener, because the nodes that can't connect to it report the problem.
    with suppress(NoAnswerError):
        patient.ask("on_node", "listen", asked, timeout_s=_LISTEN_S + 5.0)


def _peers(names: list[str]) -> dict[str, list[str]]:
    if len(names) == 1:
        return {names[0]: names}
    if len(names) <= _ALL_PAIRS:
        return {name: [other for other in names if other != name] for name in names}
    count = len(names)
    # Connect to the next node in the list, to find nodes that are cut off, and half the list further, to find a split network.
    steps = (1, count // 2)
    return {name: [names[(index + step) % count] for step in steps] for index, name in enumerate(names)}
