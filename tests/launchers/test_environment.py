from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.job.job import RANK_VARIABLES
from paceline.job.plan import Command, Node
from paceline.launchers import environment
from paceline.launchers.mpi import MPIRUN_VARIABLE
from paceline.observe.node.gpus import GPUS_VARIABLE
from paceline.snapshot import LIMIT_VARIABLE
from paceline.targets.local_leases import LEASES_VARIABLE
from tests.helpers import RUN_ID, make_job, make_launch

RUN_DIR = f"/shared/team/.paceline/runs/{RUN_ID}"
TWO_BY_TWO = {"distributed_backend": "gloo", "node_count": 2, "process_count_per_node": 2}


# --- tests of variables of the submitting shell


@pytest.mark.parametrize(
    "name",
    [
        *RANK_VARIABLES,
        *("MASTER_ADDR", "MASTER_PORT", "ROLE_RANK", "JAX_COORDINATOR_ADDRESS", "MPI_LOCALRANKID"),
        *("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PRTE_LAUNCHED", "TORCHELASTIC_RUN_ID", "HOROVOD_RANK"),
        *("AZUREML_RUN_ID", "SLURM_PROCID", "SLURM_JOB_ID", "PACELINE_WORKSPACE", "PACELINE_SUPERVISOR"),
    ],
)
def test_rank_variables_of_the_submitting_process_are_dropped(name):
    assert environment.inherited({name: "1", "HOME": "/me"}) == {"HOME": "/me"}


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_DEBUG", "WANDB_API_KEY", "RANKS"),
        *("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "HOROVOD_LOG_LEVEL"),
        *(MPIRUN_VARIABLE, GPUS_VARIABLE, LEASES_VARIABLE, LIMIT_VARIABLE),
        *("PACELINE_SCHEDULING", "PACELINE_TRACKERS", "PACELINE_SEPARATE_WORKERS", "PACELINE_STACKS_SIGNAL"),
    ],
)
def test_settings_such_as_path_and_nccl_debug_are_inherited_from_the_submitting_shell(name):
    assert environment.inherited({name: "1"}) == {name: "1"}
    assert environment.inherited({name: "1", "OMPI_COMM_WORLD_RANK": "0"}) == {name: "1"}


@pytest.mark.parametrize("name", ["OMPI_MCA_btl", "PRTE_MCA_plm", "PMIX_MCA_gds"])
def test_open_mpi_settings_of_the_shell_are_inherited_unless_the_shell_runs_under_mpirun(name):
    assert environment.inherited({name: "1"}) == {name: "1"}
    assert environment.inherited({name: "1", "OMPI_COMM_WORLD_RANK": "0"}) == {}


def test_filtering_inherited_variables_does_not_change_the_given_dict():
    given = {"RANK": "1"}
    environment.inherited(given)
    assert given == {"RANK": "1"}


# --- tests of the variables of every worker


def test_workers_of_a_run_get_variables_for_its_id_folders_and_world_size():
    launch = make_launch(make_job(**TWO_BY_TWO, max_restarts=3), attempt=2)
    assert environment.of_run(launch) == {
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20000",
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:20001",
        "JAX_NUM_PROCESSES": "4",
        "HOROVOD_SIZE": "4",
        "HOROVOD_CROSS_SIZE": "2",
        "AZ_BATCHAI_PYTORCH_INIT_METHOD": "tcp://10.0.0.1:20000",
        "AZ_BATCH_MASTER_NODE": "10.0.0.1:20000",
        "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.1",
        "AZUREML_RUN_ID": RUN_ID,
        "AZUREML_ARM_SUBSCRIPTION": "local",
        "AZUREML_ARM_RESOURCEGROUP": "local",
        "AZUREML_ARM_WORKSPACE_NAME": "team",
        "AZUREML_ARM_PROJECT_NAME": "digits",
        "AZUREML_OUTPUT_DIRECTORY": f"{RUN_DIR}/outputs",
        "AZUREML_SOURCE_DIRECTORY": f"{RUN_DIR}/work",
        "AZUREML_ENTRY_SCRIPT": "train.py",
        "PACELINE_RUN_ID": RUN_ID,
        "PACELINE_RUN_DIR": RUN_DIR,
        "PACELINE_OUTPUT_DIR": f"{RUN_DIR}/outputs",
        "PACELINE_CHECKPOINT_DIR": f"{RUN_DIR}/checkpoints",
        "PACELINE_WORKSPACE": "/shared/team/.paceline",
        "PACELINE_ATTEMPT": "2",
        "PACELINE_MAX_RESTARTS": "3",
        "PACELINE_WORLD_SIZE": "4",
        "PACELINE_STALL_FILE": f"{launch.run_dir}/attempts/2/stalled.jsonl",
        "PACELINE_WATCH_DIR": "/dev/shm/paceline-0/watch_2",
        "PACELINE_RUN_SECRET": "5e" * 32,
    }


