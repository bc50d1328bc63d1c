"""What mpirun has to be told where the nodes are machines of their own.

Each node's part of Open MPI is started through the run's own remote shell, so that no node needs a login on another. It
talks to the others by the addresses that the nodes were given for, not by whatever interface it finds first; and a cut
link is noticed, which without keepalive it is not for hours.
"""

from __future__ import annotations

import shlex

from paceline.errors import LauncherError
from paceline.launchers import environment
from paceline.plan import Launch

#: Seconds until the first probe, between probes, and how many in vain make a link a lost one.
_KEEPALIVE = {"time": "5", "intvl": "2", "probes": "2"}

#: What differs from node to node, and is set for each worker.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_options(launch: Launch, major: int) -> list[str]:
    """mpirun's options for several hosts; major: the version of Open MPI."""
    _check_same_mpi(launch)
    sizes: dict[int, int] = {}
    for place in launch.places:
        sizes[place.node_rank] = place.local_world_size
    hosts = ",".join(f"{node.address}:{sizes[node.node_rank]}" for node in launch.nodes if node.node_rank in sizes)
    # Each host takes the one of these that is its own.
    addresses = ",".join(f"{node.address}/32" for node in launch.nodes)
    shell = shlex.join(launch.remote_shell)
    settings = {"oob_tcp_if_include": addresses} | {f"oob_tcp_keepalive_{name}": v for name, v in _KEEPALIVE.items()}
    if major >= 5:
        runtime = "--prtemca"
        settings |= {"plm": "ssh", "plm_ssh_agent": shell, "plm_ssh_no_tree_spawn": "1"}
    else:
        runtime = "--mca"
        settings |= {"plm": "rsh", "plm_rsh_agent": shell, "plm_rsh_no_tree_spawn": "1"}
    words = ["--host", hosts]
    for name, value in settings.items():
        words += [runtime, name, value]
    return [*words, "--mca", "btl_tcp_if_include", addresses, *_forwarded(launch)]


def _forwarded(launch: Launch) -> list[str]:
    """Names of variables, whose values mpirun passes on: on another host its workers have nothing of its environment."""
    prepared = launch.prepared[0]
    names = [
        *environment.of_run(launch),
        *(name for name in environment.defaults(launch, launch.places[0]) if name not in INTERFACES),
        *launch.job.environment_variables,
        *prepared.variables,
        *(("PYTHONNOUSERSITE",) if prepared.is_isolated else ()),
        *("PYTHONPATH", "PATH"),
    ]
    return [word for name in dict.fromkeys(names) for word in ("-x", name)]


def _check_same_mpi(launch: Launch) -> None:
    first = launch.prepared[0]
    for node, prepared in zip(launch.nodes, launch.prepared, strict=True):
        if prepared.open_mpi != first.open_mpi or prepared.python != first.python:
            raise LauncherError(
                f"distributed_backend='mpi' over several nodes needs the same Open MPI and Python at the same place on each: "
                f"{launch.nodes[0].name} has {_words(first.open_mpi)} and {first.python}, "
                f"{node.name} has {_words(prepared.open_mpi)} and {prepared.python}. "
                "Name an interpreter that all nodes have (python=)."
            )


def _words(found: tuple[str, tuple[int, int]] | None) -> str:
    return f"{found[0]} ({found[1][0]}.{found[1][1]})" if found else "none"
