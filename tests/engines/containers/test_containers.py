"""Workers in real containers of a real podman and a real docker: what they see, how they end, what remains of them."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline import containers
from paceline.containers import ContainerEngine, ImagePython, Layer, Mount
from paceline.errors import EnvironmentBuildError, LauncherError, UserError
from paceline.job.plan import Launch, StartedCommand
from paceline.rerun import _with_locked_environment
from paceline.runs import states
from paceline.runs.execute import Beside
from paceline.system import processes
from paceline.targets.local_nodes import LocalNodes
from tests.engines.beside import STOP
from tests.engines.beside import WAITS as WAITS_BESIDE
from tests.engines.conftest import require_engine
from tests.engines.container_lab import (
    ANOTHER_ENTRY,
    IMAGE,
    OLD_PYTHON,
    WITHOUT_PYTHON,
    Docker,
    Podman,
    command_lines,
    commands,
    make_launch,
    words_of,
)
from tests.engines.lab import KEEP, seen, wait_for_end, wait_for_file
from tests.environments.wheels import make_wheel
from tests.helpers import wait_until

Machine = Podman | Docker

#: This script waits for SIGTERM and reports the signal.
WAITS = """\
    import os, signal, sys, time
    def leave(number, frame):
        open("outputs/asked", "w").write("SIGTERM")
        sys.exit(3)
    signal.signal(signal.SIGTERM, leave)
    open("outputs/pid", "w").write(str(os.getpid()))
    while True:
        time.sleep(0.05)
    """

#: This script prints the root folder of its container and waits until it may stop.
BESIDE = (
    "import json, os\n"
    "with open('outputs/root_' + os.environ['PACELINE_RANK'], 'w') as file:\n"
    "    json.dump([sorted(os.listdir('/')), os.stat('/').st_ino], file)\n" + WAITS_BESIDE
)


@pytest.fixture(scope="session", params=[Podman, Docker], ids=["podman", "docker"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Machine, str | None]]:
    """An engine with images for the tests, and why it can't be used."""
    machine = request.param(tmp_path_factory.mktemp(request.param.kind))
    yield machine, machine.start()
    machine.stop()