@pytest.mark.promise("one-process-without-backend-variable")
def test_job_with_a_single_process_sets_only_paceline_variables():
    # Regression: scripts detect torchrun by RANK or MASTER_ADDR. These variables were set, so such scripts did not run
    # as a single process.
    launch = make_launch(make_job(environment_variables={"RANK": "-1"}))
    place = launch.places[0]
    found = environment.of_run(launch) | environment.of_place(launch, place) | environment.of_rank(launch, place)
    assert {name for name in found if not name.startswith("PACELINE_")} == set()
    # No default variable may make the worker behave differently from `python train.py`.
    assert environment.defaults(launch, place) == {}
    assert (found["PACELINE_RANK"], found["PACELINE_WORLD_SIZE"]) == ("0", "1")


def test_omp_num_threads_of_a_single_remote_process_is_the_number_of_its_granted_cores():
    launch = make_launch(make_job(compute_target="cluster"), cores=4)
    assert environment.defaults(launch, launch.places[0]) == {"OMP_NUM_THREADS": "4"}


def test_azureml_submission_sets_azureml_variables():
    launch = make_launch(make_job(environment_variables={"AZUREML_ARM_WORKSPACE_NAME": "lab"}))
    found = environment.of_run(launch)
    assert (found["AZUREML_RUN_ID"], found["AZUREML_ENTRY_SCRIPT"]) == (RUN_ID, "train.py")


def test_time_limit_sets_paceline_end_time():
    launch = make_launch(make_job(), ends_at=1_800_000_000.4)
    assert environment.of_run(launch)["PACELINE_END_TIME"] == "1800000000"


def test_launch_repr_hides_the_run_secret_and_an_empty_secret_sets_no_environment_variable():
    assert "5e5e" not in repr(make_launch(make_job()))
    assert "PACELINE_RUN_SECRET" not in environment.of_run(make_launch(make_job(), secret=""))


def test_variables_of_a_worker_have_its_node_and_local_rank():
    launch = make_launch(make_job(**TWO_BY_TWO))
    assert environment.of_place(launch, launch.places[3]) == {
        "LOCAL_RANK": "1",
        "HOROVOD_LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "HOROVOD_CROSS_RANK": "1",
    }


def test_each_framework_gets_the_rank_number_in_its_own_variable():
    launch = make_launch(make_job(**TWO_BY_TWO), attempt=2)
    assert environment.of_rank(launch, launch.places[3]) == {
        "PACELINE_RANK": "3",
        "RANK": "3",
        "JAX_PROCESS_ID": "3",
        "HOROVOD_RANK": "3",
        "TORCHELASTIC_ERROR_FILE": f"{RUN_DIR}/attempts/2/error_3.json",
    }


@pytest.mark.parametrize(
    ("visibility", "devices"), [("worker", ["0", "1", "2", "3"]), ("node", ["0,1", "0,1", "2,3", "2,3"])]
)
def test_workers_see_their_own_gpu_or_all_gpus_of_the_node(visibility, devices):
    launch = make_launch(make_job(**TWO_BY_TWO, gpu_visibility=visibility), gpus=2)
    assert [environment.of_place(launch, place)["CUDA_VISIBLE_DEVICES"] for place in launch.places] == devices


def test_cuda_visible_devices_is_not_set_for_a_job_without_gpus():
    launch = make_launch(make_job())
    assert "CUDA_VISIBLE_DEVICES" not in environment.of_place(launch, launch.places[0])


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(8, 1, "8"), (8, 2, "4"), (8, 3, "2"), (2, 4, "1"), (1, 1, "1")]
)
def test_thread_count_is_the_cores_of_the_node_divided_by_its_workers(cores, workers, threads):
    job = make_job(distributed_backend="gloo", process_count_per_node=workers)
    launch = make_launch(job, cores=cores)
    found = environment.defaults(launch, launch.places[0])
    assert (found["OMP_NUM_THREADS"], found["PYTHONUNBUFFERED"], found["PYTHONFAULTHANDLER"]) == (threads, "1", "1")


@pytest.mark.parametrize("backend", ["gloo", "nccl", "mpi", "tensorflow"])
def test_all_ranks_of_every_attempt_share_a_hash_seed(backend):
    # Regression: if two ranks had different hash seeds, a pipeline refused models that iterate over a set of strings.
    job = make_job(**TWO_BY_TWO | {"distributed_backend": backend}, use_gpu=backend == "nccl")
    launches = [make_launch(job, attempt=attempt, gpus=2) for attempt in (1, 2)]
    assert {environment.defaults(one, place)["PYTHONHASHSEED"] for one in launches for place in one.places} == {"0"}


