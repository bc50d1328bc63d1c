"""Command lines of each engine, as text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.containers import ContainerEngine, Mount, wrap
from paceline.containers.command import INSIDE, distinct
from paceline.errors import LauncherError
from paceline.job.plan import NodeSetup
from paceline.launchers import environment, get_launcher
from tests.helpers import make_job, make_launch

PODMAN = ContainerEngine(kind="podman", path="/usr/bin/podman", version="5")
ROOTLESS = ContainerEngine(kind="podman", path="/usr/bin/podman", version="5", is_rootless=True)
DOCKER = ContainerEngine(kind="docker", path="/usr/bin/docker", version="27")
ROOTLESS_DOCKER = ContainerEngine(kind="docker", path="/usr/bin/docker", version="27", is_rootless=True)
APPTAINER = ContainerEngine(kind="apptainer", path="/usr/bin/apptainer", version="1.3", is_rootless=True)
SINGULARITY = ContainerEngine(kind="singularity", path="/usr/bin/singularity", version="4.1", is_rootless=True)


@pytest.fixture
def ordinary_user(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 1001)
    monkeypatch.setattr(os, "getgroups", lambda: [1001, 27, 44])


def wrapped(engine=PODMAN, *, gpus=0, prepared=None, image="img", shell=None, options=None, **values):
    """The first command of a launch, in a container."""
    launch = make_launch(
        make_job(**values),
        gpus=gpus,
        prepared=(prepared or NodeSetup(python="python3", is_isolated=True),) * values.get("node_count", 1),
    )
    command = get_launcher(launch.job.launcher).commands(launch)[0]
    command = environment.with_paths(command, launch, shell or {})
    return wrap(command, launch, engine=engine, image=image, shell=shell, **(options or {}))


def test_podman_command_line_has_the_mounts_user_network_and_worker_command():
    command = wrapped(arguments=("--lr", "1"))
    run = "/shared/team/.paceline/runs/digits_1700000000_00000001"
    package = str(Path(INSIDE).parent.parent)
    shown = " ".join(word for word in command.argv if "--env" not in word and not word.startswith(("_PACE", "PACE")))
    assert shown == (
        "/usr/bin/podman run --rm --pull=never --log-driver=none --no-healthcheck "
        "--name paceline-digits_1700000000_00000001-1-0 --label paceline.run=digits_1700000000_00000001 "
        "--network=host --pid=host --ipc=host --security-opt label=disable "
        f"--user={os.getuid()}:{os.getgid()} "
        + "".join(f"--mount {text} " for text in sorted_mounts(package, run))
        + f"--workdir {run}/work --entrypoint=python3 -- img -I -S {INSIDE} --home /tmp --home /var/tmp "
        "--home /dev/shm/paceline-0 -- python3 /shared/team/.paceline/lib/0/paceline/worker/__main__.py -- "
        "train.py --lr 1"
    )


def sorted_mounts(package, run):
    paths = {run: False, "/dev/shm/paceline-0": False, "/shared/team/.paceline/lib/0": True, package: True}
    return [
        f"type=bind,source={path},target={path}{',readonly' if read_only else ''}"
        for path, read_only in sorted(paths.items(), key=lambda item: item[0].count("/"))
    ]


@pytest.mark.usefixtures("ordinary_user")
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (PODMAN, ["--user=1000:1001"]),
        # In rootless podman's user namespace, root is the submitting user. --userns=keep-id keeps the user's own id instead.
        (ROOTLESS, ["--userns=keep-id", "--user=1000:1001"]),
        (DOCKER, ["--user=1000:1001", "--group-add", "27", "--group-add", "44"]),
        (ROOTLESS_DOCKER, ["--user=0:0"]),
    ],
)
def test_container_runs_with_the_user_id_of_the_submitter(engine, words):
    argv = wrapped(engine).argv
    start = argv.index("label=disable") + 1
    assert list(argv[start : argv.index("--mount")]) == words


def test_values_of_environment_variables_do_not_appear_on_the_command_line_of_the_container():
    command = wrapped(environment_variables={"TOKEN": "hunter2", "PATH": "/users/own"}, arguments=("x",))
    assert not [word for word in command.argv if "hunter2" in word or "/users/own" in word]
    names = [name for flag, name in zip(command.argv, command.argv[1:], strict=False) if flag == "--env"]
    assert set(names) <= set(command.environment)
    assert command.environment["_PACELINE_SET_TOKEN"] == "hunter2"
    assert command.environment["PACELINE_RUN_ID"] == "digits_1700000000_00000001"
    # The user's PATH is passed under another name, because the container client uses PATH itself.
    assert "PATH" not in command.environment
    assert command.environment["_PACELINE_SET_PATH"] == "/users/own"


def test_container_gets_omp_num_threads_but_not_paths_of_the_submitting_shell():
    command = wrapped(
        distributed_backend="gloo", shell={"OMP_NUM_THREADS": "3", "LD_LIBRARY_PATH": "/host", "PATH": "/host/bin"}
    )
    names = "".join(command.environment)
    assert "LD_LIBRARY_PATH" not in names
    assert "SET_PATH" not in names
    assert command.environment["_PACELINE_SET_OMP_NUM_THREADS"] == "3"
    assert command.environment["_PACELINE_DEFAULT_PYTHONUNBUFFERED"] == "1"
    assert command.defaults == {}


def test_container_command_uses_python_and_programs_of_the_isolated_environment():
    argv = wrapped(prepared=NodeSetup(python="/env/bin/python", bin_dir="/env/bin", is_isolated=True)).argv
    assert "--entrypoint=/env/bin/python" in argv
    assert argv[argv.index("--path") + 1] == "/env/bin"


def test_container_uses_shared_memory_of_the_host_unless_a_size_or_another_container_is_given():
    assert "--ipc=host" in wrapped().argv
    sized = wrapped(options={"shm_size": "8g"}).argv
    assert "--shm-size=8g" in sized
    assert "--ipc=host" not in sized
    joined = wrapped(options={"shm_size": "8g", "memory": "holder"}).argv
    assert "--ipc=container:holder" in joined
    assert "--shm-size=8g" not in joined


@pytest.mark.parametrize(
    ("engine", "word"), [(PODMAN, "--device=nvidia.com/gpu=all"), (DOCKER, "--gpus=all"), (APPTAINER, "--nv")]
)
def test_container_of_a_gpu_job_can_use_all_gpus_and_gets_cuda_visible_devices(engine, word):
    command = wrapped(engine, gpus=2, use_gpu=True)
    assert word in command.argv
    assert "CUDA_VISIBLE_DEVICES" in "".join(command.environment)
    assert word not in wrapped(engine).argv


def test_apptainer_command_line_has_the_working_folder_image_and_worker_command():
    command = wrapped(APPTAINER, image="docker://img", environment_variables={"TOKEN": "x"})
    assert command.argv[:4] == ("/usr/bin/apptainer", "exec", "--cleanenv", "--no-home")
    end = command.argv.index("docker://img")
    assert command.argv[end - 2 : end + 2] == ("--pwd", "/shared/team/.paceline/runs/digits_1700000000_00000001/work",
                                               "docker://img", "python3")  # fmt: skip
    assert command.argv[end + 1 : end + 7] == ("python3", "-I", "-S", INSIDE, "--home", "/dev/shm/paceline-0")
    assert command.environment["APPTAINERENV__PACELINE_SET_TOKEN"] == "x"
    assert command.environment["PACELINE_RUN_ID"]
    assert wrapped(SINGULARITY).environment["SINGULARITYENV_PACELINE_RUN_ID"]


def test_mpirun_and_its_workers_share_one_container():
    prepared = NodeSetup(
        python="python3",
        is_isolated=True,
        container={"engine": PODMAN.to_json(), "image": "img", "mounts": []},
        open_mpi=("/opt/mpi/bin/mpirun", (4, 1)),
    )
    command = wrapped(prepared=prepared, process_count_per_node=4, distributed_backend="mpi")
    assert command.is_launcher
    assert command.ranks == (0, 1, 2, 3)
    words = command.argv[command.argv.index(INSIDE) :]
    assert words[words.index("--") + 1] == "/opt/mpi/bin/mpirun"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/a b/ü:c", "type=bind,source=/a b/ü:c,target=/a b/ü:c"),
        ("/a,b", 'type=bind,"source=/a,b","target=/a,b"'),
        ('/a"b', 'type=bind,"source=/a""b","target=/a""b"'),
        ("/a=b", "type=bind,source=/a=b,target=/a=b"),
    ],
)
def test_path_with_spaces_commas_or_quotes_is_quoted_in_the_mount_option(path, word):
    assert word in wrapped(options={"mounts": [Mount(path=Path(path))]}).argv


@pytest.mark.parametrize("path", ["relative/path", "/line\nbreak"])
def test_relative_path_or_path_with_a_line_break_cannot_be_mounted(path):
    with pytest.raises(LauncherError, match="can't be mounted"):
        wrapped(options={"mounts": [Mount(path=Path(path))]})


def test_folder_is_mounted_at_another_path_inside_the_container_if_requested():
    launch = make_launch(make_job())
    made, around = Mount(path=Path("/a/try"), at=Path("/a/b/layer")), Mount(path=Path("/a/b"))
    command = get_launcher("processes").commands(launch)[0]
    argv = wrap(command, launch, engine=PODMAN, image="img", mounts=[made, around]).argv
    assert "type=bind,source=/a/try,target=/a/b/layer" in argv
    assert distinct([made, around, Mount(path=Path("/a/b/layer/x"))]) == [
        around,
        made,
        Mount(path=Path("/a/b/layer/x")),
    ]


def test_nested_folder_is_not_mounted_twice():
    def mount(path, read_only=False):
        return Mount(path=Path(path), read_only=read_only)

    assert distinct([mount("/a/b"), mount("/a"), mount("/ab")]) == [mount("/a"), mount("/ab")]
    # A read-only folder within a writable folder needs a mount of its own, and so does a writable folder within a read-only one.
    assert distinct([mount("/a/b", True), mount("/a")]) == [mount("/a"), mount("/a/b", True)]
    assert distinct([mount("/a/b"), mount("/a", True), mount("/a/b/c", True)]) == [
        mount("/a", True),
        mount("/a/b"),
        mount("/a/b/c", True),
    ]
    assert distinct([mount("/a", True), mount("/a")]) == [mount("/a")]
