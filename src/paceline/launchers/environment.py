"""Return the environment variables of workers, as pure functions of launch and rank.

The names are those that frameworks read; docs/worker-environment.md lists the readers. User settings are never replaced:
`environment_variables` override everything, and the shell's variables override Paceline's defaults. Only shell variables
that another launcher gave to the submitting process are dropped: they describe that process, not these workers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.job.data_reference import PATH_VARIABLES
from paceline.job.job import RANK_VARIABLES
from paceline.job.plan import Command, Launch, NodeSetup, RankSlot
from paceline.runs.folder import RunFolder
from paceline.system import run_variables
from paceline.system.spare_client import KEY_VARIABLE, VARIABLE

#: Prefixes of variables of the submitting process that workers don't inherit, because a launcher such as Slurm has set them.
_FOREIGN_PREFIXES = (
    "OMPI_",
    "PMIX_",
    "PRTE_",
    "PMI_",
    "TORCHELASTIC_",
    "HOROVOD_GLOO_",
    "AZUREML_",
    "SLURM_",
    "PACELINE_",
)
_FOREIGN = frozenset(
    (
        *RANK_VARIABLES,
        *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("JAX_COORDINATOR_ADDRESS", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
    )
)
#: Variables with a launcher's prefix that workers inherit nevertheless, because they are settings of the user.
_USERS_OWN = (
    *("OMPI_ALLOW_RUN_AS_ROOT", "PACELINE_MPIRUN", "PACELINE_GPUS", "PACELINE_LEASES", "PACELINE_SNAPSHOT_LIMIT"),
    *("PACELINE_CONTAINER_ENGINE", "PACELINE_DATA_CACHE", "PACELINE_STACKS_SIGNAL", "PACELINE_SCHEDULING"),
    *("PACELINE_TRACKERS", "PACELINE_SEPARATE_WORKERS"),
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
)
#: Variable of the Azure SDK. The workers of a job that sets it get all variables that the Azure SDK's scripts read.
AZURE_VARIABLE = "AZUREML_ARM_WORKSPACE_NAME"
#: Prefixes of Open MPI's settings. If mpirun has started the submitting process, it has set them, else the user.
_MPI_SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the submitting process's environment without variables that describe it as a worker."""
    kept = _USERS_OWN if "OMPI_COMM_WORLD_RANK" in environment else (*_USERS_OWN, *_MPI_SETTINGS)
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(kept) or not (name in _FOREIGN or name.startswith(_FOREIGN_PREFIXES))
    }


def of_run(launch: Launch) -> dict[str, str]:
    """Return the environment variables that all workers share."""
    job, folder = launch.job, RunFolder(launch.run_dir)
    return {
        **(_of_launcher(launch) if job.has_launcher else {}),
        **(_of_azure(launch) if job.has_launcher or AZURE_VARIABLE in job.environment_variables else {}),
        "PACELINE_RUN_ID": launch.run_id,
        "PACELINE_RUN_DIR": str(launch.run_dir),
        "PACELINE_OUTPUT_DIR": str(folder.outputs),
        "PACELINE_CHECKPOINT_DIR": str(folder.checkpoints),
        "PACELINE_WORKSPACE": str(launch.run_dir.parent.parent),
        "PACELINE_ATTEMPT": str(launch.attempt),
        "PACELINE_MAX_RESTARTS": str(job.max_restarts),
        "PACELINE_WORLD_SIZE": str(job.world_size),
        "PACELINE_STALL_FILE": str(folder.stalled(launch.attempt)),
        "PACELINE_WATCH_DIR": str(watch_dir(launch)),
        **({"PACELINE_END_TIME": f"{launch.ends_at:.0f}"} if launch.ends_at is not None else {}),
        **({"PACELINE_RUN_SECRET": launch.secret} if launch.secret else {}),
        **(
            {"AZUREML_DATASET_ENVIRONMENT_VARS": ",".join(f"{one.name}:{one.mode}" for one in job.inputs)}
            if job.inputs
            else {}
        ),
        **({VARIABLE: launch.spare} if launch.spare else {}),
        **({KEY_VARIABLE: launch.states_key} if launch.states_key else {}),
        **_of_elastic(launch),
        **({run_variables.GENERATION_VARIABLE: "0"} if launch.job.on_failure == "replace" else {}),
    }