@pytest.mark.parametrize(("backend", "value"), [("mpi", "1"), ("gloo", None)])
def test_torch_huge_pages_variable_is_set_only_for_the_mpi_backend(backend, value):
    launch = make_launch(make_job(distributed_backend=backend, process_count_per_node=2))
    assert environment.defaults(launch, launch.places[0]).get("THP_MEM_ALLOC_ENABLE") == value


@pytest.mark.promise("workers-without-gpus-find-other")
@pytest.mark.parametrize(
    ("backend", "use_gpu", "value"),
    [
        ("gloo", False, "true"),
        ("mpi", False, "true"),
        ("gloo", True, None),
        ("nccl", True, None),
        ("tensorflow", False, None),
    ],
)
def test_accelerate_variables_select_cpu_for_cpu_jobs(backend, use_gpu, value):
    # Regression: with gloo, a script that uses accelerate printed "processes 1" on both workers, and each worker
    # trained a separate model.
    launch = make_launch(make_job(distributed_backend=backend, process_count_per_node=2, use_gpu=use_gpu))
    assert environment.defaults(launch, launch.places[0]).get("ACCELERATE_USE_CPU") == value


def test_gloo_and_nccl_use_the_network_interface_of_each_node_address():
    nodes = tuple(
        Node(node_rank=rank, name=f"n{rank}", address=f"10.0.0.{rank}", cores=1, interface=f"eth{rank}")
        for rank in (0, 1)
    )
    launch = make_launch(make_job(**TWO_BY_TWO), nodes=nodes)
    found = [environment.defaults(launch, place) for place in launch.places]
    assert [values["GLOO_SOCKET_IFNAME"] for values in found] == ["eth0", "eth0", "eth1", "eth1"]
    assert [values["NCCL_SOCKET_IFNAME"] for values in found] == ["eth0", "eth0", "eth1", "eth1"]
    far = make_launch(make_job(**TWO_BY_TWO))
    assert "GLOO_SOCKET_IFNAME" not in environment.defaults(far, far.places[0])


# --- tests of PYTHONPATH


@pytest.mark.parametrize(
    ("variables", "shell", "path"),
    [
        ({}, {}, "/shared/team/.paceline/lib/0"),
        ({}, {"PYTHONPATH": "/mine:/other"}, "/shared/team/.paceline/lib/0:/mine:/other"),
        ({"PYTHONPATH": "/job"}, {"PYTHONPATH": "/mine"}, "/shared/team/.paceline/lib/0:/job"),
        ({"PYTHONPATH": ""}, {"PYTHONPATH": "/mine"}, "/shared/team/.paceline/lib/0"),
    ],
)
def test_pythonpath_has_paceline_before_the_users_folders(variables, shell, path):
    launch = make_launch(make_job(environment_variables=variables))
    command = Command(argv=("x",), environment={"A": "1"}, log=Path("log"))
    found = environment.with_paths(command, launch, shell)
    assert found.environment == {"A": "1", "PYTHONPATH": path}
    assert command.environment == {"A": "1"}


# --- tests of TF_CONFIG


def test_tf_config_has_cluster_and_task():
    job = make_job(distributed_backend="ps", worker_count=3, parameter_server_count=2, node_count=2)
    launch = make_launch(job)
    cluster = {
        "worker": ["10.0.0.1:20002", "10.0.0.1:20003", "10.0.0.1:20004"],
        "ps": ["10.0.0.2:20005", "10.0.0.2:20006"],
    }
    found = [json.loads(environment.tf_config(launch, place)) for place in launch.places]
    assert [config["cluster"] for config in found] == [cluster] * 5
    assert [(config["task"]["type"], config["task"]["index"]) for config in found] == [
        *(("worker", index) for index in range(3)),
        *(("ps", index) for index in range(2)),
    ]
    assert {config["environment"] for config in found} == {"cloud"}


def test_tf_config_is_valid_json():
    launch = make_launch(make_job(distributed_backend="tensorflow"))
    assert environment.of_rank(launch, launch.places[0])["TF_CONFIG"] == (
        '{"cluster": {"worker": ["10.0.0.1:20002"]}, "task": {"type": "worker", "index": 0}, "environment": "cloud"}'
    )


@pytest.mark.parametrize("values", [{}, {"distributed_backend": "gloo"}])
def test_jobs_without_the_tensorflow_backend_have_no_tf_config(values):
    launch = make_launch(make_job(**values))
    assert "TF_CONFIG" not in environment.of_rank(launch, launch.places[0])


# --- tests of the command line


def test_worker_command_line_has_interpreter_worker_program_script_and_arguments():
    launch = make_launch(make_job(arguments=("--epochs", "5", "--", "a b", "; rm -rf /", "")))
    assert environment.worker_argv(launch, 0, "--mpi") == (
        "/env/bin/python",
        "/shared/team/.paceline/lib/0/paceline/worker/__main__.py",
        "--mpi",
        "--",
        "train.py",
        *("--epochs", "5", "--", "a b", "; rm -rf /", ""),
    )
