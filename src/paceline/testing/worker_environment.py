"""The environment that a worker must find on any target: the tables of docs/worker-environment.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.job.plan import Launch, Node, NodeSetup
from paceline.launchers import environment
from paceline.runs.run import Run
from paceline.system.run_variables import OUTPUT_VARIABLE

#: Prefixes of the variables that mpirun sets.
_MPIRUNS = ("OMPI_", "PMIX_", "PRTE_")


def expected(run: Run, rank: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a worker must have, except PYTHONPATH and PATH.

    variables: The worker's real variables, which supply the values that the target may choose, such as addresses.
    """
    record = run.record()
    job = record.job
    assert job is not None
    cores = int(variables.get("OMP_NUM_THREADS", 1))
    attempt = record.attempts[-1]
    launch = Launch(
        job=job,
        run_id=run.id,
        experiment=record.experiment,
        workspace_name=run.folder.path.parent.parent.name,
        run_dir=Path(variables["PACELINE_RUN_DIR"]),
        work_dir=Path(variables.get("AZUREML_SOURCE_DIRECTORY", "/nowhere")),
        scratch_dir=Path(variables["PACELINE_WATCH_DIR"]).parent,
        library_dir=Path("/nowhere"),
        nodes=tuple(
            Node(node_rank=number, name=name, address=variables.get("MASTER_ADDR", ""), cores=cores)
            for number, name in enumerate(attempt.nodes)
        ),
        prepared=(NodeSetup(python="python"),) * len(attempt.nodes),
        ports=(
            int(variables.get("MASTER_PORT", 0)),
            int(variables.get("JAX_COORDINATOR_ADDRESS", "0").rpartition(":")[2]),
        ),
        attempt=attempt.number,
        # Copy this value from the worker's environment, because only the target knows whether all nodes are on one machine.
        remote_shell=() if "OMPI_MCA_btl" in variables else ("ssh",),
        secret=variables["PACELINE_RUN_SECRET"],
    )
    place = launch.places[rank]
    return {
        **environment.of_run(launch),
        **environment.of_place(launch, place),
        **environment.of_rank(launch, place),
        **{name: variables[name] for name in environment.defaults(launch, place)},
        **job.environment_variables,
        OUTPUT_VARIABLE: variables[OUTPUT_VARIABLE],
    }


def foreign(variables: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of variables that a worker has, but must not have.

    wanted: The result of `expected`.
    """
    rest = set(variables) - set(wanted) - set(environment.inherited(variables))
    return sorted(name for name in rest if not ("OMPI_COMM_WORLD_RANK" in variables and name.startswith(_MPIRUNS)))


#: Variable whose value depends on where the run takes place -> placeholder for this value.
_OF_THE_PLACE = {
    "MASTER_ADDR": "<address>",
    "MASTER_PORT": "<port>",
    "AZ_BATCHAI_MPI_MASTER_NODE": "<address>",
    OUTPUT_VARIABLE: "<file>",
}


def comparable(variables: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the variables `names` with addresses, ports, folders and ids replaced.

    Variables of different runs then compare equal.
    """
    places = {
        variables["PACELINE_RUN_DIR"]: "<run folder>",
        variables.get("AZUREML_SOURCE_DIRECTORY"): "<working directory>",
        variables["PACELINE_WORKSPACE"]: "<workspace>",
        variables["PACELINE_RUN_ID"]: "<run>",
        variables.get("JAX_COORDINATOR_ADDRESS"): "<address>:<port>",
        variables.get("AZ_BATCH_MASTER_NODE"): "<address>:<port>",
        variables["PACELINE_RUN_SECRET"]: "<secret>",
        variables["PACELINE_WATCH_DIR"]: "<watch folder>",
    }
    same = {}
    for name in names:
        text = variables[name]
        for place in sorted(filter(None, places), key=len, reverse=True):
            text = text.replace(place, places[place])
        same[name] = _OF_THE_PLACE.get(name, text)
    return same