def _of_launcher(launch: Launch) -> dict[str, str]:
    """Return the environment variables by which scripts detect that they run distributed."""
    head, size = launch.nodes[0].address, str(launch.job.world_size)
    return {
        "WORLD_SIZE": size,
        "MASTER_ADDR": head,
        "MASTER_PORT": str(launch.ports[0]),
        "TORCHELASTIC_RUN_ID": launch.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.job.max_restarts),
        "JAX_COORDINATOR_ADDRESS": f"{head}:{launch.ports[1]}",
        "JAX_NUM_PROCESSES": size,
        "HOROVOD_SIZE": size,
        "HOROVOD_CROSS_SIZE": str(launch.job.node_count),
        # Scripts for Batch AI, a former service of Azure, read these variables.
        "AZ_BATCHAI_PYTORCH_INIT_METHOD": f"tcp://{head}:{launch.ports[0]}",
        "AZ_BATCH_MASTER_NODE": f"{head}:{launch.ports[0]}",
        "AZ_BATCHAI_MPI_MASTER_NODE": head,
    }


def _of_azure(launch: Launch) -> dict[str, str]:
    """Return the environment variables by which scripts detect an Azure ML run."""
    return {
        "AZUREML_RUN_ID": launch.run_id,
        "AZUREML_ARM_SUBSCRIPTION": "local",
        "AZUREML_ARM_RESOURCEGROUP": "local",
        AZURE_VARIABLE: launch.workspace_name,
        "AZUREML_ARM_PROJECT_NAME": launch.experiment,
        "AZUREML_OUTPUT_DIRECTORY": str(RunFolder(launch.run_dir).outputs),
        "AZUREML_SOURCE_DIRECTORY": str(launch.source_dir or launch.work_dir),
        "AZUREML_ENTRY_SCRIPT": launch.job.entry_script or str(launch.job.entry_module),
    }


def _of_elastic(launch: Launch) -> dict[str, str]:
    if launch.job.node_range is None:
        return {}
    least, most = launch.job.node_range
    return {
        run_variables.MIN_NODES_VARIABLE: str(least),
        run_variables.MAX_NODES_VARIABLE: str(most),
        run_variables.REQUEST_VARIABLE: str(resize_request(launch)),
    }


