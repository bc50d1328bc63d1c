"""Check the packages of scripts: torch, mpi4py and Open MPI must be equal on all nodes.

A script may need none of these packages. So a missing package is a failure only if other nodes have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.doctor.examination import FAIL, OK, SKIPPED, WARN, Examination, Finding, PackageFacts
from paceline.doctor.machine import MODULES, differing_nodes
from paceline.system.names import counted


def check_environment(examination: Examination) -> Iterator[Finding]:
    """Return findings on the scripts' packages and on Open MPI."""
    for module in MODULES:
        packages = {
            name: modules.get(module) or PackageFacts(error=str(modules.get("error", "gave no answer")))
            for name, facts in examination.facts.items()
            if (modules := facts.get("modules")) is not None
        }
        yield from _check_module(module, packages)
    mpis = {name: facts["open_mpi"] for name, facts in examination.facts.items() if "open_mpi" in facts}
    yield from _check_open_mpi(mpis)


def has_module(examination: Examination, module: str) -> bool:
    """Return whether the module can be imported on every node that has answered."""
    return bool(examination.facts) and all(
        "version" in ((facts.get("modules") or {}).get(module) or {}) for facts in examination.facts.values()
    )


def _check_module(module: str, found: Mapping[str, PackageFacts]) -> Iterator[Finding]:
    versions = {name: _version(entry) for name, entry in found.items() if "version" in entry}
    missing = [name for name, entry in found.items() if entry.get("missing")]
    if not versions and len(missing) == len(found):
        if found:
            yield Finding(
                check=module, level=SKIPPED, seen=f"not installed; a job can bring it: --pip {module}, --image IMAGE"
            )
        return
    for name, entry in found.items():
        if entry.get("missing"):
            yield Finding(
                check=module,
                node=name,
                level=FAIL,
                seen=f"not installed here, but on {', '.join(list(versions)[:3])}",
                advice=f"Install it here too, or let jobs bring it: --pip {module}.",
            )
        elif "version" not in entry:
            yield Finding(
                check=module,
                node=name,
                level=FAIL,
                seen=f"can't be imported: {entry['error']}",
                advice="Fix the installation. The message is from Python's import.",
            )
    differ = differing_nodes(versions)
    if differ:
        # Fail only if minor releases differ: ranks with different patch releases mostly understand each other.
        minors = {".".join(found[name]["version"].split(".")[:2]) for name in versions}
        yield Finding(
            check=module,
            level=FAIL if len(minors) > 1 else WARN,
            seen=f"differs: {differ}",
            advice="Install the same version on all nodes: ranks of different versions hang or crash in collectives.",
        )
    elif versions:
        version = next(iter(versions.values()))
        yield Finding(check=module, level=OK, seen=version + _on(len(versions)))


def _check_open_mpi(found: Mapping[str, PackageFacts]) -> Iterator[Finding]:
    there = {name: f"Open MPI {mpi['version']} ({mpi['path']})" for name, mpi in found.items() if "version" in mpi}
    if not there:
        if found:
            why = next(iter(found.values()))["error"]
            yield Finding(check="open mpi", level=SKIPPED, seen=f"none: {why}")
        return
    for name, mpi in found.items():
        if "version" not in mpi:
            yield Finding(
                check="open mpi",
                node=name,
                level=FAIL,
                seen=f"{mpi['error']}",
                advice="Install the same Open MPI as on the other nodes, at the same path.",
            )
    versions = differing_nodes({name: found[name]["version"] for name in there})
    paths = differing_nodes({name: found[name]["path"] for name in there})
    if versions:
        yield Finding(
            check="open mpi",
            level=FAIL,
            seen=f"differs: {versions}",
            advice="Install the same version on all nodes; its daemons do not understand each other's.",
        )
    elif paths:
        yield Finding(
            check="open mpi",
            level=WARN,
            seen=f"lies at different paths: {paths}",
            advice="mpirun looks for itself at its own path on the other nodes: install it at the same one.",
        )
    else:
        yield Finding(check="open mpi", level=OK, seen=next(iter(there.values())) + _on(len(there)))


def _version(entry: PackageFacts) -> str:
    return f"{entry['version']} ({entry['detail']})" if entry.get("detail") else str(entry["version"])


def _on(number: int) -> str:
    return f" on {counted(number, 'node')}" if number > 1 else ""
