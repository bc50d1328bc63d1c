"""Run the doctor's all-reduce by mpirun and mpi4py, over the nodes' agents.

As in a run, mpirun reaches the nodes through Paceline, so the nodes need no ssh access to each other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import time
from collections.abc import Mapping, Sequence

from paceline.doctor.examination import Examination, NetworkPlace, NoAnswerError, Patient, answer_in, program_of
from paceline.job.plan import Node
from paceline.remote.link.rsh_calls import RshCalls, make_remote_shell

_PROGRAM_S = 60.0
_POLL_S = 0.1


def open_mpi_of(examination: Examination) -> tuple[str, int] | None:
    """Return (path, major version) of the mpirun that all nodes have, or None."""
    mpis = [facts.get("open_mpi", {}) for facts in examination.facts.values()]
    installed = {(mpi["path"], int(mpi["version"].split(".")[0])) if "version" in mpi else None for mpi in mpis}
    return installed.pop() if len(installed) == 1 else None


def over_mpi(
    examination: Examination,
    ranks: Sequence[Patient],
    places: Mapping[str, NetworkPlace],
    mpirun: tuple[str, int],
    elements: int,
) -> dict[str, object]:
    """Time an all-reduce by `mpirun`, a (path, major version). Return {"ms", "size": ranks}, or raise NoAnswerError."""
    patients = ranks if ranks[0] is not ranks[-1] else ranks[:1]
    scratch = f"/tmp/paceline-{secrets.token_hex(4)}"
    # The program must exit normally, since MPI finalizes at the exit.
    source = program_of("reduce_on_node", "mpi", {"elements": elements}, ends_at_once=False)
    try:
        sockets = [_prepare(patient, scratch, source) for patient in patients]
        shell = make_remote_shell(patients[0].link, scratch, sockets[0], patients[0].python)
        answer = _reduced(examination, patients, places, mpirun, scratch, shell)
    except NoAnswerError as error:
        raise NoAnswerError(f"{mpirun[0]}: {error}") from error
    if answer["size"] != len(ranks):
        raise NoAnswerError(
            f"{len(ranks)} processes were started, and each world has {answer['size']}: mpi4py is not of {mpirun[0]}"
        )
    return answer


def _prepare(patient: Patient, scratch: str, source: bytes) -> str:
    # The node's agent process makes this folder, and removes it when the agent ends.
    socket: str = patient.call(lambda: patient.link.make_scratch(scratch))
    patient.call(lambda: patient.link.put_file(f"{scratch}/reduce.py", source))
    return socket


def _reduced(
    examination: Examination,
    patients: Sequence[Patient],
    places: Mapping[str, NetworkPlace],
    mpirun: tuple[str, int],
    scratch: str,
    shell: Sequence[str],
) -> dict[str, object]:
    nodes = [
        Node(node_rank=rank, name=patient.name, address=places[patient.name].address, cores=1)
        for rank, patient in enumerate(patients)
    ]
    log, first = f"{scratch}/mpirun.log", patients[0]
    # mpirun runs on the first node. `RshCalls` passes mpirun's requests to the other nodes' agents, which start the daemons.
    RshCalls([patient.link for patient in patients], nodes, {}, log)
    words = [mpirun[0], *_options([places[patient.name] for patient in patients], mpirun[1], shell)]
    words += [examination.python_of(first), f"{scratch}/reduce.py"]
    # Open MPI puts its sockets and segments into this folder. Its versions have different names for the setting.
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_prte_tmpdir_base": scratch,
        "OMPI_MCA_orte_tmpdir_base": scratch,
        "OMPI_MCA_btl_sm_backing_directory": scratch,
        "OMPI_MCA_btl_vader_backing_directory": scratch,
    }
    link = first.link
    pid = first.call(lambda: link.start(words, env=environment, cwd=scratch, log=log))
    code = _wait(first, pid)
    text = first.call(lambda: link.run(["cat", log])).stdout
    if code is None:
        lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
        raise NoAnswerError(f"not done in {_PROGRAM_S:.0f} s{f'; last said: {lines[-1][:200]}' if lines else ''}")
    return answer_in(text, _without_frames(text), code)


def _options(places: Sequence[NetworkPlace], major: int, shell: Sequence[str]) -> list[str]:
    words = ["--bind-to", "none"]
    if len(places) == 1:
        return [*words, *(["--map-by", "slot:OVERSUBSCRIBE"] if major >= 5 else ["--oversubscribe"]), "-n", "2"]
    agent, runtime = ("ssh", "--prtemca") if major >= 5 else ("rsh", "--mca")
    settings = {f"plm_{agent}_agent": shlex.join(shell), f"plm_{agent}_no_tree_spawn": "1", "plm": agent}
    # Name whole networks, because Open MPI 5.0 crashes (SIGSEGV) on a /32.
    networks = ",".join(sorted({place.network for place in places}))
    settings["oob_tcp_if_include"] = networks
    words += ["--mca", "btl_tcp_if_include", networks]
    for name, value in settings.items():
        words += [runtime, name, value]
    return [*words, "--host", ",".join(f"{place.address}:1" for place in places), "-n", str(len(places))]


def _wait(patient: Patient, pid: int) -> int | None:
    deadline = time.monotonic() + _PROGRAM_S
    while time.monotonic() < deadline:
        # The node's agent process reports each ended command once. No other command runs, so this loop loses no report.
        for ended in patient.link.ends():
            if ended.pid == pid:
                return ended.code
        if patient.link.lost:
            raise NoAnswerError(patient.link.lost)
        time.sleep(_POLL_S)
    with contextlib.suppress(NoAnswerError):
        patient.call(lambda: patient.link.signal(pid, signal.SIGKILL))
    return None


def _without_frames(text: bytes) -> bytes:
    lines = [line for line in text.splitlines() if line.strip(b"-= ") and b"mpirun noticed" not in line]
    return os.linesep.encode().join(lines[:40])
