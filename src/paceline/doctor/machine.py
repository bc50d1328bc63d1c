"""Check the equipment of each node: Python, disk space, limits of the user, GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import cast

from paceline.doctor.examination import (
    FACTS_S,
    FAIL,
    OK,
    SKIPPED,
    WARN,
    Examination,
    Facts,
    Finding,
    Patient,
    StackFacts,
    size_text,
)
from paceline.remote.agent.boot import OLDEST
from paceline.system.names import counted

MODULES = ("torch", "mpi4py")
#: Free bytes in a folder: the check fails below the first number, and warns below the second one. The numbers are estimates.
_FOLDER_BYTES = (200_000_000, 5_000_000_000)
_TMP_BYTES = (50_000_000, 1_000_000_000)
#: Bytes of /dev/shm: fail below the first number, warn below the second. The 64 MB of containers are too small for NCCL.
_SHM_BYTES = (16_000_000, 512_000_000)
#: Limit of open files: fail below the first number, warn below the second. Each rank has a socket to each other rank.
_NOFILE = (256, 4096)


def learn_facts(examination: Examination) -> Iterator[Finding]:
    """Store facts about each node: its Python, disk space and modules."""

    def question(patient: Patient) -> Facts:
        request = {
            "python": examination.python_of(patient),
            "space": [examination.folder, "/tmp", "/dev/shm"],
            "modules": MODULES,
            "library_dir": patient.link.hello.library,
            # Use a shorter timeout than the request's, so that the node reports a slow import instead of not answering.
            "timeout_s": FACTS_S - 20.0,
        }
        return cast(Facts, patient.ask("on_node", "facts", request, timeout_s=FACTS_S))

    examination.facts, failed = examination.ask_all("node", question, FACTS_S)
    yield from failed


def check_python(examination: Examination) -> Iterator[Finding]:
    """Check that each node has a new enough interpreter for scripts."""
    versions = {}
    for name, facts in examination.facts.items():
        python = facts["python"]
        path, version, error = python.get("path"), python.get("version"), python.get("error")
        if error:
            yield Finding(
                check="python",
                node=name,
                level=FAIL,
                seen=error,
                advice="Install it there, or name another interpreter by --python; "
                f"the agent's own is Python {facts['agent_python']}.",
            )
            continue
        major, minor = str(version).split(".")[:2]
        versions[name] = f"{major}.{minor}"
        is_old = (int(major), int(minor)) < OLDEST
        yield Finding(
            check="python",
            node=name,
            level=FAIL if is_old else OK,
            seen=f"{path} is Python {version}",
            advice="Workers need Python 3.10 or later: name another interpreter by --python." if is_old else "",
        )
    yield from _differing("python", versions, "Python", "Give all nodes the same: checkpoints are pickles.")


def check_space(examination: Examination) -> Iterator[Finding]:
    """Check the free space in the folder for runs, /tmp and shared memory."""
    wanted = {examination.folder: _FOLDER_BYTES, "/tmp": _TMP_BYTES, "/dev/shm": _SHM_BYTES}
    for name, facts in examination.facts.items():
        for path, (fails, warns) in wanted.items():
            space = facts["space"][path]
            if "error" in space:
                yield Finding(
                    check="space",
                    node=name,
                    level=FAIL,
                    seen=space["error"],
                    advice=f"Let {path} be written by this user, or set another folder on the target.",
                )
                continue
            # For shared memory use its total size, because its present use is temporary.
            free = space["total"] if path == "/dev/shm" and space["free"] >= fails else space["free"]
            level = FAIL if free < fails else WARN if free < warns else OK
            yield Finding(
                check="space",
                node=name,
                level=level,
                seen=f"{path} has {size_text(space['free'])} free of {size_text(space['total'])}",
                advice="" if level == OK else _space_advice(path),
            )


def check_limits(examination: Examination) -> Iterator[Finding]:
    """Check the user's limits: open files, and locked memory for InfiniBand."""
    # Check locked memory only with InfiniBand: RDMA locks memory, and Ethernet does not.
    with_fabric = {
        patient.name
        for patient in examination.patients
        if any(interface.startswith("ib") for interface in patient.link.hello.interfaces)
    }
    for name, facts in examination.facts.items():
        files, locked = facts["limits"]["nofile"], facts["limits"]["memlock"]
        has_few = files is not None and files < _NOFILE[1]
        wants_locked = locked is not None and name in with_fabric
        level = FAIL if files is not None and files < _NOFILE[0] else WARN if has_few else OK
        if wants_locked and level == OK:
            level = WARN
        advice = []
        if has_few:
            advice.append(f"Raise nofile to {_NOFILE[1]} or more in /etc/security/limits.conf or the service's unit.")
        if wants_locked:
            advice.append("InfiniBand needs memlock unlimited, set in the same places.")
        yield Finding(
            check="limits",
            node=name,
            level=level,
            seen=f"open files: {'no limit' if files is None else files}, "
            f"locked memory: {'no limit' if locked is None else size_text(locked)}",
            advice=" ".join(advice),
        )


