"""Packages, inputs and outputs of runs on two nodes that are elsewhere: what their script finds, and how often it is made."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from tests.engines.conftest import require_engine, require_module
from tests.engines.container_lab import IMAGE, WITH_MPI, Podman
from tests.engines.hosts import Hosts
from tests.engines.lab import KEEP, seen, wait_for_end, wait_for_file
from tests.engines.packages import make_source
from tests.engines.places import EACH, TWO, WAYS, Place, place, web
from tests.environments.wheels import make_wheel

LOOK = KEEP + (
    "import socket, spam\n"
    "def tree(top):\n"
    "    return {name: open(os.path.join(top, name)).read() for name in sorted(os.listdir(top))}\n"
    "find = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    "keep({'host': socket.gethostname(), 'spam': spam.VERSION, 'prefix': os.path.dirname(spam.__file__),\n"
    "      'own': tree(find['--own']), 'part': tree(find['--part']), 'web': tree(find['--web']),\n"
    "      'image': os.environ.get('IMAGES_OWN')})\n"
    "for name in {'--out', '--home'} & set(find):\n"
    "    with open(os.path.join(find[name], 'of_' + os.environ['PACELINE_RANK']), 'w') as file:\n"
    "        file.write('stored')\n"
)
#: Options of a run with four workers on two nodes.
MPI = TWO | {"distributed_backend": "mpi", "process_count_per_node": 2}
REDUCE = KEEP + (
    "import socket, spam\n"
    "from mpi4py import MPI\n"
    "world = MPI.COMM_WORLD\n"
    "keep({'host': socket.gethostname(), 'spam': spam.VERSION, 'sum': world.allreduce(world.rank + 1),\n"
    "      'container': os.readlink('/proc/self/ns/mnt'), 'image': os.environ.get('IMAGES_OWN'),\n"
    "      'shm': os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize})\n"
)
FAILS = "import os, sys, time\nif os.environ['PACELINE_RANK'] == '3':\n    sys.exit(7)\ntime.sleep(600)\n"
WAITS = """\
import os, signal, sys, time
def leave(number, frame):
    open("outputs/asked_" + os.environ["PACELINE_RANK"], "w").write("SIGTERM")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open("outputs/waits_" + os.environ["PACELINE_RANK"], "w").write("1")
