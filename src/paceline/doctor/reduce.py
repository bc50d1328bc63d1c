"""Check a small all-reduce over all nodes, by Gloo in torch and by MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from paceline.doctor.connections import free_port
from paceline.doctor.environment import has_module
from paceline.doctor.examination import FAIL, OK, Examination, Finding, NetworkPlace, NoAnswerError, Patient, skipped
from paceline.doctor.on_node import Answer
from paceline.doctor.reduce_mpi import open_mpi_of, over_mpi
from paceline.system.names import counted
from paceline.targets.polling import all_within

#: Number of float32 elements to reduce. They have a size of 4 MiB.
_ELEMENTS = 1 << 20
#: Time limits in seconds: _LIMIT_S for the all-reduce; _PROGRAM_S for the program, which may have to import torch.
_LIMIT_S = 30.0
_PROGRAM_S = 90.0

_GLOO_ADVICE = (
    "The connections above work, so look at the interface that is named here, and at what the message says; "
    "GLOO_SOCKET_IFNAME names another."
)
_MPI_ADVICE = (
    "Try mpirun by hand on the first node. A library of another MPI on LD_LIBRARY_PATH, or an mpi4py that is built for "
    "another MPI, are what it most often is."
)

#: Rank -> the rank's response, or the error in its place.
Answers = Mapping[int, Answer | Exception]


def check_gloo(examination: Examination) -> Iterator[Finding]:
    """Check that the nodes can reduce 4 MiB by Gloo, if all have torch."""
    lacks = "" if has_module(examination, "torch") else "torch is not on all nodes"
    yield from _check(examination, "gloo all-reduce", lacks, _over_gloo, _GLOO_ADVICE)


def check_mpi(examination: Examination) -> Iterator[Finding]:
    """Check that the nodes can reduce 4 MiB by MPI, if all have mpi4py."""
    mpirun = open_mpi_of(examination)
    has_all = mpirun is not None and has_module(examination, "mpi4py")
    lacks = "" if has_all else "mpi4py and the same Open MPI are not on all nodes"

    def reduce(examination: Examination, ranks: Sequence[Patient], places: Mapping[str, NetworkPlace]) -> Answers:
        assert mpirun is not None
        return {0: over_mpi(examination, ranks, places, mpirun, _ELEMENTS)}

    yield from _check(examination, "mpi all-reduce", lacks, reduce, _MPI_ADVICE)


def _check(
    examination: Examination,
    check: str,
    lacks: str,
    reduce: Callable[[Examination, Sequence[Patient], Mapping[str, NetworkPlace]], Answers],
    advice: str,
) -> Iterator[Finding]:
    places, patients = examination.places, examination.well
    if lacks:
        yield skipped(check, lacks)
        return
    if places is None or not all(patient.name in places for patient in patients):
        yield skipped(check, "no common network to try")
        return
    # A single node runs two ranks, because one rank would send nothing.
    ranks = patients if len(patients) > 1 else patients * 2
    try:
        answers = reduce(examination, ranks, places)
    except NoAnswerError as error:
        answers = {0: error}
    failed = {rank: answer for rank, answer in answers.items() if isinstance(answer, Exception)}
    for rank, why in failed.items():
        seen = f"over {places[ranks[rank].name].interface}: {why}"
        yield Finding(check=check, node=ranks[rank].name, level=FAIL, seen=seen, advice=advice)
    if not failed:
        slowest = max(answer["ms"] for answer in answers.values() if isinstance(answer, dict))
        who = counted(len(patients), "node") if len(patients) > 1 else "2 processes of one node"
        interfaces = sorted({place.interface for place in places.values()})
        seen = f"4 MiB among {who} over {', '.join(interfaces[:3])}: {slowest:.1f} ms"
        yield Finding(check=check, level=OK, seen=seen)


def _over_gloo(examination: Examination, ranks: Sequence[Patient], places: Mapping[str, NetworkPlace]) -> Answers:
    address, port = places[ranks[0].name].address, free_port(ranks[0])

    def answer(rank: int) -> Answer:
        request = {
            "rank": rank,
            "size": len(ranks),
            "address": address,
            "port": port,
            "interface": places[ranks[rank].name].interface,
            "elements": _ELEMENTS,
            "timeout_s": _LIMIT_S,
        }
        python = examination.python_of(ranks[rank])
        return ranks[rank].ask("reduce_on_node", "gloo", request, python=python, timeout_s=_PROGRAM_S)

    # Send all requests at the same time, because the ranks wait for each other in the all-reduce.
    return all_within({rank: partial(answer, rank) for rank in range(len(ranks))}, _PROGRAM_S + 5.0)