def check_stacks(examination: Examination) -> Iterator[Finding]:
    """Check whether `paceline stacks` can use py-spy on each node."""
    for name, facts in examination.facts.items():
        seen, advice = _stacks(facts["stacks"])
        yield Finding(check="stacks", node=name, level=OK, seen=seen, advice=advice)


def _stacks(found: StackFacts) -> tuple[str, str]:
    scope, refused = found["ptrace_scope"], found["refused"]
    is_ruled = scope not in ("", "0") and not found["may_trace"]
    if found["py_spy"] and not refused:
        return "by signal, and by py-spy", ""
    if is_ruled:
        return (
            f"by signal alone: kernel.yama.ptrace_scope is {scope}, so py-spy may not look into processes",
            "sysctl kernel.yama.ptrace_scope=0, or setcap cap_sys_ptrace+ep on py-spy's program.",
        )
    if not found["py_spy"]:
        return "by signal; py-spy is not installed", "pip install py-spy"
    if "permission" in refused.lower() or "permitted" in refused.lower():
        return (
            f"by signal alone: py-spy may not look into processes ({refused})",
            "In a container, start it with --cap-add SYS_PTRACE; else setcap cap_sys_ptrace+ep on py-spy's program.",
        )
    return f"by signal alone: py-spy fails ({refused})", "pip install --upgrade py-spy"


def check_gpus(examination: Examination) -> Iterator[Finding]:
    """Check that all nodes have the same number and models of GPUs."""
    summaries = {}
    for name, facts in examination.facts.items():
        gpus = facts["gpus"]
        if "error" in gpus:
            yield Finding(
                check="gpus",
                node=name,
                level=FAIL,
                seen=f"nvidia-smi: {gpus['error']}",
                advice="The driver is not well: reload it or restart the node.",
            )
            continue
        kinds = Counter((model, driver) for model, driver, *_ in gpus["devices"])
        text = ", ".join(f"{number} x {model}, driver {driver}" for (model, driver), number in kinds.items())
        summaries[name] = text or "none"
        torch = (facts.get("modules") or {}).get("torch") or {}
        unseen = len(gpus["devices"]) - torch.get("gpus", len(gpus["devices"]))
        yield Finding(
            check="gpus",
            node=name,
            level=WARN if unseen > 0 else OK if gpus["devices"] else SKIPPED,
            seen=(text or "no GPU: " + ("nvidia-smi lists none" if gpus["has_tool"] else "there is no nvidia-smi"))
            + (f"; torch sees {torch['gpus']}" if unseen > 0 else ""),
            advice="Install a torch that is built for the driver's CUDA, and look at CUDA_VISIBLE_DEVICES."
            if unseen > 0
            else "",
        )
    yield from _differing(
        "gpus", summaries, "", "A run is as fast as its slowest GPU: keep unlike nodes in two targets."
    )


def differing_nodes(values: dict[str, str]) -> str:
    """Return a text that lists each value's nodes; "" if all values are equal."""
    by_value: dict[str, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(value, []).append(name)
    if len(by_value) < 2:
        return ""
    parts = []
    for value, names in sorted(by_value.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(names[:3]) + (f" and {counted(len(names) - 3, 'more node')}" if len(names) > 3 else "")
        parts.append(f"{value} on {shown}")
    return "; ".join(parts)


def _differing(check: str, values: dict[str, str], title: str, advice: str) -> Iterator[Finding]:
    text = differing_nodes(values)
    if text:
        yield Finding(check=check, level=WARN, seen=f"{title} differs: {text}".strip(), advice=advice)


def _space_advice(path: str) -> str:
    if path == "/dev/shm":
        return "MPI and data loaders share memory there: `mount -o remount,size=8G /dev/shm`, or --shm-size of a container."
    return f"Make room on the file system of {path}, or set another folder on the target."