@pytest.fixture
def machine(store: tuple[Machine, str | None], monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine, why_not = store
    require_engine(f"{machine.kind} ({why_not})" if why_not else machine.kind, why_not is None)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    return machine


@pytest.fixture(scope="session")
def found(store: tuple[Machine, str | None]) -> ContainerEngine | None:
    """The engine as Paceline finds it; asked once, for each look costs a quarter of a second."""
    machine, why_not = store
    return None if why_not else containers.find_engine({**os.environ, **machine.environment})


@pytest.fixture
def engine(machine: Machine, found: ContainerEngine | None) -> ContainerEngine:
    assert found is not None
    assert found.kind == machine.kind
    return found


only_podman = pytest.mark.parametrize("store", [Podman], ids=["podman"], indirect=True)


def probe(engine: ContainerEngine, machine: Machine, image: str = IMAGE, **values: Any) -> ImagePython | None:
    """The image's Python, as the tests' images have it."""
    return containers.probe(engine, image, run_id="lab_1", name=image, **{"mounts": machine.mounts, **values})


class Runs:
    """Starts launches in containers, and ends them. The test's process is their supervisor."""

    def __init__(self, folder: Path, engine: ContainerEngine, machine: Machine) -> None:
        self.engine, self.machine = engine, machine
        self._folder, self._launches = folder, list[Launch]()

    def launch(self, script: str, **values: Any) -> Launch:
        launch = make_launch(self._folder / str(len(self._launches)), textwrap.dedent(script), **values)
        self._launches.append(launch)
        return launch

    def start(self, launch: Launch, image: str = IMAGE, **options: Any) -> list[StartedCommand]:
        found = containers.check_image(self.engine, image, print)
        assert found
        shell = options.setdefault("shell", dict(os.environ))
        options["mounts"] = [*self.machine.mounts, *options.get("mounts", ())]
        wrapped = containers.wrap_all(commands(launch, shell), launch, engine=self.engine, image=found, **options)
        assert wrapped
        return [LocalNodes((), (), lambda: None).start(command, launch.work_dir, shell) for command in wrapped]

    def finish(self, launch: Launch, image: str = IMAGE, **options: Any) -> list[int]:
        """The exit codes of the launch's commands, once all have ended."""
        return [wait(started) for started in self.start(launch, image, **options)]

    def end(self) -> None:
        left = self.machine.containers()
        for launch in self._launches:
            if any(launch.run_id in name for name in left):
                containers.remove(self.engine, launch.run_id)
            shutil.rmtree(launch.scratch_dir)
        processes.kill_descendants(os.getpid())
        assert self.machine.containers() == []


def wait(started: StartedCommand) -> int:
    _, status = os.waitpid(started.pid, 0)
    return processes.shell_exit_code(status)


def log(launch: Launch, rank: int = 0) -> str:
    return (launch.run_dir / "attempts" / "1" / f"rank_{rank}.log").read_text()


def output(launch: Launch, name: str) -> str:
    return (launch.run_dir / "outputs" / name).read_text()


def is_there(launch: Launch, name: str) -> Callable[[], bool]:
    path = launch.run_dir / "outputs" / name
    return lambda: path.exists() and path.stat().st_size > 0


@pytest.fixture
def runs(tmp_path: Path, engine: ContainerEngine, machine: Machine) -> Iterator[Runs]:
    subreaper(True)
    runs = Runs(tmp_path / 'run\'s, "own" ü', engine, machine)
    yield runs
    runs.end()
    subreaper(False)


def subreaper(on: bool) -> None:
    """Let orphans below this process become its children, as under a supervisor; or no longer."""
    assert ctypes.CDLL(None).prctl(36, int(on), 0, 0, 0) == 0


# --- tests of what a worker sees


@pytest.mark.promise("worker-container-image-s-system")
def test_worker_in_a_container_has_the_file_system_of_the_image_and_the_run_folders(runs, tmp_path):
    data = tmp_path / "views" / "train"
    data.mkdir(parents=True)
    (data / "x.txt").write_text("42")
    launch = runs.launch(
        """\
        import getpass, json, os, sys
        with open("outputs/seen", "w") as file:
            json.dump({
                "cwd": os.getcwd(), "argv": sys.argv, "uid": os.getuid(), "user": getpass.getuser(),
                "environment": dict(os.environ), "data": open(sys.argv[1]).read(), "pid": os.getpid(),
                "home": os.access(os.environ["HOME"], os.W_OK), "root": sorted(os.listdir("/")),
            }, file)
        print("printed")
        """,
        arguments=(str(data / "x.txt"), "two words", "ä\n"),
        environment_variables={"TOKEN": "several\n'words' é", "PATHOLOGY": "1"},
    )

    assert runs.finish(launch, mounts=[Mount(path=data, read_only=True)], shell={**os.environ, "SHELLS_OWN": "1"}) == [
        0
    ]

    seen = json.loads(output(launch, "seen"))
    assert seen["cwd"] == str(launch.work_dir)
    assert seen["argv"] == ["train.py", str(data / "x.txt"), "two words", "ä\n"]
    assert seen["data"] == "42"
    assert seen["home"]
    assert seen["uid"] == os.getuid()
    variables = seen["environment"]
    assert variables["TOKEN"] == "several\n'words' é"
    assert variables["IMAGES_OWN"] == "kept"
    assert variables["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert "SHELLS_OWN" not in variables
    assert not [name for name in variables if name.startswith("_PACELINE")]
    # This file has the script's pid on the host, because the supervisor knows the worker by that pid.
    start = json.loads((launch.run_dir / "attempts" / "1" / "start_0.json").read_text())
    assert start["pid"] == seen["pid"]
    assert log(launch) == "printed\n"


def test_files_in_the_run_folder_belong_to_the_submitting_user(runs):
    launch = runs.launch("open('outputs/x', 'w').write('1')")
    assert runs.finish(launch) == [0]
    found = (launch.run_dir / "outputs" / "x").stat()
    assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())


def test_shm_size_option_sets_the_size_of_dev_shm_in_the_container(runs):
    script = "import os; f = os.statvfs('/dev/shm'); open('outputs/x', 'w').write(str(f.f_blocks * f.f_frsize))"
    launch = runs.launch(script)
    assert runs.finish(launch, shm_size="48m") == [0]
    assert int(output(launch, "x")) == 48 << 20
    another = runs.launch(script)
    assert runs.finish(another) == [0]
    host = os.statvfs("/dev/shm")
    assert int(output(another, "x")) == host.f_blocks * host.f_frsize


def test_two_workers_in_containers_on_one_node_share_one_dev_shm_of_the_given_size(runs):
    launch = runs.launch(
        """\
        import os, time
        rank = os.environ["PACELINE_RANK"]
        open("/dev/shm/rank" + rank, "w").close()
        while sorted(os.listdir("/dev/shm"))[-2:] != ["rank0", "rank1"]:
            time.sleep(0.02)
        found = os.statvfs("/dev/shm")
        open("outputs/" + rank, "w").write(str(found.f_blocks * found.f_frsize))
        """,
        process_count_per_node=2,
        distributed_backend="gloo",
    )
    assert runs.finish(launch, shm_size="48m") == [0, 0], log(launch)
    assert [output(launch, "0"), output(launch, "1")] == [str(48 << 20)] * 2
    assert not Path("/dev/shm/rank0").exists()
    assert runs.machine.containers() == [f"paceline-{launch.run_id}-1-memory-0"]
    assert containers.remove(runs.engine, launch.run_id) == 1
    assert runs.machine.containers() == []


@only_podman
def test_shm_size_that_the_engine_refuses_is_reported(runs):
    launch = runs.launch("", process_count_per_node=2, distributed_backend="gloo")
    with pytest.raises(LauncherError, match=r"shm_size='much': .*could not start a container"):
        runs.start(launch, shm_size="much")


def test_an_images_own_entry_point_is_not_run(runs):
    launch = runs.launch("print('the script')")
    assert runs.finish(launch, ANOTHER_ENTRY) == [0]
    assert log(launch) == "the script\n"


def test_environment_variable_values_of_a_container_appear_on_no_command_line(runs):
    secret = "hunter2-" + os.urandom(8).hex()
    launch = runs.launch(WAITS, environment_variables={"TOKEN": secret})
    [started] = runs.start(launch)
    wait_until(is_there(launch, "pid"), "the script runs")
    lines = list(command_lines())
    assert any("TOKEN" in line for line in lines)
    assert not [line for line in lines if secret in line]
    os.kill(started.pid, signal.SIGTERM)
    assert wait(started) == 3


# --- tests with several workers


@only_podman
def test_two_workers_in_containers_all_reduce_over_gloo(runs):
    require_engine("torch", importlib.util.find_spec("torch"))
    launch = runs.launch(
        """\
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        open(f"outputs/{dist.get_rank()}", "w").write(str(total.item()))
        dist.destroy_process_group()
        """,
        python=sys.executable,
        process_count_per_node=2,
        distributed_backend="gloo",
    )
    assert runs.finish(launch) == [0, 0], log(launch) + log(launch, 1)
    assert [output(launch, "0"), output(launch, "1")] == ["3.0", "3.0"]


@only_podman
def test_mpirun_and_its_workers_share_one_container(runs):
    found = probe(runs.engine, runs.machine)
    require_engine("an Open MPI in /usr", found and found.mpirun)
    launch = runs.launch(
        """\
        import os
        seen = open("/proc/self/cgroup").read() + os.environ["PACELINE_WORLD_SIZE"]
        open("outputs/" + os.environ["PACELINE_RANK"], "w").write(seen)
        """,
        process_count_per_node=2,
        distributed_backend="mpi",
    )
    assert runs.finish(launch, shm_size="64m") == [0], (launch.run_dir / "logs" / "driver.log").read_text()
    assert output(launch, "0") == output(launch, "1")
    assert output(launch, "0").endswith("2")
    ends = [json.loads((launch.run_dir / "attempts" / "1" / f"end_{rank}.json").read_text()) for rank in (0, 1)]
    assert [end["exit_code"] for end in ends] == [0, 0]


# --- tests of how a container ends


@pytest.mark.promise("script-s-exit-code-container")
@only_podman
@pytest.mark.parametrize("code", [7, 125, 127])
def test_script_exit_code_passes_through_the_container(runs, code):
    launch = runs.launch(f"import sys; sys.exit({code})")
    assert runs.finish(launch) == [code]
    # If the container client itself fails, it exits with 125. This file shows that the script has started, so the code
    # is the script's.
    assert (launch.run_dir / "attempts" / "1" / "start_0.json").exists()


def test_sigterm_to_the_podman_or_docker_client_reaches_the_script_in_the_container(runs):
    code = 0
    # For a moment after the script's start, podman handles the signal itself and ends with 0. So try up to five times.
    for _ in range(5):
        launch = runs.launch(WAITS)
        [started] = runs.start(launch)
        wait_until(is_there(launch, "pid"), "the script runs")
        os.kill(started.pid, signal.SIGTERM)
        if code := wait(started):
            break
        processes.kill_descendants(os.getpid())
    assert code == 3
    assert output(launch, "asked") == "SIGTERM"
    wait_until(lambda: not runs.machine.containers(), "the container is gone")


def test_exit_code_is_137_if_the_script_in_a_container_is_killed_by_sigkill(runs):
    launch = runs.launch(WAITS)
    [started] = runs.start(launch)
    wait_until(is_there(launch, "pid"), "the script runs")
    os.kill(int(output(launch, "pid")), signal.SIGKILL)
    assert wait(started) == 137


def test_container_of_a_killed_podman_or_docker_client_keeps_running_until_it_is_removed(runs):
    launch = runs.launch(WAITS)
    [started] = runs.start(launch)
    wait_until(is_there(launch, "pid"), "the script runs")
    script = int(output(launch, "pid"))
    os.kill(started.pid, signal.SIGKILL)
    assert wait(started) == 137
    assert processes.is_alive(script)
    assert runs.machine.containers()
    assert containers.remove(runs.engine, launch.run_id) == 1
    assert runs.machine.containers() == []
    wait_until(lambda: not processes.is_alive(script), "the script is gone")
    assert containers.remove(runs.engine, launch.run_id) == 0


@only_podman
def test_background_process_in_a_container_is_killed_when_the_supervisor_kills_its_descendants(runs):
    """A supervisor or its guardian that kills its descendants kills them, with processes that the script left."""
    launch = runs.launch(
        """\
        import os, subprocess, sys, time
        lost = "import os, sys; os.setsid(); open('outputs/pid', 'w').write(str(os.getpid())); import time; time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", lost], env={})
        time.sleep(600)
        """
    )
    runs.start(launch)
    wait_until(is_there(launch, "pid"), "the script runs")
    lost = int(output(launch, "pid"))
    assert lost in processes.descendants(os.getpid())
    processes.kill_descendants(os.getpid())
    assert not processes.is_alive(lost)
    # Podman may keep its record of the container until `remove` is called.
    assert containers.remove(runs.engine, launch.run_id) <= 1
    assert runs.machine.containers() == []


def test_background_process_left_by_a_script_is_killed_when_its_container_is_removed(runs):
    launch = runs.launch(
        """\
        import os, subprocess, sys, time
        lost = "import os, time; os.setsid(); open('outputs/pid', 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", lost], env={})
        while not os.path.exists("outputs/pid"):
            time.sleep(0.01)
        """
    )
    assert runs.finish(launch) == [0]
    containers.remove(runs.engine, launch.run_id)
    wait_until(lambda: not processes.is_alive(int(output(launch, "pid"))), "the script's child is gone")


def test_killing_a_container_start_at_any_moment_leaves_no_container_and_no_process(runs):
    for delay_ms in (15, 50, 80, 110, 150, 220):
        launch = runs.launch("import time; time.sleep(600)")
        runs.start(launch)
        # The kill may come at any moment of the start, and no process may remain.
        time.sleep(delay_ms / 1000)
        processes.kill_descendants(os.getpid())
        containers.remove(runs.engine, launch.run_id)
        assert runs.machine.containers() == []
        assert processes.with_variable("PACELINE_RUN_DIR", str(launch.run_dir)) == []
    # On a busy machine, podman may need a moment to finish its own cleanup.
    wait_until(lambda: not runs.machine.left_by_runtime(), "the runtime has forgotten them", 30)


# --- tests of refusals before anything starts


def test_python_of_an_image_is_detected(engine, machine):
    found = probe(engine, machine)
    assert found is not None
    assert found.python.startswith("/usr/")
    assert found.version >= (3, 10)
    assert machine.containers() == []


def test_image_without_python_is_refused_with_the_image_name_in_the_error(engine, machine):
    with pytest.raises(LauncherError, match=r"bare:1' has no program 'python3' .*not found"):
        probe(engine, machine, WITHOUT_PYTHON)
    assert machine.containers() == []


@only_podman
def test_image_with_python_3_8_is_refused_and_the_error_names_that_version(engine, machine):
    with pytest.raises(LauncherError, match=r"old:1': its 'python3' is Python 3\.8\.18, and workers need 3\.10"):
        probe(engine, machine, OLD_PYTHON)


@only_podman
def test_image_probe_accepts_the_path_of_another_python_interpreter_in_the_image(engine, machine):
    found = probe(engine, machine, OLD_PYTHON, python="/usr/bin/python3")
    assert found is not None
    assert found.version >= (3, 10)


@only_podman
def test_interpreter_path_in_an_image_is_refused_if_the_program_is_not_python(engine, machine):
    with pytest.raises(LauncherError, match=r"its '/usr/bin/cat' does not run as Python 3\.10 or later does"):
        probe(engine, machine, python="/usr/bin/cat")


@only_podman
def test_mount_of_a_missing_folder_is_refused_with_the_error_of_the_engine(engine, machine, tmp_path):
    with pytest.raises(LauncherError, match=r"could not start a container: .*nowhere"):
        probe(engine, machine, mounts=[Mount(path=tmp_path / "nowhere")])


def test_missing_image_is_refused_with_the_error_of_the_engine(engine, machine):
    said: list[str] = []
    with pytest.raises(
        LauncherError, match=r"'127\.0\.0\.1:1/x:2' is not on this machine, and (podman|docker) could not pull"
    ):
        containers.check_image(engine, "127.0.0.1:1/x:2", said.append)
    assert said[0] == f"{engine.kind} pull 127.0.0.1:1/x:2"
    # The output of the pull is passed on while the pull runs.
    assert "refused" in "\n".join(said)


@only_podman
def test_missing_image_with_a_localhost_name_is_refused_without_a_pull(engine, machine):
    with pytest.raises(LauncherError, match="has no such image on this machine"):
        containers.check_image(engine, "localhost/missing:1", print)


# --- tests of packages on top of an image


def wheel(folder: Path, name: str = "tiny", version: str = "1.0", requires: str = "") -> Path:
    """A wheel with one module, that says its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def layer(engine: ContainerEngine, machine: Machine, tmp_path: Path) -> Callable[..., Layer]:
    """Return a function that makes layers of packages in `tmp_path/index`, without the network."""
    image = containers.check_image(engine, IMAGE, print)
    index = tmp_path / "index"

    def make(*requirements: str, **values: Any) -> Layer:
        index.mkdir(exist_ok=True)
        given: dict[str, Any] = {
            "run_id": "lab_1",
            "python": sys.executable,
            "mounts": [*machine.mounts, Mount(path=index, read_only=True)],
            "say": print,
            "environment": {"HOME": str(tmp_path / "home"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)},
        }
        folder = tmp_path / "ws" / "images"
        return containers.ensure_layer(folder, engine, image, requirements=requirements, **(given | values))

    return make


def test_script_imports_packages_added_to_an_image_and_packages_of_the_image(layer, runs, tmp_path):
    wheel(tmp_path / "index", "other")
    wheel(tmp_path / "index", requires="Requires-Dist: other\nRequires-Dist: pytest\n")
    made = layer("tiny")
    assert made.packages == ("other==1.0", "tiny==1.0")
    launch = runs.launch(
        """\
        import pytest, shutil, sys, tiny
        open("outputs/x", "w").write(f"{tiny.__file__} {pytest.__file__} {sys.prefix} {shutil.which('python')}")
        """,
        python=made.python,
        bin_dir=made.bin_dir,
    )
    assert runs.finish(launch, mounts=[Mount(path=Path(made.prefix), read_only=True)]) == [0], log(launch)
    tiny, own, prefix, found = output(launch, "x").split()
    assert tiny.startswith(made.prefix)
    assert own == pytest.__file__
    assert prefix == made.prefix
    assert found == made.python


@only_podman
def test_package_layer_with_the_same_packages_is_installed_only_once(layer, tmp_path):
    wheel(tmp_path / "index")
    said: list[str] = []
    made = layer("tiny", say=said.append)
    assert said
    said.clear()
    assert layer("tiny", say=said.append) == made
    assert said == []
    assert layer("tiny==1.0", say=said.append) != made


@only_podman
def test_uninstallable_package_is_named_and_no_package_layer_is_kept(layer, machine, tmp_path):
    with pytest.raises(EnvironmentBuildError, match=r"No matching distribution found for tiny"):
        layer("tiny")
    assert machine.containers() == []
    wheel(tmp_path / "index")
    assert layer("tiny").packages == ("tiny==1.0",)


@only_podman
def test_killed_installation_leaves_no_package_layer_and_is_repeated(layer, engine, machine, tmp_path):
    wheel(tmp_path / "index")

    def hear(line: str) -> None:
        if line.startswith("Looking in links"):  # pip has begun
            raise BrokenPipeError(0, "nobody hears it any more")

    with pytest.raises(EnvironmentBuildError, match="nobody hears it any more"):
        layer("tiny", say=hear)
    containers.remove(engine, "lab_1")
    assert machine.containers() == []
    assert layer("tiny").packages == ("tiny==1.0",)


@only_podman
def test_packages_pinned_to_exact_versions_are_installed_in_an_image_without_their_dependencies(layer, tmp_path):
    wheel(tmp_path / "index", requires="Requires-Dist: missing\n")
    assert layer("tiny==1.0", is_exact=True).packages == ("tiny==1.0",)


@only_podman
def test_index_password_is_not_on_a_command_line(layer, engine, tmp_path):
    secret = "hunter2-" + os.urandom(8).hex()
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://me:{secret}@127.0.0.1:{server.getsockname()[1]}/simple"
        environment = {"HOME": str(tmp_path / "home"), "PIP_INDEX_URL": url, "PIP_RETRIES": "0"}

        def hear(line: str) -> None:
            if line.startswith("Looking in indexes"):  # pip has read the variable, and now connects to the server
                lines.extend(command_lines())
                raise BrokenPipeError(0, "nobody hears it any more")

        with pytest.raises(EnvironmentBuildError, match="nobody hears it any more"):
            layer("tiny", environment=environment, say=hear)
    containers.remove(engine, "lab_1")
    assert any("PIP_INDEX_URL" in line for line in lines)
    assert not [line for line in lines if secret in line]


# --- tests of whole runs of an estimator


@pytest.fixture
def own_podman(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Podman alone: only its images have a Python without folders that a run can't name."""
    monkeypatch.setenv("PACELINE_CONTAINER_ENGINE", "podman")
    return machine


@only_podman
def test_workers_run_in_the_image_of_the_run(own_podman, lab):
    run = lab.complete(
        KEEP + "keep([os.environ['IMAGES_OWN'], os.environ.get('PYTHONPATH', ''), sys.executable, os.getpid()])",
        custom_docker_image=IMAGE,
        shm_size="64m",
        environment_variables={"SECRET": "hunter2"},
    )
    own, path, python, _ = seen(run)
    assert own == "kept"
    assert path.startswith(str(lab.workspace_dir / "lib"))
    assert python.startswith("/usr/")
    assert own_podman.containers() == []


@only_podman
def test_secret_of_a_container_run_is_in_no_file_and_output_symlinks_to_host_files_are_excluded(
    own_podman, lab, tmp_path, monkeypatch
):
    """A link to what only the host has must not make the host read it; the engine shows the secret in the container's variables
    alone, and to this user."""
    secret = "t0p-" + os.urandom(8).hex()
    monkeypatch.setenv("MY_TOKEN", secret)
    private = tmp_path / "only-here.txt"
    private.write_text("private")
    (tmp_path / "store").mkdir()
    store = pl.Datastore.register(pl.Workspace(lab.workspace_dir), "lab", tmp_path / "store")
    script = f"""
import os, sys, time
print(len(os.environ["MY_TOKEN"]), os.path.exists({str(private)!r}), flush=True)
for folder in ("outputs", sys.argv[2]):
    open(f"{{folder}}/real.pt", "w").write("real")
    os.symlink(os.path.abspath(f"{{folder}}/real.pt"), f"{{folder}}/latest.pt")
    os.symlink({str(private)!r}, f"{{folder}}/stolen")
    os.symlink("/etc/hostname", f"{{folder}}/hostname")
open("outputs/ready", "w").write("1")
while not os.path.exists("outputs/go"):
    time.sleep(0.05)
"""
    run = lab.submit(
        script,
        custom_docker_image=IMAGE,
        environment_variables={"MY_TOKEN": pl.secret("MY_TOKEN")},
        script_params={"--out": store.path("up", "o").as_upload()},
    )
    wait_for_file(run.folder.outputs / "ready")
    [found] = json.loads(own_podman("inspect", *own_podman.containers()).stdout)
    assert [name for name, value in found["Config"].items() if secret in json.dumps(value)] == ["Env"]
    assert [name for name, value in found.items() if secret in json.dumps(value)] == ["Config"]
    assert [word for word in found["Config"]["CreateCommand"] if word.endswith("MY_TOKEN")]
    assert not [line for line in command_lines() if secret in line]
    (run.folder.outputs / "go").touch()
    assert wait_for_end(run) == "Failed"  # it failed because its output is incomplete

    names = {f"{folder}/{name}" for folder in ("outputs", "uploads/o") for name in ("stolen", "hostname")}
    assert {one["name"] for one in run.record().left_out} == names
    assert (run.folder.attempt(1) / "rank_0.log").read_text() == f"{len(secret)} False\n"
    run.download_files("outputs/", str(tmp_path / "copied"))
    stored, copied = tmp_path / "store" / "up", tmp_path / "copied" / "outputs"
    assert {path.name: path.read_text() for path in stored.iterdir()} == {"real.pt": "real", "latest.pt": "real"}
    assert {path.name for path in copied.iterdir()} == {"real.pt", "latest.pt", "ready", "go"}
    assert (copied / "latest.pt").read_text() == "real"
    assert not [path for path in run.folder.path.rglob("*") if path.is_file() and secret in path.read_text()]
    run.delete()
    assert not run.folder.path.exists()


@only_podman
def test_pythonpath_of_the_submitting_shell_does_not_reach_the_container(own_podman, lab, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/shells/own")
    run = lab.complete(KEEP + "keep(sys.path)", custom_docker_image=IMAGE)
    assert "/shells/own" not in seen(run)


@only_podman
def test_workers_of_a_container_run_share_one_dev_shm_of_the_requested_size(own_podman, lab):
    run = lab.complete(
        KEEP + "found = os.statvfs('/dev/shm'); keep([found.f_blocks * found.f_frsize, os.stat('/dev/shm').st_dev])",
        custom_docker_image=IMAGE,
        shm_size="64m",
        process_count_per_node=2,
        distributed_backend="gloo",
    )
    assert seen(run, 0)[0] == 64 << 20
    assert seen(run, 0) == seen(run, 1)
    assert own_podman.containers() == []


@only_podman
def test_mpi_workers_in_a_container_use_the_open_mpi_of_the_image(own_podman, engine, machine, lab):
    found = probe(engine, machine)
    require_engine("an Open MPI in /usr", found and found.mpirun)
    run = lab.complete(
        KEEP + "keep(os.environ['LOCAL_RANK'])",
        custom_docker_image=IMAGE,
        process_count_per_node=2,
        distributed_backend="mpi",
    )
    assert [seen(run, 0), seen(run, 1)] == ["0", "1"]


@only_podman
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.proof), "mpi"])
def test_exec_runs_a_command_in_the_container_of_a_worker(own_podman, engine, machine, lab, backend):
    if backend == "mpi":
        found = probe(engine, machine)
        require_engine("an Open MPI in /usr", found and found.mpirun)
    kept = lab.folder / "kept"
    kept.write_text("hunter2")
    kept.chmod(0o600)
    run = lab.submit(
        BESIDE,
        custom_docker_image=IMAGE,
        process_count_per_node=2,
        distributed_backend=backend,
        environment_variables={"TOKEN": pl.secret(f"file:{kept}"), "PLAIN": "a b\n'c' é"},
    )
    wait_until(lambda: run.status == states.RUNNING, "the run is Running", 120)
    script = """
        import json, os, sys
        print(json.dumps([os.environ["PACELINE_RANK"], os.environ["TOKEN"], os.environ["PLAIN"], os.environ["IMAGES_OWN"]]))
        print(json.dumps([os.getcwd(), os.getuid(), sorted(os.listdir("/")), os.stat("/").st_ino, sys.argv[1:]]))
        sys.stdout.flush()
        sys.stderr.write("wrong\\n" + sys.stdin.read())
        sys.exit(7)
        """
    for rank in range(2):
        command = ["python3", "-c", textwrap.dedent(script), "two words", ""]
        done = run.exec(command, rank=rank, input="typed")
        assert (done.returncode, done.stderr) == (7, b"wrong\ntyped"), done
        values, there = map(json.loads, done.stdout.splitlines())
        assert values == [str(rank), "hunter2", "a b\n'c' é", "kept"]
        root = json.loads(wait_for_file(run.folder.outputs / f"root_{rank}"))
        assert there == [str(run.folder.work), os.getuid(), *root, ["two words", ""]], (
            "it is the worker's own container"
        )
    assert run.exec(["no-such-program"]).returncode == 127
    assert run.exec(["sh", "-c", "kill -9 $$"]).returncode == 137
    assert not [line for line in command_lines() if "hunter2" in line]
    # If the client of `exec` ends without a message, Paceline ends that client's command.
    mark = f"6{os.getpid()}"
    with Beside(run.folder, ["sh", "-c", f"trap '' HUP; echo up; sleep {mark} & wait"], rank=1) as beside:
        wait_until(beside.heard, "it says something")
        wait_until(lambda: f"sleep {mark} " in list(command_lines()), "it runs")
    wait_until(lambda: f"sleep {mark} " not in list(command_lines()), "nothing is left of it")
    for rank in range(2):
        assert run.exec(STOP, rank=rank).returncode == 0
    assert wait_for_end(run) == states.COMPLETED
    assert own_podman.containers() == []


