"""Ends what an engine still has of a run: containers whose client was killed, and what they wrote into their layers."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from paceline.containers.command import RUN_LABEL
from paceline.containers.engine import ContainerEngine, is_rootless

# A daemon that hangs must not keep a run from ending.
_CALL_S = 60.0
_TRIES = 5
_LOOK_S = 0.25
#: How long docker's daemon may take, on a machine with much to do, to make a container for a client that was killed.
SETTLE_S = 2.0


def remove(engine: ContainerEngine, run_id: str, *, settle_s: float = SETTLE_S) -> int:
    """Kill and remove every container of the run; how many there were. Never raises: it runs when a run is being ended.

    settle_s: how long to look for one that docker's daemon is still making, where none is there yet; 0 where no client
    was killed. Other engines have no daemon. Not to be called while workers of the run are wanted.
    """
    if not engine.keeps_containers:
        return 0
    removed: set[str] = set()
    deadline = time.monotonic() + (settle_s if engine.kind == "docker" else 0.0)
    # Again until none is left: an engine may still be making one for a client that was just killed.
    for _ in range(_TRIES):
        # Waits for the first alone: once some were removed, an empty list means that none is left.
        while not (found := _containers(engine, run_id)) and not removed and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if not found:
            break
        removed.update(found)
        # Asked before the removal: afterwards podman no longer knows which runtime it was.
        runtimes = _runtimes(engine, found)
        # With the volumes that the image asks for, and at once: its processes have had their grace period.
        # Docker kills at once with --force. Podman would first wait ten seconds for the processes.
        _output([engine.path, "rm", "--force", "--volumes", *(["--time=0"] if engine.kind == "podman" else []), *found])
        # For those that podman forgets without telling the runtime; of all others the runtime has nothing left to delete.
        for runtime in runtimes:
            for container in found:
                _delete(runtime, container)
    return len(removed)


def _delete(runtime: Sequence[str], container: str) -> None:
    """Have the runtime forget the container; again where it still knows it, for what was killed of it may not be gone yet."""
    for _ in range(_TRIES):
        _output([*runtime, "delete", "--force", container])
        if not _output([*runtime, "state", container]):
            return
        time.sleep(_LOOK_S)


def _containers(engine: ContainerEngine, run_id: str) -> list[str]:
    """Ids of the run's containers in whatever state; podman's half-made ones, known by their name alone, among them."""
    listed = [engine.path, "ps", "--all", "--no-trunc"]
    found = _output([*listed, "--quiet", "--filter", f"label={RUN_LABEL}={run_id}"]).split()
    # A client that was killed while it made a container leaves a name and storage, but no labels yet.
    if engine.kind == "podman":
        for line in _output([*listed, "--external", "--format", "{{.ID}} {{.Names}}"]).splitlines():
            container, _, name = line.partition(" ")
            if name.strip().startswith(f"paceline-{run_id}-"):
                found.append(container)
    return list(dict.fromkeys(found))


def _runtimes(engine: ContainerEngine, containers: Sequence[str]) -> list[list[str]]:
    """The programs below podman that made these containers.

    Killed between the runtime's first step and its own note of it, podman removes a container without telling the
    runtime, whose state and empty control group would stay until the next boot. Docker's daemon is not killed.
    """
    if engine.kind != "podman":
        return []
    shown = _output([engine.path, "container", "inspect", "--format", "{{.OCIRuntime}}", *containers])
    # A rootless podman's runtime keeps its state in the user's own namespace, which `unshare` enters.
    inside = [engine.path, "unshare"] if shown and is_rootless(engine) else []
    return [[*inside, runtime] for runtime in dict.fromkeys(shown.split())]


def _output(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_CALL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        # Not known is taken for none: the caller may try again, and must not fail for it.
        return ""
    return done.stdout