time.sleep(600)
"""
FILES = {f"{number}.txt": str(number) * 10 for number in range(4)}


@pytest.fixture(params=EACH)
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


def builds(there: Place) -> int:
    """Return how often the package was built, on any node."""
    return len((there.folder / "packages" / "builds").read_text().splitlines())


def given(there: Place, url: str) -> dict[str, Any]:
    """A job with a package, a folder, a part of it for each node, files of the web, and outputs to a datastore that nodes reach
    and to a folder of this machine, where these are two."""
    package, store = make_source(there.folder / "packages", "spam"), there.lab.folder / "store"
    for name, text in FILES.items():
        (store / "mnist").mkdir(parents=True, exist_ok=True)
        (store / "mnist" / name).write_text(text)
    # Move the package to this machine. Nodes that don't share its folders can't see the package.
    shutil.move(package, there.lab.folder / "spam")
    workspace = pl.Workspace(there.lab.workspace_dir)
    own = pl.Datastore.register(workspace, "own", store)
    params: dict[str, Any] = {
        "--own": own.path("mnist", "own").as_mount(),
        "--part": own.path("mnist/*.txt", "part").as_partition(by="node"),
        "--web": pl.Datastore.register(workspace, "web", url).path("mnist", "web").as_download(),
    }
    params["--out"] = pl.Datastore.get(workspace, there.reached).path("left", "out").as_upload()
    if there.reached != "own":
        params["--home"] = own.path("home", "home").as_upload()
    return {"estimator": pl.PyTorch, "pip_packages": [str(there.lab.folder / "spam")], "script_params": params, **TWO}


def check(there: Place, run: pl.Run, store: Path, package: str) -> None:
    found = [seen(run, rank) for rank in range(2)]
    assert {one["spam"] for one in found} == {"1.0"}
    assert len({one["host"] for one in found}) == 2
    for one in found:
        assert one["own"] == one["web"] == FILES
    parts = [one["part"] for one in found]
    assert [len(part) for part in parts] == [2, 2]
    assert parts[0] | parts[1] == FILES
    places = {"out": store / "left", "home": there.lab.folder / "store" / "home"}
    for name, told in run.output_datasets.items():
        assert sorted(path.name for path in places[name].iterdir()) == ["of_0", "of_1"]
        assert told["files"] == 2
    assert not list(run.folder.uploads.iterdir())
    by_who_looks = {"slurm, login host": ["out"], "ray": ["home"]}.get(there.name, [])
    log = "".join(path.read_text() for path in run.folder.logs.glob("prepare_*.log"))
    for name in run.output_datasets:
        assert (f"output {name!r}: 2 files, to be stored by the submitting machine" in log) == (name in by_who_looks)
    told = run.input_datasets
    assert (told["own"]["files"], told["part"]["files"], told["web"]["files"]) == (4, 4, 4)
    assert told["own"]["sources"] == [{"datastore": "own", "path": "mnist"}]
    # Each node's record has the package as given in the job, not the path of the copy on the node.
    assert package in json.dumps(run.get_environment())
    assert "/carried/" not in json.dumps(run.get_environment())


@pytest.mark.promise("job-packages-inputs-output-runs")
def test_job_with_packages_inputs_and_an_output_runs_on_each_kind_of_compute_target(
    there: Place, tmp_path: Path
) -> None:
    with web(there.address, there.lab.folder / "store") as url:
        (there.lab.folder / "store").mkdir()
        values = given(there, url)
        run = there.lab.complete(LOOK, **values)

        reached = Path(pl.Datastore.get(pl.Workspace(there.lab.workspace_dir), there.reached).url)
        check(there, run, reached, str(there.lab.folder / "spam"))
        # Both nodes are simulated on this machine and share its cache of wheels. So the second node may use the wheel
        # that the first node has built.
        assert 1 <= builds(there) <= there.environments, "once for each node, or for the folder that they share"

    if there.name not in ("ssh", "slurm, login host"):
        # The other targets find an existing environment by the same code as this machine and SSH hosts.
        return
    del values["script_params"]["--web"]
    for name in ("--out", "--home"):
        values["script_params"].pop(name, None)
    again = there.lab.complete(LOOK.replace("tree(find['--web'])", "None"), **values)
    assert seen(again, 1)["own"] == FILES
    assert seen(again)["prefix"] == seen(run)["prefix"]
    # If the target has more than two nodes, the second run may use a node without the environment.
    hosts = {seen(one, rank)["host"] for one in (run, again) for rank in range(2)}
    assert builds(there) <= (len(hosts) if there.environments == 2 else 1), "what is there is found again"


@pytest.mark.parametrize("way", ["slurm, login host", "ray"])
def test_submission_is_refused_before_files_are_sent_if_an_input_is_missing_or_an_output_exists(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "m").mkdir(parents=True)
    (tmp_path / "store" / "m" / "old").touch()
    with place(way, request, tmp_path, monkeypatch) as there:
        own = pl.Datastore.register(pl.Workspace(there.lab.workspace_dir), "own", tmp_path / "store")
        with pytest.raises(
            pl.errors.DataError, match=r"'model' is to be stored at 'm'.*there are 1 files already.*overwrite"
        ):
            there.lab.submit("", script_params={"--out": own.path("m", "model").as_upload()}, **TWO)
        with pytest.raises(pl.errors.DataError, match="there is nothing at 'nowhere'"):
            there.lab.submit("", inputs=[own.path("nowhere", "data")], **TWO)


def test_upload_to_an_existing_path_without_overwrite_fails_the_run_before_its_workers_start(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place("ssh", request, tmp_path, monkeypatch) as there:
        (tmp_path / "store" / "m").mkdir(parents=True)
        (tmp_path / "store" / "m" / "old").touch()
        own = pl.Datastore.register(pl.Workspace(there.lab.workspace_dir), "own", tmp_path / "store")
        run = there.lab.submit("", script_params={"--out": own.path("m", "model").as_upload()}, **TWO)
        wait_for_end(run)
        assert run.failure is not None
        assert (run.failure.cause, run.record().attempts) == ("data", ())
        assert "overwrite" in run.failure.message


@contextlib.contextmanager
def with_podman(network: Hosts, names: Sequence[str], image: str) -> Iterator[list[Podman]]:
    """Hosts with podman, each with a store of its own and the same image."""
    engines: list[Podman] = []
    for index, name in enumerate(names):
        # Use a short folder name. With a longer name, conmon can't write down a container's end, and podman waits for 20 s.
        folder = network.folder / f"{index}"
        folder.mkdir()
        engines.append(Podman(folder, [image], of=engines[0] if engines else None))
        why = engines[-1].start()
        require_engine(f"podman: {why}", why is None)
        _lay_over(network, name, folder)
    try:
        yield engines
        assert left_on(engines) == []
    finally:
        for index, (name, engine) in enumerate(zip(names, engines, strict=True)):
            network.run(name, ["umount", "/etc/containers"])
            engine.stop()
            shutil.rmtree(network.folder / f"{index}")


@contextlib.contextmanager
def containers_there(
    way: str, image: str, request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Place, list[Podman]]]:
    """A place whose nodes have podman and an image, and their engines."""
    engine = request.getfixturevalue(WAYS[way][0])
    network = getattr(engine, "hosts", engine)
    names = network.names[:2] if way == "ssh" else network.names
    with place(way, request, folder, monkeypatch) as there, with_podman(network, names, image) as engines:
        yield there, engines


def left_on(engines: Sequence[Podman]) -> list[str]:
    """Return the containers in any state, and the remains of programs below podman."""
    return [name for engine in engines for name in (*engine.containers(), *engine.left_by_runtime())]


def _lay_over(network: Hosts, name: str, folder: Path) -> None:
    """Let a host's podman be configured as the store's folder says."""
    etc = folder / "etc"
    shutil.copytree("/etc/containers", etc)
    for conf in ("containers.conf", "storage.conf"):
        shutil.copy(folder / conf, etc)
    network.run(name, ["mount", "--bind", str(etc), "/etc/containers"])


# `make test` uses only SSH hosts: containers don't depend on the engine that starts Paceline's agents, and SSH hosts
# share no folder with this machine.
@pytest.mark.parametrize("way", ["ssh", *(pytest.param(way, marks=pytest.mark.proof) for way in ("slurm", "ray"))])
def test_each_node_runs_its_own_containers_with_packages_and_data(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_module("mpi4py")
    with containers_there(way, WITH_MPI, request, tmp_path, monkeypatch) as (there, _):
        with web(there.address, tmp_path / "store") as url:
            (tmp_path / "store").mkdir()
            # Use a built wheel, because a build inside a container can't note on which node it ran.
            wheel = str(make_wheel(tmp_path, "spam", "1.0"))
            values = given(there, url) | {"pip_packages": [wheel], "custom_docker_image": WITH_MPI}
            run = there.lab.submit(LOOK, **values)
            run.wait_for_completion()  # it starts a dozen containers, one after another
            reached = pl.Datastore.get(pl.Workspace(there.lab.workspace_dir), there.reached)
        check(there, run, Path(reached.url), wheel)
        assert [seen(run, rank)["image"] for rank in range(2)] == ["kept", "kept"]
        told = [run.folder.prepare_log(rank).read_text() for rank in range(2)]
        if way == "slurm":
            # Slurm's nodes see the files of this machine, so they share the packages that one node has installed.
            assert sum(wheel in text for text in told) == 1
        else:
            assert all("/carried/" in text for text in told)
        if way == "ray":
            return  # Paceline starts mpirun's workers on Ray's nodes as on SSH hosts
        run = there.lab.submit(REDUCE, **MPI, custom_docker_image=WITH_MPI, pip_packages=[wheel], shm_size="64m")
        run.wait_for_completion()
        check_mpi([seen(run, rank) for rank in range(4)])


def check_mpi(found: list[dict[str, Any]]) -> None:
    """Four workers are one world, two in each of two containers on different nodes."""
    for one in found:
        assert (one["sum"], one["spam"], one["image"], one["shm"]) == (10, "1.0", "kept", 64 << 20)
    for name in ("host", "container"):
        values = [one[name] for one in found]
        assert values[0] == values[1] != values[2] == values[3]


@pytest.mark.promise("container-outlives-run-whoever-killed")
def test_ended_mpi_workers_leave_no_container_on_any_node(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use the Open MPI of the system, whose version differs from the version of the wheel.
    require_engine("an Open MPI in /usr", shutil.which("mpirun", path="/usr/bin"))
    with containers_there("ssh", IMAGE, request, tmp_path, monkeypatch) as (there, engines):
        run = there.lab.finish(FAILS, **MPI, custom_docker_image=IMAGE)
        assert run.failure is not None
        assert (run.failure.rank, run.failure.exit_code) == (3, 7)
        assert left_on(engines) == []

        run = there.lab.submit(WAITS, **MPI, custom_docker_image=IMAGE)
        for rank in range(4):
            wait_for_file(run.folder.outputs / f"waits_{rank}")
        assert [len(engine.containers()) for engine in engines] == [1, 1]
        run.cancel()
        wait_for_end(run)
        assert run.status == "Canceled"
        assert [(run.folder.outputs / f"asked_{rank}").exists() for rank in range(4)] == [True] * 4
        assert left_on(engines) == []
