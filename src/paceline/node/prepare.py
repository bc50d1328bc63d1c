"""Prepare a node: the script's environment, its image and its data."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paceline
from paceline.errors import DataError, EngineError, EnvironmentBuildError, LauncherError
from paceline.job.data_reference import DataReference
from paceline.job.environment import EnvironmentSpec
from paceline.job.job import Job
from paceline.job.plan import NodeSetup, places
from paceline.node.output import Bar, check_outputs, say
from paceline.remote.staging.stage_in import Arrived, as_here
from paceline.runs import work_dir
from paceline.runs.folder import RunFolder
from paceline.runs.run_data import link_inputs
from paceline.system import locks
from paceline.system.files import write_json

if TYPE_CHECKING:
    from paceline.containers import Layer, Mount


def prepare(job: Job, folder: RunFolder, node_rank: int, *, apart: bool = False) -> dict[str, Any]:
    """Prepare everything that the node's workers need. Return paths and variables as JSON.

    With `apart`, also create the workers' folder, because the supervisor can't write to the run's folder on this node.
    """
    came = as_here(folder)
    if apart:
        # The supervisor can't write to this folder, so the first node that uses it creates the workers' folder in it.
        with locks.locked(folder.path / "work.lock"):
            if not folder.work.exists():
                work_dir.make(folder, is_shared=False, sent=came.linked())
    built = {} if job.environment.docker_image else _environment(job.environment, folder, node_rank, came)
    inputs: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for reference in job.inputs:
        if reference.is_output:
            inputs[reference.name] = str(_output(reference, folder, node_rank, came, apart=apart))
            continue
        path, told = _input(reference, job, folder, node_rank, came)
        inputs[reference.name] = str(path)
        found.append(told)
    if job.environment.docker_image:
        mounts = _mounts(job.inputs, inputs, folder, came)
        built = prepare_container(job.environment, folder, mounts, came)
    if job.launcher == "mpi" and "open_mpi" not in built:
        from paceline.launchers.mpi import find_open_mpi

        # Search on this node, after building the environment, because the environment may contain Open MPI.
        mpi = find_open_mpi(built["python"])
        built["open_mpi"] = (mpi.mpirun, mpi.version)
    prepared = NodeSetup(
        **built,
        inputs=inputs,
        inputs_by_rank=tuple(reference.name for reference in job.inputs if reference.partition == "rank"),
    )
    if apart:
        link_inputs(job, prepared, folder.work)
    return {"prepared": prepared.to_json(), "inputs": found}


def _mounts(
    references: Sequence[DataReference], inputs: Mapping[str, str], folder: RunFolder, came: Arrived
) -> list[Mount]:
    """Return the container's mounts for inputs and for the targets of their links."""
    if all(reference.is_output for reference in references):
        return []  # the data are in the run's folder, which is mounted anyway
    from paceline.containers import Mount
    from paceline.data.stores.filesystem import place_of

    mounts = []
    for reference in references:
        if reference.is_output:
            continue
        # Mount data at their original place writable. Mount a copy of the data read-only: other runs may use it.
        is_itself = folder.run_id not in Path(inputs[reference.name]).parts and not came.is_carried(reference)
        mounts.append(Mount(path=Path(inputs[reference.name]), read_only=not is_itself))
        for source in came.reference(reference).sources:
            record, _ = place_of(source, came.stores_dir)
            if record.kind == "local" and record.root:
                mounts.append(Mount(path=Path(record.root), read_only=not is_itself))
            elif record.kind == "local":
                mounts.append(Mount(path=Path(source.path.removeprefix("file://")), read_only=not is_itself))
    return mounts


def _environment(environment: EnvironmentSpec, folder: RunFolder, node_rank: int, came: Arrived) -> dict[str, Any]:
    base = environment.python or sys.executable
    if not environment.needs_build:
        return {"python": base}
    from paceline.environments.store import EnvironmentStore

    started = time.monotonic()
    store = EnvironmentStore(folder.path.parent.parent / "environments")
    built = store.ensure(came.environment(environment), base, say)
    say(f"Environment {built.key} is ready ({time.monotonic() - started:.1f} s).")
    # Only one node writes the record: the others have the same environment, and may share this file.
    if node_rank == 0:
        write_json(folder.environment, came.as_submitted(built.to_json()))
    # Search a layer's programs first, then the programs of its base environment, such as torchrun.
    folders = [str(built.bin_dir), *([os.path.dirname(built.base_python)] if built.is_layered else [])]
    return {
        "python": str(built.python),
        "variables": dict(built.variables),
        "bin_dir": os.pathsep.join(dict.fromkeys(folders)),
        "is_isolated": not built.is_layered,
    }


def _output(reference: DataReference, folder: RunFolder, node_rank: int, came: Arrived, *, apart: bool) -> Path:
    """Create and return an output's folder. On node 0, also check the datastore, unless `apart`."""
    # Only node 0 checks whether the datastore takes the output, because only node 0 stores the outputs.
    if node_rank == 0 and not apart:
        check_outputs([reference], came)
    path = folder.uploads / reference.name
    path.mkdir(parents=True, exist_ok=True)
    return path


