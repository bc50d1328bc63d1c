"""Return the options of mpirun for nodes that are separate machines.

Open MPI's daemons are started through the run's own remote shell, so nodes need no logins to each other. The daemons
communicate by the addresses that Paceline has chosen. TCP keepalive detects a broken connection soon, not after hours.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from paceline.errors import LauncherError
from paceline.job.plan import Launch, NodeSetup, RankSlot, node_sizes
from paceline.launchers import environment

#: TCP keepalive of Open MPI's daemons: idle seconds before a probe, seconds between probes, failed probes for a lost link.
_KEEPALIVE = {"time": "5", "intvl": "2", "probes": "2"}

#: Variables that workers derive from Open MPI's local rank, so a command line for several workers must not set them.
GIVEN = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK")

#: Variables that differ between nodes, so each worker gets them by its own options.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_options(launch: Launch, major: int) -> list[str]:
    """Return mpirun's options for several hosts. `major` is the version of Open MPI."""
    check_same_mpi(launch)
    sizes = node_sizes(launch.job)
    hosts = ",".join(f"{node.address}:{size}" for node, size in zip(launch.nodes, sizes, strict=True) if size)
    shell = shlex.join(launch.remote_shell)
    settings = {f"oob_tcp_keepalive_{name}": value for name, value in _KEEPALIVE.items()}
    networks = networks_of(launch)
    if networks:
        settings["oob_tcp_if_include"] = networks
    # no_tree_spawn: let the first node start all daemons through the run's remote shell. By default, daemons start each other.
    # plm: start daemons by this shell, because Open MPI would use Slurm in an allocation.
    if major >= 5:
        runtime = "--prtemca"
        settings |= {"plm": "ssh", "plm_ssh_agent": shell, "plm_ssh_no_tree_spawn": "1"}
    else:
        runtime = "--mca"
        settings |= {"plm": "rsh", "plm_rsh_agent": shell, "plm_rsh_no_tree_spawn": "1"}
    words = ["--host", hosts]
    if launch.prepared[0].container:
        # Keep daemons in the foreground: a background daemon would end when the container's first process ends. Each daemon keeps
        # its remote shell open, and mpirun allows 128 open shells by default.
        words += ["--leave-session-attached"]
        settings[f"plm_{settings['plm']}_num_concurrent"] = str(len(launch.nodes))
    for name, value in settings.items():
        words += [runtime, name, value]
    return [*words, *(("--mca", "btl_tcp_if_include", networks) if networks else ())]


def networks_of(launch: Launch) -> str:
    """Return the networks of the nodes' addresses for Open MPI, or "" if unknown.

    The result has whole networks, because PRRTE 3 crashes half the time on a list of addresses.
    """
    networks = sorted({node.network or "" for node in launch.nodes})
    return "" if "" in networks else ",".join(networks)


def values_of_place(launch: Launch, place: RankSlot, skip: tuple[str, ...] = ()) -> dict[str, str]:
    """Return environment variables of a worker's node and ranks, except `skip` and the job's `environment_variables`."""
    left_out = {*skip, *launch.job.environment_variables}
    values = environment.of_place(launch, place)
    if launch.remote_shell:
        own = environment.defaults(launch, place)
        values |= {name: own[name] for name in INTERFACES if name in own}
    return {name: value for name, value in values.items() if name not in left_out}


def set_words(values: Mapping[str, str]) -> list[str]:
    """Return `--set NAME=VALUE` options of the worker program for these variables."""
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def context_options(launch: Launch, place: RankSlot) -> list[str]:
    """Return the mpirun options of a worker: its host and exported variables.

    Each worker's part of mpirun's command line needs them, because workers on other hosts inherit no variables.
    """
    host = ["--host", f"{launch.nodes[place.node_rank].address}:{place.local_world_size}"]
    return [*host, *(word for name in _forwarded(launch) for word in ("-x", name))]


def _forwarded(launch: Launch) -> list[str]:
    prepared = launch.prepared[0]
    names = (
        *environment.of_run(launch),
        *(name for name in environment.defaults(launch, launch.places[0]) if name not in INTERFACES),
        *launch.job.environment_variables,
        *prepared.variables,
        *(("PYTHONNOUSERSITE",) if prepared.is_isolated else ()),
        *("PYTHONPATH", "PATH"),
    )
    return list(dict.fromkeys(names))


def check_same_mpi(launch: Launch) -> None:
    """Refuse nodes with different images, Open MPI installations or interpreters.

    Raises:
        LauncherError: Two nodes differ; the message has the values of both.
    """
    first = launch.prepared[0]
    for node, prepared in zip(launch.nodes, launch.prepared, strict=True):
        images = [_image(one) for one in (first, prepared)]
        if images[0] != images[1]:
            raise LauncherError(
                "distributed_backend='mpi' over several nodes needs the same image on each: "
                f"custom_docker_image={launch.job.environment.docker_image!r} is {images[0]} on {launch.nodes[0].name} and "
                f"{images[1]} on {node.name}. Name it by its digest (name@sha256:...), or pull it again on each node."
            )
        if prepared.open_mpi != first.open_mpi or prepared.python != first.python:
            raise LauncherError(
                "distributed_backend='mpi' over several nodes needs the same Open MPI and Python at the same place on each: "
                f"{launch.nodes[0].name} has {_words(first.open_mpi)} and {first.python}, {node.name} has "
                f"{_words(prepared.open_mpi)} and {prepared.python}. Name an interpreter that all nodes have (python=)."
            )


def _image(prepared: NodeSetup) -> str | None:
    """Return the image's short id, else its name, or None without an image."""
    if prepared.container is None:
        return None
    image = str(prepared.container["image"]).removeprefix("sha256:")
    return image if "/" in image else image[:12]


def _words(found: tuple[str, tuple[int, int]] | None) -> str:
    return f"{found[0]} ({found[1][0]}.{found[1][1]})" if found else "none"
