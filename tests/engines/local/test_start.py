"""Workers as each launcher really starts them: how many, where, and with which variables."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from tests.engines.conftest import use_mpirun
from tests.engines.lab import KEEP, SYSTEM, WHEEL, Lab, exit_codes, log_text, seen, wait_for_status

KEEP_ENVIRONMENT = KEEP + "keep(dict(os.environ))\n"


def test_single_process_has_world_size_1(lab: Lab) -> None:
    run = lab.complete(KEEP_ENVIRONMENT + "print('hello')\n", estimator=pl.PyTorch)

    found = seen(run)
    assert (found["PACELINE_RANK"], found["PACELINE_WORLD_SIZE"]) == ("0", "1")
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "HOROVOD_RANK"} & found.keys()
    assert (
        not {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "AZUREML_RUN_ID"}
        & found.keys()
    )
    assert log_text(run) == "hello\n"
    assert run.status == states.COMPLETED
    assert run.record().exit_code == 0
    assert exit_codes(run) == {"0": 0}


@pytest.mark.parametrize(("nodes", "processes"), [(2, 1), (1, 2)], ids=["2x1", "1x2"])
def test_gloo_workers_get_rank_and_local_rank_on_each_simulated_node(lab: Lab, nodes: int, processes: int) -> None:
    run = lab.complete(KEEP_ENVIRONMENT, node_count=nodes, process_count_per_node=processes, distributed_backend="gloo")

    assert [place_of(seen(run, rank)) for rank in range(2)] == [
        (str(rank), "2", str(rank % processes), str(processes), str(rank // processes)) for rank in range(2)
    ]
    assert run.record().attempts[0].nodes == (("local",) if nodes == 1 else ("local-0", "local-1"))


@pytest.mark.parametrize(("nodes", "processes"), [(2, 2), (1, 4), (2, 1)], ids=["2x2", "1x4", "2x1"])
def test_mpirun_gives_each_worker_its_rank_and_local_rank(lab: Lab, mpirun: str, nodes: int, processes: int) -> None:
    run = lab.complete(KEEP_ENVIRONMENT, node_count=nodes, process_count_per_node=processes, distributed_backend="mpi")

    size = nodes * processes
    environments = [seen(run, rank) for rank in range(size)]
    assert [place_of(found) for found in environments] == [
        (str(rank), str(size), str(rank % processes), str(processes), str(rank // processes)) for rank in range(size)
    ]
    # Paceline's rank variables have the same values as Open MPI's own.
    assert [found["OMPI_COMM_WORLD_RANK"] for found in environments] == [found["RANK"] for found in environments]
    if nodes == 1:
        assert [found["OMPI_COMM_WORLD_LOCAL_RANK"] for found in environments] == [
            found["LOCAL_RANK"] for found in environments
        ]


@pytest.mark.parametrize("engine", ["gloo", WHEEL, SYSTEM], ids=["gloo", "mpi-wheel", "mpi-system"])
def test_worker_environment_has_the_rank_and_size_variables_of_torch_jax_and_horovod(
    lab: Lab, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine != "gloo":
        use_mpirun(engine, monkeypatch)
    backend = "gloo" if engine == "gloo" else "mpi"
    run = lab.complete(KEEP_ENVIRONMENT, node_count=2, distributed_backend=backend, max_restarts=3)

    for rank in range(2):
        found = seen(run, rank)
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank),
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": run.id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_ERROR_FILE": str(run.folder.worker_error(1, rank)),
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(rank),
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": str(rank),
            "HOROVOD_CROSS_SIZE": "2",
            "AZUREML_RUN_ID": run.id,
            "AZUREML_ARM_PROJECT_NAME": "lab",
            "PACELINE_RUN_ID": run.id,
            "PACELINE_RUN_DIR": str(run.folder.path),
            "PACELINE_OUTPUT_DIR": str(run.folder.outputs),
            "PACELINE_CHECKPOINT_DIR": str(run.folder.checkpoints),
            "PACELINE_WORKSPACE": str(lab.workspace_dir),
            "PACELINE_ATTEMPT": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        }
        assert {name: found.get(name) for name in expected} == expected
        assert "TF_CONFIG" not in found
    first, second = seen(run, 0), seen(run, 1)
    # Both workers get the same addresses, and JAX's coordinator does not use the port of torch's store.
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["JAX_COORDINATOR_ADDRESS"] == second["JAX_COORDINATOR_ADDRESS"]
    assert first["JAX_COORDINATOR_ADDRESS"] != f"127.0.0.1:{first['MASTER_PORT']}"


@pytest.mark.promise("another-launcher-gave-submitting-shell")
def test_launcher_variables_of_the_submitting_shell_are_dropped(
    lab: Lab, parent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {
        "RANK": "7",
        "WORLD_SIZE": "64",
        "LOCAL_RANK": "5",
        "MASTER_ADDR": "elsewhere",
        "MASTER_PORT": "1",
        "SLURM_PROCID": "7",
        "SLURM_JOB_ID": "99",
        "PMI_RANK": "7",
        "PMIX_RANK": "7",
        "OMPI_COMM_WORLD_LOCAL_RANK": "5",
        "TF_CONFIG": "{}",
        "JAX_PROCESS_ID": "7",
        "TORCHELASTIC_RUN_ID": "other",
        "PACELINE_RUN_ID": "other",
        "PACELINE_RUN_DIR": "/elsewhere",
    }
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("USERS_OWN", "kept; as it is\nhere")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "debug")

    found = seen(lab.complete(KEEP_ENVIRONMENT, **parent))

    assert {name: value for name, value in foreign.items() if found.get(name) == value} == {}
    assert not [name for name in found if name.startswith("SLURM_")]
    assert found["USERS_OWN"] == "kept; as it is\nhere"
    assert found["HOROVOD_LOG_LEVEL"] == "debug"


@pytest.mark.promise("user-set-never-overwritten")
def test_paceline_overwrites_no_environment_variable_that_the_user_has_set(
    lab: Lab, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PYTHONUNBUFFERED", "0")
    mine = {"MASTER_ADDR": "127.0.0.2", "HOROVOD_CROSS_SIZE": "9", "NAME": "a 'b' \"c\" $d `e`\n;ü=", "EMPTY": ""}

    run = lab.complete(KEEP_ENVIRONMENT, environment_variables=mine, **way)

    for rank in range(run.record().job.world_size):  # type: ignore[union-attr]
        found = seen(run, rank)
        assert {name: found.get(name) for name in mine} == mine
        assert (found["OMP_NUM_THREADS"], found["PYTHONUNBUFFERED"]) == ("3", "0")


def test_job_variables_override_those_of_the_shell(
    lab: Lab, parent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (lab.folder / "own").mkdir()
    (lab.folder / "own" / "mine.py").write_text("WHERE = 'PYTHONPATH'\n")
    script = KEEP_ENVIRONMENT + "import mine, paceline; assert mine.WHERE == 'PYTHONPATH'\n"

    variables = {"OMP_NUM_THREADS": "5", "PYTHONPATH": str(lab.folder / "own")}
    found = seen(lab.complete(script, environment_variables=variables, **parent))

    assert found["OMP_NUM_THREADS"] == "5"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores for two runs at once")
@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_workers_see_the_gpus_of_their_node_and_concurrent_runs_get_different_gpus(
    lab: Lab, any_mpirun: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_GPUS", "3,5")
    gate = lab.folder / "gate"
    wait = f"import time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    alone = lab.submit(KEEP_ENVIRONMENT + wait, use_gpu=True)
    other = lab.submit(KEEP_ENVIRONMENT + wait, use_gpu=True, distributed_backend=backend)
    for run in (alone, other):
        wait_for_status(run, states.RUNNING)
    gate.touch()
    both = lab.complete(KEEP_ENVIRONMENT, use_gpu=True, node_count=2, distributed_backend=backend)
    for run in (alone, other):
        run.wait_for_completion()

    assert [seen(run)["CUDA_VISIBLE_DEVICES"] for run in (alone, other)] == ["3", "5"]
    assert [seen(both, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["3", "5"]
    with pytest.raises(pl.errors.TargetError, match="Ask for at most 2 workers"):
        lab.submit("", use_gpu=True, process_count_per_node=3, distributed_backend=backend)


@pytest.mark.promise("tensorflow-s-workers-parameter-servers")
def test_tf_config_gives_each_tensorflow_worker_its_index_and_the_addresses_of_all_workers(lab: Lab) -> None:
    run = lab.complete(KEEP_ENVIRONMENT, estimator=pl.TensorFlow, node_count=2, distributed_backend="tensorflow")

    configs = [json.loads(seen(run, rank)["TF_CONFIG"]) for rank in range(2)]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert set(configs[0]["cluster"]) == {"worker"}
    assert len(set(configs[0]["cluster"]["worker"])) == 2


@pytest.mark.promise("tensorflow-s-workers-parameter-servers")
def test_parameter_servers_are_ended_once_the_workers_are_done(lab: Lab) -> None:
    script = """
        import json, os, socket, time
        config = json.loads(os.environ["TF_CONFIG"])
        task, cluster = config["task"], config["cluster"]
        host, port = cluster["ps"][0].split(":")
        if task["type"] == "ps":
            server = socket.create_server((host, int(port)))
            while True:
                connection, _ = server.accept()
                connection.sendall(b"parameters")
                connection.close()
        assert len(cluster["worker"]) == 2, cluster
        while True:
            try:
                print(task["index"], socket.create_connection((host, int(port))).recv(100).decode())
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    """
    run = lab.complete(
        script, estimator=pl.TensorFlow, distributed_backend="ps", worker_count=2, parameter_server_count=1
    )

    assert [log_text(run, rank) for rank in range(2)] == ["0 parameters\n", "1 parameters\n"]
    assert exit_codes(run) == {"0": 0, "1": 0, "2": 143}


def place_of(found: dict[str, str]) -> tuple[str, ...]:
    return tuple(found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"))