def _input(
    reference: DataReference, job: Job, folder: RunFolder, node_rank: int, came: Arrived
) -> tuple[Path, dict[str, object]]:
    """Fetch an input. Return its path, and its entry for the run's record."""
    from paceline.data.datasets.content import content_fingerprint, with_content
    from paceline.data.transfer.cache import DataCache
    from paceline.data.transfer.fetch import fetch
    from paceline.data.transfer.listing import list_files

    records, here, is_carried = came.stores_dir, came.reference(reference), came.is_carried(reference)
    cache = DataCache()
    began = time.monotonic()
    ranks = [place.rank for place in places(job) if place.node_rank == node_rank]
    fetched = fetch(
        here,
        workspace_dir=records,
        cache=cache,
        view_dir=cache.view_dir(folder.run_id, node_rank),
        node_rank=node_rank,
        node_count=job.node_count,
        ranks=range(ranks[0], ranks[-1] + 1),
        world_size=job.world_size,
        say=say,
        progress=Bar(reference.name),
    )
    if is_carried and reference.mode == "mount":
        say(f"input {reference.name!r}: as_mount: its files are on the submitting machine, and were sent from there")
    elif fetched.note and fetched.mode == "mount":
        say(fetched.note)
    content = fetched.fingerprint
    if reference.name in came.manifest.contents:
        content = came.manifest.contents[reference.name]
    elif reference.dataset is not None:
        content = content_fingerprint(with_content(list_files(here.sources, records), records))
    if reference.fingerprint and content != reference.fingerprint:
        if reference.frozen:
            raise DataError(
                f"the frozen files of {reference.dataset} have changed: `paceline data check {reference.dataset}` names them. "
                "Restore them from a backup, or register a new version."
            )
        say(
            f"NOTE: the files of {reference.dataset} are no longer those that were there when it was registered; the run "
            "takes those of today."
        )
    told = reference.to_json() | {
        "node_rank": node_rank,
        "given_as": "download" if is_carried else fetched.mode,
        "path": str(fetched.path),
        "files": fetched.files,
        "bytes": fetched.bytes,
        "fetched_bytes": fetched.fetched_bytes,
        "content": content,
        "fetch_s": round(time.monotonic() - began, 3),
    }
    return Path(fetched.path), told


def prepare_container(
    environment: EnvironmentSpec, folder: RunFolder, mounts: Iterable[Mount], came: Arrived
) -> dict[str, object]:
    """Return interpreter, engine, image and mounts of the container as fields of `NodeSetup`.

    `mounts` are mounts that the workers need besides the run's folder. `came` describes the files that were sent to this
    machine with the run.

    Raises:
        EnvironmentBuildError: No container engine answers, or the image is not available or has no suitable Python.
    """
    from paceline.containers import HostFiles, Mount, check_image, ensure_layer, find_engine, probe

    assert environment.docker_image is not None
    try:
        engine = find_engine()
        image = check_image(engine, environment.docker_image, say)
        look = partial(probe, engine, image, run_id=folder.run_id, name=environment.docker_image, say=say)
        found = look(python=environment.python or "python3")
        layer = None
        if environment.needs_build:
            # Build the layer in a container of the image, whose Python and C library determine the wheels.
            layer = ensure_layer(
                folder.path.parent.parent / "environments" / "images",
                engine,
                image,
                run_id=folder.run_id,
                python=found.python,
                requirements=_lines(came.environment(environment)),
                is_exact=bool(environment.locked_pip),
                say=say,
            )
            # The mount is read-only, because several runs share the layer.
            mount = Mount(path=Path(layer.prefix), read_only=True)
            mounts = [*mounts, mount]
            kept = _kept(environment, layer)
            write_json(folder.environment, came.as_submitted(kept))
            # Examine the image again, since the layer may have installed an mpirun.
            found = look(python=layer.python, mounts=[mount])
    except (LauncherError, EngineError) as error:
        raise EnvironmentBuildError(str(error)) from error
    # Don't resolve links in this path, because workers use it unresolved. `HostFiles` finds the links' targets.
    library = Path(paceline.__file__).parent.parent
    say(f"{engine}: {environment.docker_image} has Python {'.'.join(map(str, found.version))}.")
    return {
        "python": layer.python if layer else found.python,
        "bin_dir": layer.bin_dir if layer else None,
        "variables": {"VIRTUAL_ENV": layer.prefix} if layer else {},
        "is_isolated": True,
        "container": {
            "engine": engine.to_json(),
            "image": image,
            "mounts": [[str(mount.path), mount.read_only] for mount in mounts],
            "host": HostFiles.here(engine, library).to_json(),
        },
        "open_mpi": (found.mpirun, found.mpirun_version) if found.mpirun else None,
    }


def _kept(environment: EnvironmentSpec, layer: Layer) -> dict[str, object]:
    """Return the JSON record of an environment installed over a container image."""
    from paceline.containers import key_of

    return {
        "key": key_of(layer),
        "prefix": layer.prefix,
        "python": layer.python,
        "is_layered": True,
        "pip": list(layer.packages),
        "conda": [],
        "environment": environment.to_json(),
        "locked": replace(environment, locked_pip=layer.packages).to_json(),
    }


def _lines(environment: EnvironmentSpec) -> Sequence[str]:
    if environment.locked_pip:
        return environment.locked_pip
    return (*environment.pip_packages, *(environment.pip_requirements or "").splitlines())
