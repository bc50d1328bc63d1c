"""Remove the containers that a run has left after their clients were killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from paceline.containers.command import RUN_LABEL
from paceline.containers.engine import ContainerEngine, is_rootless

# Timeout in seconds of each call of the container engine, so that a hanging daemon does not keep a run from ending.
_CALL_S = 60.0
_TRIES = 5
_LOOK_S = 0.25
#: Seconds that a loaded docker daemon may need to create a container for a client that was killed.
SETTLE_S = 2.0


def remove(engine: ContainerEngine, run_id: str, *, settle_s: float = SETTLE_S) -> int:
    """Kill and remove every container of a run. Return their number.

    Call this only when all workers of the run have ended or may be killed.

    Args:
        engine: The container engine.
        run_id: The run's id, which labels its containers.
        settle_s: Seconds to wait for a container that docker's daemon may still be creating. 0 if no client was killed.
    """
    if not engine.keeps_containers:
        return 0
    removed: set[str] = set()
    deadline = time.monotonic() + (settle_s if engine.kind == "docker" else 0.0)
    # Try several times, because the engine may still be creating a container for a client that was killed.
    for _ in range(_TRIES):
        # Wait only for the first containers to appear: after a removal, an empty list means that all are gone.
        while not (containers := _containers(engine, run_id)) and not removed and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if not containers:
            break
        removed.update(containers)
        # Get the containers' OCI runtimes, such as crun, before the removal: podman no longer knows them afterwards.
        runtimes = _runtimes(engine, containers)
        # Kill at once, because the workers' grace period is over. podman's --force would wait ten seconds first.
        _output(
            [engine.path, "rm", "--force", "--volumes", *(["--time=0"] if engine.kind == "podman" else []), *containers]
        )
        # Delete each container by its runtime too, because podman may forget a container that the runtime still has.
        for runtime in runtimes:
            for container in containers:
                _delete(runtime, container)
    return len(removed)


def _delete(runtime: Sequence[str], container: str) -> None:
    """Delete a container by its OCI runtime. Retry until killed processes have disappeared."""
    for _ in range(_TRIES):
        _output([*runtime, "delete", "--force", container])
        if not _output([*runtime, "state", container]):
            return
        time.sleep(_LOOK_S)


def _containers(engine: ContainerEngine, run_id: str) -> list[str]:
    listed = [engine.path, "ps", "--all", "--no-trunc"]
    ids = _output([*listed, "--quiet", "--filter", f"label={RUN_LABEL}={run_id}"]).split()
    # Also find containers by name: if a client is killed while it creates a container, the container has no labels.
    if engine.kind == "podman":
        for line in _output([*listed, "--external", "--format", "{{.ID}} {{.Names}}"]).splitlines():
            container, _, name = line.partition(" ")
            if name.strip().startswith(f"paceline-{run_id}-"):
                ids.append(container)
    return list(dict.fromkeys(ids))


def _runtimes(engine: ContainerEngine, containers: Sequence[str]) -> list[list[str]]:
    """Return the OCI runtime programs of podman's containers, such as crun.

    For docker, return []. If podman is killed after it has called the runtime, it may not have recorded the start.
    podman then removes the container without calling the runtime. So the runtime's state and the control group would
    stay until the next boot.
    """
    if engine.kind != "podman":
        return []
    shown = _output([engine.path, "container", "inspect", "--format", "{{.OCIRuntime}}", *containers])
    # Use `unshare` to enter the user's namespace, in which the runtime of a rootless podman keeps its state.
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
        # Treat a missing answer as an empty answer, because the caller must not fail, and may try again.
        return ""
    return done.stdout