@only_podman
def test_cancel_reaches_the_script_in_its_container(own_podman, lab):
    run = lab.submit(WAITS, custom_docker_image=IMAGE)
    wait_for_file(run.folder.outputs / "pid")
    run.cancel()
    assert wait_for_end(run) == "Canceled"
    assert (run.folder.outputs / "asked").read_text() == "SIGTERM"
    assert own_podman.containers() == []


@only_podman
@pytest.mark.parametrize("delay_ms", [pytest.param(0, marks=pytest.mark.proof), 60])
def test_run_fails_if_podman_exits_with_0_before_the_script_in_the_container_starts(own_podman, lab, delay_ms):
    # Regression: after a SIGTERM during the creation of the container, podman exited with 0, and the run was recorded
    # as Completed.
    run = lab.submit(WAITS, custom_docker_image=IMAGE)
    name = f"paceline-{run.id}-1-0"

    def clients() -> list[int]:
        found = processes.with_variable("PACELINE_RUN_ID", run.id)
        return [pid for pid in found if {"run", name} <= set(words_of(pid))]

    wait_until(clients, "podman makes the container")
    time.sleep(delay_ms / 1000)
    for pid in clients():
        processes.send(pid, signal.SIGTERM)
    assert wait_for_end(run) == "Failed"
    assert own_podman.containers() == []


