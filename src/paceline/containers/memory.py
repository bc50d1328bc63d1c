"""Share one /dev/shm of a given size between a node's workers in several containers.

With `--shm-size`, an engine gives each container a separate /dev/shm, so NCCL finds no shared memory between workers and uses
the network. Therefore an additional, idle container owns the memory, and the workers' containers join it. The first worker's
container can't own the memory: that worker may end before the last one starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.containers.client import call, start_failure
from paceline.containers.command import INSIDE, Mount, run_argv, wrap
from paceline.containers.engine import ContainerEngine
from paceline.errors import LauncherError
from paceline.job.plan import Command, Launch


def wrap_all(
    commands: Sequence[Command],
    launch: Launch,
    *,
    engine: ContainerEngine,
    image: str,
    shm_size: str | None = None,
    mounts: Sequence[Mount] = (),
    shell: Mapping[str, str] | None = None,
) -> list[Command]:
    """Wrap the commands of an attempt's workers, so that they run in containers.

    With `shm_size`, also start an idle container on each node with several workers. The idle container owns their
    shared memory, until `paceline.containers.remove` removes it.

    Raises:
        LauncherError: The memory can't be allocated, or a path can't be mounted.
    """
    holders: dict[int, str] = {}
    # Apptainer has no private /dev/shm: its containers always use the host's.
    if shm_size and engine.keeps_containers:
        node_ranks = [command.node_rank for command in commands]
        # If a node has several containers, an extra container holds their shared memory. A single one has its own.
        for node_rank in sorted({rank for rank in node_ranks if node_ranks.count(rank) > 1}):
            holders[node_rank] = _hold(launch, node_rank, engine, image, shm_size, mounts)
    return [
        wrap(
            command,
            launch,
            engine=engine,
            image=image,
            shm_size=shm_size,
            memory=holders.get(command.node_rank),
            mounts=mounts,
            shell=shell,
        )
        for command in commands
    ]


def _hold(
    launch: Launch, node_rank: int, engine: ContainerEngine, image: str, shm_size: str, mounts: Sequence[Mount]
) -> str:
    name = f"paceline-{launch.run_id}-{launch.attempt}-memory-{node_rank}"
    python = launch.prepared[node_rank].python
    argv = run_argv(
        engine,
        image,
        (python, "-I", "-S", INSIDE, "--hold"),
        run_id=launch.run_id,
        name=name,
        mounts=[Mount(path=Path(INSIDE).parent.parent, read_only=True), *mounts],
        # The workers' containers join this container's IPC namespace by its name (--ipc=container:NAME).
        ipc=("--ipc=shareable", f"--shm-size={shm_size}"),
        detach=True,
    )
    # The client returns once the detached container runs, so the workers' containers can join its namespace then.
    code, lines = call(argv)
    if code != 0:
        message = (
            start_failure(engine, launch.job.environment.docker_image or image, python, code, lines)
            or f"{engine.kind} ended with exit code {code}."
        )
        raise LauncherError(f"shm_size={shm_size!r}: {message}")
    return name
