from __future__ import annotations

import json

import pytest

from paceline.launchers.processes import ProcessesLauncher
from tests.helpers import RUN_ID, make_job, make_launch


def commands(job, **values):
    return ProcessesLauncher().commands(make_launch(job, **values))


def test_job_without_a_backend_starts_one_process():
    (command,) = commands(make_job(arguments=("--a",)))
    assert [command.environment[name] for name in ("PACELINE_RANK", "PACELINE_WORLD_SIZE")] == ["0", "1"]
    assert command.argv[-3:] == ("--", "train.py", "--a")
    assert (command.ranks, command.node_rank, command.is_launcher) == ((0,), 0, False)


def test_job_on_two_nodes_with_two_workers_each_has_a_command_per_worker():
    found = commands(make_job(distributed_backend="gloo", node_count=2, process_count_per_node=2))
    table = [
        (c.node_rank, c.ranks, c.environment["RANK"], c.environment["LOCAL_RANK"], c.environment["NODE_RANK"])
        for c in found
    ]
    assert table == [
        (0, (0,), "0", "0", "0"),
        (0, (1,), "1", "1", "0"),
        (1, (2,), "2", "0", "1"),
        (1, (3,), "3", "1", "1"),
    ]
    assert {c.environment["WORLD_SIZE"] for c in found} == {"4"}
    assert {c.environment["MASTER_ADDR"] for c in found} == {"10.0.0.1"}
    assert not any(c.is_launcher for c in found)


def test_each_worker_has_its_own_log():
    found = commands(make_job(distributed_backend="gloo", node_count=2), attempt=3)
    assert [str(c.log) for c in found] == [
        f"/shared/team/.paceline/runs/{RUN_ID}/attempts/3/rank_{rank}.log" for rank in range(2)
    ]


def test_all_workers_have_the_same_command_line():
    found = commands(make_job(distributed_backend="gloo", node_count=2, arguments=("--epochs", "5")))
    assert len({c.argv for c in found}) == 1
    assert found[0].argv[0] == "/env/bin/python"
    assert found[0].argv[-4:] == ("--", "train.py", "--epochs", "5")


@pytest.mark.parametrize("name", ["MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "AZUREML_RUN_ID", "MINE"])
def test_environment_variables_of_a_job_override_those_of_paceline_for_its_workers(name):
    job = make_job(distributed_backend="gloo", node_count=2, environment_variables={name: "users"})
    for command in commands(job, gpus=1):
        assert command.environment[name] == "users"


def test_omp_num_threads_is_a_default_that_the_shell_can_override():
    # OMP_NUM_THREADS of the shell overrides this default.
    (command,) = commands(make_job(distributed_backend="gloo"))
    assert command.defaults["OMP_NUM_THREADS"] == "8"
    assert "OMP_NUM_THREADS" not in command.environment


def test_tf_config_names_parameter_servers():
    job = make_job(distributed_backend="ps", worker_count=1, parameter_server_count=1)
    tasks = [json.loads(c.environment["TF_CONFIG"])["task"]["type"] for c in commands(job)]
    assert tasks == ["worker", "ps"]