@pytest.mark.promise("container-outlives-run-whoever-killed")
@only_podman
@pytest.mark.parametrize("victim", ["supervisor", "everything"])
def test_no_container_outlives_a_killed_supervisor(own_podman, lab, victim):
    run = lab.submit(WAITS, custom_docker_image=IMAGE)
    script = int(wait_for_file(run.folder.outputs / "pid"))
    pid = run.record().owner["pid"]
    if victim == "everything":
        guardian = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for one in (guardian, pid, *processes.descendants(pid)):
            if one != script:
                processes.send(one, signal.SIGKILL)
    else:
        processes.send(pid, signal.SIGKILL)
    assert wait_for_end(run) == "Failed"
    wait_until(lambda: not processes.is_alive(script), "the script is gone")
    wait_until(lambda: own_podman.containers() == [], "no container is left")
    # The next run releases the cores and the memory of the failed run.
    lab.complete("")


@only_podman
def test_an_image_without_python_fails_the_run_before_its_workers(own_podman, lab):
    run = lab.finish("print('never')", custom_docker_image=WITHOUT_PYTHON)
    failure = run.record().failure
    assert failure is not None
    assert "has no program 'python3'" in failure.message
    assert run.record().attempts == ()
    assert own_podman.containers() == []


@only_podman
def test_run_with_a_missing_image_fails_before_its_workers_start(own_podman, lab):
    run = lab.finish("print('never')", custom_docker_image="localhost/missing:1")
    failure = run.record().failure
    assert failure is not None
    assert "podman has no such image on this machine" in failure.message


