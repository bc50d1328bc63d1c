"""Removal of a run's remaining containers, after their clients were killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from paceline.containers.command import RUN_LABEL
from paceline.containers.engine import ContainerEngine, is_rootless

# A hanging daemon must not keep a run from ending.
_CALL_S = 60.0
_TRIES = 5
_LOOK_S = 0.25
#: Time that docker's daemon may need, under load, to create a container for a killed client.
SETTLE_S = 2.0


def remove(engine: ContainerEngine, run_id: str, *, settle_s: float = SETTLE_S) -> int:
    """Kill and remove every container of the run.

    Call it only when no worker of the run is needed any more.

    Args:
        engine: The engine.
        run_id: The run.
        settle_s: Seconds to wait for a container that docker's daemon is still creating; 0 if no client was killed.
    """
    if not engine.keeps_containers:
        return 0
    removed: set[str] = set()
    deadline = time.monotonic() + (settle_s if engine.kind == "docker" else 0.0)
    # Repeat: an engine may still be creating one for a killed client.
    for _ in range(_TRIES):
        # Wait only for the first: after a removal, an empty list means that none is left.
        while not (containers := _containers(engine, run_id)) and not removed and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if not containers:
            break
        removed.update(containers)
        # Before the removal: afterwards podman no longer knows the runtime.
        runtimes = _runtimes(engine, containers)
        # With volumes, and at once: the grace period is over. Docker's --force kills at once, podman's would wait ten seconds.
        _output(
            [engine.path, "rm", "--force", "--volumes", *(["--time=0"] if engine.kind == "podman" else []), *containers]
        )
        # For containers that podman forgets without telling the runtime; otherwise this does nothing.
        for runtime in runtimes:
            for container in containers:
                _delete(runtime, container)
    return len(removed)


def _delete(runtime: Sequence[str], container: str) -> None:
    """Delete a container from the runtime, with retries while killed processes disappear."""
    for _ in range(_TRIES):
        _output([*runtime, "delete", "--force", container])
        if not _output([*runtime, "state", container]):
            return
        time.sleep(_LOOK_S)


def _containers(engine: ContainerEngine, run_id: str) -> list[str]:
    listed = [engine.path, "ps", "--all", "--no-trunc"]
    ids = _output([*listed, "--quiet", "--filter", f"label={RUN_LABEL}={run_id}"]).split()
    # A client killed while creating a container leaves a name and storage without labels.
    if engine.kind == "podman":
        for line in _output([*listed, "--external", "--format", "{{.ID}} {{.Names}}"]).splitlines():
            container, _, name = line.partition(" ")
            if name.strip().startswith(f"paceline-{run_id}-"):
                ids.append(container)
    return list(dict.fromkeys(ids))


def _runtimes(engine: ContainerEngine, containers: Sequence[str]) -> list[list[str]]:
    """Return the runtime programs that podman used for these containers.

    If podman is killed between the runtime's first step and its own record, it removes the container without telling the
    runtime, and state and control group stay until the next boot. Docker's daemon is not affected.
    """
    if engine.kind != "podman":
        return []
    shown = _output([engine.path, "container", "inspect", "--format", "{{.OCIRuntime}}", *containers])
    # A rootless podman's runtime keeps its state in the user's namespace, which `unshare` enters.
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
        # Without an answer, assume none: the caller may retry, and must not fail.
        return ""
    return done.stdout
