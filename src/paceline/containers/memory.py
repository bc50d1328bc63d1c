"""One /dev/shm of a given size for all workers of a node, each of them in a container of its own.

A size makes an engine give each container a /dev/shm of its own, and then NCCL finds no shared memory between two
workers of one machine and takes the network. So a container that does nothing holds the memory, and the workers join
it. The first worker could not: it may have ended before the last one starts.
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
    """All commands of an attempt, wrapped. Starts what holds the nodes' memory, where some node has several containers and
    `shm_size` is given: end it with `remove`, however the attempt ended.

    Raises:
        LauncherError: the memory can't be had, or a path can't be mounted.
    """
    holders: dict[int, str] = {}
    # Apptainer's containers have the host's /dev/shm, whatever size is asked for.
    if shm_size and engine.keeps_containers:
        node_ranks = [command.node_rank for command in commands]
        # A node with one container needs no holder: `wrap` gives that one the size itself.
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
    """The name of a container that holds a node's memory, once it runs."""
    name = f"paceline-{launch.run_id}-{launch.attempt}-memory-{node_rank}"
    python = launch.prepared[node_rank].python
    argv = run_argv(
        engine,
        image,
        (python, "-I", "-S", INSIDE, "--hold"),
        run_id=launch.run_id,
        name=name,
        mounts=[Mount(path=Path(INSIDE).parent.parent, read_only=True), *mounts],
        # Others join the IPC namespace of this one by its name (--ipc=container:NAME).
        ipc=("--ipc=shareable", f"--shm-size={shm_size}"),
        detach=True,
    )
    # Detached, the client returns once the container runs, so those that join it by name will find it.
    code, lines = call(argv)
    if code != 0:
        told = (
            start_failure(engine, launch.job.environment.docker_image or image, python, code, lines)
            or f"{engine.kind} ended with exit code {code}."
        )
        raise LauncherError(f"shm_size={shm_size!r}: {told}")
    return name