@only_podman
@pytest.mark.parametrize("name", ["--privileged", "two words", "x;y", "line\nbreak", "../x"])
def test_invalid_image_name_is_refused_at_submission(lab, own_podman, name):
    with pytest.raises(UserError, match="docker_image="):
        lab.submit("", custom_docker_image=name)
    assert not (lab.workspace_dir / "runs").exists() or not list((lab.workspace_dir / "runs").iterdir())


def test_run_in_an_image_is_refused_if_no_container_engine_works(lab, monkeypatch):
    monkeypatch.setenv("PACELINE_CONTAINER_ENGINE", "/nowhere/podman")
    with pytest.raises(LauncherError, match="can't be run"):
        lab.submit("", custom_docker_image=IMAGE)
    assert not (lab.workspace_dir / "runs").exists() or not list((lab.workspace_dir / "runs").iterdir())


@only_podman
def test_packages_of_a_run_are_installed_on_top_of_its_image_once(own_podman, lab, tmp_path, monkeypatch):
    # These pip settings belong to this machine, so they must not affect pip in the container.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    script = KEEP + "import tiny; keep([tiny.__file__, tiny.VERSION, os.environ['VIRTUAL_ENV']])"
    values = {"custom_docker_image": IMAGE, "pip_packages": [str(wheel(tmp_path / "wheels"))]}
    file, version, prefix = seen(lab.complete(script, **values))
    assert file.startswith(f"{lab.workspace_dir}/environments/images/")
    assert file.startswith(prefix)
    assert version == "1.0"
    again = lab.complete(script, **values)
    assert seen(again) == [file, version, prefix]