def of_place(launch: Launch, place: RankSlot) -> dict[str, str]:
    """Return a worker's environment variables for its node: local ranks, GPUs, input paths."""
    values: dict[str, str] = {}
    if launch.job.has_launcher:
        values = {
            "LOCAL_RANK": str(place.local_rank),
            "HOROVOD_LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "HOROVOD_LOCAL_SIZE": str(place.local_world_size),
            "NODE_RANK": str(place.node_rank),
            "GROUP_RANK": str(place.node_rank),
            "HOROVOD_CROSS_RANK": str(place.node_rank),
        }
    if gpus := launch.nodes[place.node_rank].gpus:
        own = gpus if launch.job.gpu_visibility == "node" else gpus[place.local_rank : place.local_rank + 1]
        values["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    prepared = launch.prepared[place.node_rank]
    inside = {one.name: one.inside for one in launch.job.inputs if one.inside}
    for name in prepared.inputs:
        path = prepared.input_path(name, place.rank)
        for prefix in PATH_VARIABLES:
            values[prefix + name] = os.path.join(path, inside[name]) if name in inside else path
    return values


def of_rank(launch: Launch, place: RankSlot) -> dict[str, str]:
    """Return the environment variables of one rank. Under Open MPI each worker sets them."""
    own = {"PACELINE_RANK": str(place.rank)}
    if not launch.job.has_launcher:
        return own
    config = tf_config(launch, place) if launch.job.uses_tf_config else None
    return (
        own
        | {
            "RANK": str(place.rank),
            "JAX_PROCESS_ID": str(place.rank),
            "HOROVOD_RANK": str(place.rank),
            "TORCHELASTIC_ERROR_FILE": str(RunFolder(launch.run_dir).worker_error(launch.attempt, place.rank)),
        }
        | ({"TF_CONFIG": config} if config else {})
    )


def defaults(launch: Launch, place: RankSlot) -> dict[str, str]:
    """Return workers' environment variables that the user's shell may override.

    A single process on this machine has no such variables, so it uses as many threads as without Paceline. On other targets
    OMP_NUM_THREADS is set, because the run may have only some of the node's cores.
    """
    cores = launch.nodes[place.node_rank].cores
    threads = {"OMP_NUM_THREADS": str(max(1, cores // place.local_world_size))}
    if not launch.job.has_launcher:
        return {} if launch.job.compute_target == "local" else threads
    values = threads | {
        "PYTHONUNBUFFERED": "1",
        # Show a Python traceback after a crash. Open MPI then installs no handler of its own, which would print addresses.
        "PYTHONFAULTHANDLER": "1",
        # Ranks that iterate over a set of strings, as transformers models do, need the same hash seed.
        "PYTHONHASHSEED": "0",
    }
    if launch.job.distributed_backend in ("gloo", "mpi") and not launch.job.use_gpu:
        # On ranks without a GPU, accelerate needs this variable: otherwise it treats each process as the only process.
        values["ACCELERATE_USE_CPU"] = "true"
    if launch.job.distributed_backend == "mpi":
        # Let torch use huge pages: data between processes is mapped page by page, so an all-reduce of 16 MiB is a third faster.
        values["THP_MEM_ALLOC_ENABLE"] = "1"
        if not launch.remote_shell and launch.starter is None:
            # Turn off Open MPI's TCP, because ranks on one machine use shared memory. With TCP, each rank would open a port on
            # all addresses of the machine, and no option prevents this.
            values["OMPI_MCA_btl"] = "^tcp"
    if interface := launch.nodes[place.node_rank].interface:
        # Without these variables, Gloo and NCCL use the interface of the host's name. An offline laptop can't resolve this
        # name, and on a cluster it may belong to another network.
        values |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return values


def with_paths(command: Command, launch: Launch, shell: Mapping[str, str]) -> Command:
    """Return the command with the PYTHONPATH, variables and PATH of the script's environment.

    PYTHONPATH has the folder that holds only `paceline`, then the user's own folders.
    """
    prepared, users = launch.prepared[command.node_rank], launch.job.environment_variables
    values = of_interpreter(prepared, users, launch.library_dir, shell)
    return replace(command, environment=command.environment | values)


def of_interpreter(
    prepared: NodeSetup, users: Mapping[str, str], library_dir: Path, shell: Mapping[str, str]
) -> dict[str, str]:
    """Return environment variables for the script's interpreter. Variables in `users` have priority."""
    own = users.get("PYTHONPATH", None if prepared.is_isolated else shell.get("PYTHONPATH"))
    path = os.pathsep.join([str(library_dir), own] if own else [str(library_dir)])
    values = {"PYTHONPATH": path, **{name: text for name, text in prepared.variables.items() if name not in users}}
    if prepared.is_isolated and "PYTHONNOUSERSITE" not in users:
        values["PYTHONNOUSERSITE"] = "1"
    if prepared.bin_dir and "PATH" not in users:
        values["PATH"] = os.pathsep.join(part for part in (prepared.bin_dir, shell.get("PATH", os.defpath)) if part)
    return values


def tf_config(launch: Launch, place: RankSlot) -> str:
    """Return the `TF_CONFIG` of a TensorFlow process: all addresses, and the process's role."""
    cluster: dict[str, list[str]] = {}
    for other in launch.places:
        address = f"{launch.nodes[other.node_rank].address}:{launch.ports[2 + other.rank]}"
        cluster.setdefault(other.role, []).append(address)
    task = {"type": place.role, "index": place.index}
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})


def worker_argv(launch: Launch, node_rank: int, *options: str) -> tuple[str, ...]:
    """Return a worker's command line: interpreter, Paceline's worker program, script and arguments.

    Name the worker program by its path: with `-m`, the user's modules in the working directory would come before the
    standard library while Paceline loads.
    """
    # Start the worker program by its path: only its folder is then first on sys.path, and the program removes this entry.
    main = launch.library_dir.joinpath("paceline", "worker", "__main__.py")
    return (
        launch.prepared[node_rank].python,
        str(main),
        *options,
        *(("--kind", "module") if launch.job.entry_module else () if launch.job.is_python else ("--kind", "program")),
        "--",
        launch.job.entry_module or _script(launch),
        *launch.job.arguments,
    )


def _script(launch: Launch) -> str:
    """Return the script's path below the working directory, or a program's name."""
    name = launch.job.entry_script
    if launch.source_dir in (None, launch.work_dir) or launch.job.may_be_on_path:
        return name
    return os.path.relpath(launch.source_dir / name, launch.work_dir)


def watch_dir(launch: Launch) -> Path:
    """Return the node's folder, in memory if possible, for data about its workers."""
    return launch.scratch_dir / f"watch_{launch.attempt}"


def resize_request(launch: Launch) -> Path:
    """Return the node's file whose existence requests a resize of an elastic run at a checkpoint."""
    return watch_dir(launch) / "resize"
