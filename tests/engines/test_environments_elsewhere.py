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
from tests.engines.conftest import require_engine
from tests.engines.container_lab import IMAGE, Podman
from tests.engines.elsewhere import TWO, WAYS, Place, place, web
from tests.engines.hosts import Hosts
from tests.engines.lab import KEEP, seen, wait_for_end
from tests.engines.packages import make_source
from tests.environments.wheels import make_wheel

pytestmark = pytest.mark.timeout(180)

LOOK = KEEP + (
    "import socket, spam\n"
    "def tree(top):\n"
    "    return {name: open(os.path.join(top, name)).read() for name in sorted(os.listdir(top))}\n"
    "find = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    "keep({'host': socket.gethostname(), 'spam': spam.VERSION, 'prefix': os.path.dirname(spam.__file__),\n"
    "      'own': tree(find['--own']), 'part': tree(find['--part']), 'web': tree(find['--web']),\n"
    "      'image': os.environ.get('IMAGES_OWN')})\n"
    "with open(os.path.join(find.get('--out', 'outputs'), 'of_' + os.environ['RANK']), 'w') as file:\n"
    "    file.write('stored')\n"
)
FILES = {f"{number}.txt": str(number) * 10 for number in range(4)}


@pytest.fixture(params=list(WAYS))
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


def builds(there: Place) -> int:
    """How often the package was built, on whatever node."""
    return len((there.folder / "packages" / "builds").read_text().splitlines())


def given(there: Place, url: str) -> dict[str, Any]:
    """A job with a package, a folder, a part of it for each node, files of the web, and an output where there can be one."""
    package, store = make_source(there.folder / "packages", "spam"), there.lab.folder / "store"
    for name, text in FILES.items():
        (store / "mnist").mkdir(parents=True, exist_ok=True)
        (store / "mnist" / name).write_text(text)
    # On this machine alone, unless the nodes see its folders.
    shutil.move(package, there.lab.folder / "spam")
    workspace = pl.Workspace(there.lab.workspace_dir)
    own = pl.Datastore.register(workspace, "own", store)
    params: dict[str, Any] = {
        "--own": own.path("mnist", "own").as_mount(),
        "--part": own.path("mnist/*.txt", "part").as_partition(by="node"),
        "--web": pl.Datastore.register(workspace, "web", url).path("mnist", "web").as_download(),
    }
    if there.reached is not None:
        params["--out"] = pl.Datastore.get(workspace, there.reached).path("left", "out").as_upload()
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
    if there.reached is not None:
        assert sorted(path.name for path in (store / "left").iterdir()) == ["of_0", "of_1"]
        assert run.output_datasets["out"]["files"] == 2
    told = run.input_datasets
    assert (told["own"]["files"], told["part"]["files"], told["web"]["files"]) == (4, 4, 4)
    assert told["own"]["sources"] == [{"datastore": "own", "path": "mnist"}]
    # What is kept names the packages as the job does, wherever they were built.
    assert package in json.dumps(run.get_environment())
    assert "/carried/" not in json.dumps(run.get_environment())


def test_a_job_with_packages_inputs_and_an_output_runs_as_it_does_here(there: Place, tmp_path: Path) -> None:
    with web(there.address, there.lab.folder / "store") as url:
        (there.lab.folder / "store").mkdir()
        values = given(there, url)
        run = there.lab.complete(LOOK, **values)

        reached = Path(pl.Datastore.get(pl.Workspace(there.lab.workspace_dir), there.reached or "own").url)
        check(there, run, reached, str(there.lab.folder / "spam"))
        assert builds(there) == there.environments, "once for each node, or for the folder that they share"

    if "shared" in there.name:
        return  # what is built in the workspace is found again as on this machine
    del values["script_params"]["--web"]
    values["script_params"].pop("--out", None)
    again = there.lab.complete(LOOK.replace("tree(find['--web'])", "None"), **values)
    assert seen(again, 1)["own"] == FILES
    assert seen(again)["prefix"] == seen(run)["prefix"]
    # Of more than two nodes, the second run may have got another one.
    hosts = {seen(one, rank)["host"] for one in (run, again) for rank in range(2)}
    assert builds(there) == (len(hosts) if there.environments == 2 else 1), "what is there is found again"


@pytest.mark.parametrize("way", ["slurm, login host", "ray"])
def test_an_output_that_nobody_could_bring_home_is_refused_before_anything_starts(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place(way, request, tmp_path, monkeypatch) as there:
        own = pl.Datastore.register(pl.Workspace(there.lab.workspace_dir), "own", tmp_path / "store")
        with pytest.raises(pl.DataError, match=r"'model' goes to datastore 'own'.*a folder of this machine.*outputs"):
            there.lab.submit("", script_params={"--out": own.path("m", "model").as_upload()}, **TWO)
        with pytest.raises(pl.DataError, match="there is nothing at 'nowhere'"):
            there.lab.submit("", inputs=[own.path("nowhere", "data")], **TWO)


def test_what_can_not_be_stored_is_told_before_the_workers_start(
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
def with_podman(network: Hosts, names: Sequence[str]) -> Iterator[None]:
    """Hosts with podman, each with a store and an image of its own."""
    engines = []
    for index, name in enumerate(names):
        # A short name: with a longer one conmon can't write down its container's end, and podman waits for that for 20 s.
        folder = network.folder / f"{index}"
        folder.mkdir()
        engines.append(Podman(folder, [IMAGE]))
        why = engines[-1].start()
        require_engine(f"podman: {why}", why is None)
        _lay_over(network, name, folder)
    try:
        yield
    finally:
        for name, engine in zip(names, engines, strict=True):
            network.run(name, ["umount", "/etc/containers"])
            assert engine.containers() == []
            engine.stop()


def _lay_over(network: Hosts, name: str, folder: Path) -> None:
    """Let a host's podman be configured as the store's folder says."""
    etc = folder / "etc"
    shutil.copytree("/etc/containers", etc)
    for conf in ("containers.conf", "storage.conf"):
        shutil.copy(folder / conf, etc)
    network.run(name, ["mount", "--bind", str(etc), "/etc/containers"])


@pytest.mark.parametrize("way", ["ssh", "slurm", "ray"])
def test_each_node_has_containers_of_its_own_engine_with_packages_and_data(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = request.getfixturevalue(WAYS[way][0])
    network = getattr(engine, "hosts", engine)
    with (
        place(way, request, tmp_path, monkeypatch) as there,
        with_podman(network, network.names if way == "ray" else there.hosts),
    ):
        with web(there.address, tmp_path / "store") as url:
            (tmp_path / "store").mkdir()
            # Not the one whose build is noted: a container sees nothing of where.
            wheel = str(make_wheel(tmp_path, "spam", "1.0"))
            values = given(there, url) | {"pip_packages": [wheel], "custom_docker_image": IMAGE}
            run = there.lab.submit(LOOK, **values)
            run.wait_for_completion()  # a dozen containers, one after another, on a machine that may be busy
            reached = pl.Datastore.get(pl.Workspace(there.lab.workspace_dir), there.reached or "own")
        check(there, run, Path(reached.url), wheel)
        assert [seen(run, rank)["image"] for rank in range(2)] == ["kept", "kept"]
        for rank in range(2):
            where = (
                wheel if way == "slurm" else "/carried/"
            )  # nodes that see this machine's files, and those that do not
            assert where in run.folder.prepare_log(rank).read_text()
        with pytest.raises(pl.JobError, match="mpirun in a container on one machine"):
            there.lab.submit("", custom_docker_image=IMAGE, **TWO | {"distributed_backend": "mpi"})