@only_podman
def test_uninstallable_package_fails_the_run_before_its_workers(own_podman, lab, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    run = lab.finish("", custom_docker_image=IMAGE, pip_packages=["paceline-missing"])
    failure = run.record().failure
    assert failure is not None
    assert "No matching distribution found for paceline-missing" in failure.message
    assert run.record().attempts == ()


@only_podman
def test_rerun_in_an_image_has_the_same_package_versions(own_podman, lab, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PACELINE_WORKSPACE", str(lab.workspace_dir))
    make_wheel(tmp_path / "wheels", "tiny", "1.0")
    images = lab.workspace_dir / "environments" / "images"
    script = KEEP + "import tiny, time; keep(tiny.VERSION)\nwhile not os.path.exists('outputs/go'): time.sleep(0.02)\n"
    run = lab.submit(script, custom_docker_image=IMAGE, pip_packages=["tiny"])
    wait_for_file(run.folder.outputs / "seen_0.json")
    assert containers.prune_layers(images) == []
    (run.folder.outputs / "go").touch()
    wait_for_end(run)
    assert run.get_environment()["pip"] == ["tiny==1.0"]

    make_wheel(tmp_path / "wheels", "tiny", "2.0")
    assert [kept.layer.packages for kept in containers.prune_layers(images)] == [("tiny==1.0",)]
    job = _with_locked_environment(run.record().job, run.folder)
    again = lab.experiment.submit(job, source_directory=lab.source)
    assert json.loads(wait_for_file(again.folder.outputs / "seen_0.json")) == "1.0"
    (again.folder.outputs / "go").touch()
    assert wait_for_end(again) == "Completed"


@only_podman
def test_input_and_output_paths_are_the_same_inside_and_outside_containers(own_podman, lab, tmp_path):
    for name in "abcd":
        path = tmp_path / "the store" / "mnist" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    store = pl.Datastore.register(pl.Workspace(lab.workspace_dir), "lab", tmp_path / "the store")
    script = KEEP + (
        "folders = sys.argv[2:7:2]\n"
        "keep([{name: open(f'{folder}/{name}').read() for name in os.listdir(folder)} for folder in folders])\n"
        "open(f\"{sys.argv[8]}/{os.environ['PACELINE_RANK']}\", 'w').write('left')\n"
    )
    params = {
        "--mount": store.path("mnist", "mounted").as_mount(),
        "--copy": store.path("mnist", "copied").as_download(),
        "--part": store.path("mnist", "part").as_partition(by="rank"),
        "--out": store.path("out").as_upload(),
    }
    run = lab.complete(
        script,
        script_params=params,
        custom_docker_image=IMAGE,
        distributed_backend="gloo",
        process_count_per_node=2,
    )
    everything = {f"{name}.txt": name for name in "abcd"}
    parts = []
    for rank in range(2):
        mounted, copied, part = seen(run, rank)
        assert mounted == copied == everything
        parts.append(part)
    assert parts[0].keys() | parts[1].keys() == everything.keys()
    assert not parts[0].keys() & parts[1].keys()
    assert sorted(path.name for path in (tmp_path / "the store/out").iterdir()) == ["0", "1"]
