"""A small all-reduce over all nodes, by torch's Gloo: what a run will do, before it waits for a queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.doctor.asking import NoAnswerError, Patient
from paceline.doctor.connections import free_port
from paceline.doctor.environment import has_module
from paceline.doctor.examination import Examination, skipped
from paceline.doctor.finding import FAIL, OK, Finding, counted
from paceline.doctor.network import NetworkPlace
from paceline.targets.timeouts import all_within

#: Of float32: 4 MiB.
ELEMENTS = 1 << 20
#: Within the program, and around it with the import of torch.
_LIMIT_S = 30.0
_PROGRAM_S = 90.0

ADVICE = (
    "The connections above work, so look at the interface that is named here, and at what the message says; "
    "GLOO_SOCKET_IFNAME names another."
)


def check_gloo(examination: Examination) -> Iterator[Finding]:
    """An all-reduce of 4 MiB among the nodes, one process each; skipped where not all have torch."""
    places, patients = examination.places, examination.well
    if not has_module(examination, "torch"):
        yield skipped("gloo all-reduce", "torch is not on all nodes")
        return
    if places is None or not patients or patients[0].name not in places:
        yield skipped("gloo all-reduce", "no common network to try")
        return
    # One node is tried with two processes.
    ranks = patients if len(patients) > 1 else patients * 2
    try:
        port = free_port(ranks[0])
    except NoAnswerError as error:
        yield Finding(check="gloo all-reduce", node=ranks[0].name, level=FAIL, seen=str(error))
        return
    address = places[ranks[0].name].address

    def answer(rank: int) -> dict[str, Any]:
        asked = {
            "rank": rank,
            "size": len(ranks),
            "address": address,
            "port": port,
            "interface": places[ranks[rank].name].interface,
            "elements": ELEMENTS,
            "timeout_s": _LIMIT_S,
        }
        python = examination.python_of(ranks[rank])
        return ranks[rank].ask("reduce_on_node", "gloo", asked, python=python, timeout_s=_PROGRAM_S)

    answers = all_within({rank: partial(answer, rank) for rank in range(len(ranks))}, _PROGRAM_S + 5.0)
    failed = {rank: found for rank, found in answers.items() if isinstance(found, Exception)}
    for rank, why in failed.items():
        place = places[ranks[rank].name]
        yield Finding(
            check="gloo all-reduce",
            node=ranks[rank].name,
            level=FAIL,
            seen=f"over {place.interface or place.address}: {why}",
            advice=ADVICE,
        )
    if not failed:
        slowest = max(found["ms"] for found in answers.values() if isinstance(found, dict))
        yield Finding(check="gloo all-reduce", level=OK, seen=reduced_text(ranks, places, slowest))


def reduced_text(ranks: Sequence[Patient], places: Mapping[str, NetworkPlace], ms: float) -> str:
    """ "4 MiB among 2 nodes over eth0: 12.5 ms"."""
    count = len({patient.name for patient in ranks})
    who = counted(count, "node") if count > 1 else "2 processes of one node"
    interfaces = {places[patient.name].interface or places[patient.name].address for patient in ranks}
    return f"4 MiB among {who} over {', '.join(sorted(interfaces)[:3])}: {ms:.1f} ms"
