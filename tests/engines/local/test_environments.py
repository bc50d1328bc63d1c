"""Runs whose scripts need packages: exactly these are installed once, before the workers start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from paceline.system import processes
from paceline.system.files import read_json
from tests.engines.lab import KEEP, Lab, processes_below, seen, wait_for_end, wait_for_file, wait_for_status
from tests.engines.packages import make_source
from tests.environments.channel import make_channel
from tests.environments.wheels import make_wheel
from tests.helpers import wait_until

LOOK = (
    KEEP
    + "import spam\nkeep({'path': sys.path, 'prefix': sys.prefix, 'spam': spam.__file__, 'env': dict(os.environ)})\n"
)
OURS = sysconfig.get_path("purelib")


@pytest.fixture
def spam(tmp_path: Path) -> str:
    return str(make_wheel(tmp_path / "wheels", "spam", "1.0"))


def prepare_log(run: pl.Run) -> str:
    path = run.folder.prepare_log(0)
    return path.read_text() if path.exists() else ""


def builds(folder: Path) -> int:
    return len((folder / "builds").read_text().splitlines())


def test_packages_added_to_an_interpreter_precede_its_own_on_sys_path(lab: Lab, spam: str) -> None:
    run = lab.complete(LOOK + "import pytest\n", estimator=pl.PyTorch, pip_packages=[spam])

    path = seen(run)["path"]
    (layer,) = [
        index for index, folder in enumerate(path) if folder.startswith(str(lab.workspace_dir / "environments"))
    ]
    assert layer < path.index(OURS)
    assert seen(run)["spam"].startswith(path[layer])


def test_isolated_environment_has_its_own_packages_and_no_others(
    lab: Lab, spam: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "shell").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shell"))
    run = lab.complete(LOOK, pip_packages=[spam])

    found = seen(run)
    library, environment = str(lab.workspace_dir / "lib"), str(lab.workspace_dir / "environments")
    others = [folder for folder in found["path"] if not folder.startswith(f"{sys.base_prefix}/lib")]
    # The last folder on sys.path has replacements for packages that are not installed.
    shim = os.path.join(others[1], "paceline", "compat", "shim")
    assert others.pop() == os.path.join(shim, "first")
    # The third folder has Paceline's replacements for the Azure SDK, which must be found before installed packages.
    assert others.pop(2) == os.path.join(shim, "azureml_names")
    assert len(others) == 3
    assert all(map(str.startswith, others, (str(run.folder.work), library, environment)))
    assert not [folder for folder in found["path"] if "site-packages" in folder and not folder.startswith(environment)]
    assert os.listdir(next(folder for folder in others if folder.startswith(library))) == ["paceline"]
    assert found["env"]["VIRTUAL_ENV"] == found["prefix"]
    assert found["env"]["PATH"].split(os.pathsep)[0] == os.path.join(found["prefix"], "bin")

    missing = lab.finish("import click\n", pip_packages=[spam])
    assert missing.failure is not None
    assert missing.failure.exception == "ModuleNotFoundError: No module named 'click'"


def test_pythonpath_and_path_set_in_the_job_reach_its_script(lab: Lab, spam: str, tmp_path: Path) -> None:
    run = lab.complete(LOOK, pip_packages=[spam], environment_variables={"PYTHONPATH": str(tmp_path), "PATH": "/bin"})
    assert str(tmp_path) in seen(run)["path"]
    assert seen(run)["env"]["PATH"] == "/bin"


def test_run_with_a_user_managed_environment_uses_its_interpreter_and_builds_nothing(lab: Lab) -> None:
    definition = pl.Environment.from_existing("mine", sys.prefix)
    run = lab.complete(KEEP + "keep(sys.prefix)\n", environment_definition=definition)
    assert seen(run) == sys.prefix
    assert not (lab.workspace_dir / "environments").exists()


def test_variables_of_the_environment_reach_the_workers(lab: Lab) -> None:
    definition = pl.Environment(environment_variables={"FROM": "environment", "OVER": "environment"})
    run = lab.complete(
        KEEP + "keep([os.environ['FROM'], os.environ['OVER']])\n",
        environment_definition=definition,
        environment_variables={"OVER": "estimator"},
    )
    assert seen(run) == ["environment", "estimator"]


def test_workers_under_mpirun_import_packages_added_to_the_interpreter(lab: Lab, spam: str, any_mpirun: str) -> None:
    run = lab.complete(
        LOOK + "from mpi4py import MPI\nkeep(MPI.COMM_WORLD.size, 'size')\n",
        estimator=pl.PyTorch,
        pip_packages=[spam],
        distributed_backend="mpi",
        process_count_per_node=2,
    )
    assert [seen(run, rank, "size") for rank in (0, 1)] == [2, 2]
    assert "/environments/" in seen(run, 1)["spam"]


def test_nodes_of_a_run_share_one_environment(lab: Lab, tmp_path: Path) -> None:
    source = make_source(tmp_path / "watched", "spam")
    run = lab.complete(LOOK, pip_packages=[str(source)], distributed_backend="gloo", node_count=2)
    assert builds(source.parent) == 1
    assert seen(run, 0)["prefix"] == seen(run, 1)["prefix"]


def test_run_is_preparing_during_its_environment_build_and_shows_its_log(lab: Lab, tmp_path: Path) -> None:
    source = make_source(tmp_path / "watched", "spam")
    (source.parent / "hold").touch()
    run = lab.submit(LOOK, pip_packages=[str(source)])
    wait_for_status(run, states.PREPARING)
    wait_until(lambda: "spam" in prepare_log(run), "the log says what is built")
    (source.parent / "hold").unlink()
    assert wait_for_end(run) == states.COMPLETED
    assert "is ready" in prepare_log(run)


def test_canceling_the_run_ends_its_environment_build(lab: Lab, tmp_path: Path) -> None:
    source = make_source(tmp_path / "watched", "spam")
    (source.parent / "hold").touch()
    run = lab.submit(LOOK, pip_packages=[str(source)])
    wait_until((source.parent / "started").exists, "the build has started")
    run.cancel()

    assert wait_for_end(run) == states.CANCELED
    assert run.record().attempts == ()
    wait_until(lambda: not processes_below(lab.folder), "no process of the run is left")


def test_uninstallable_package_is_named_with_the_reason(lab: Lab, monkeypatch: pytest.MonkeyPatch, spam: str) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(Path(spam).parent))
    for kind in (pl.Estimator, pl.PyTorch):
        run = lab.finish("print('ran')\n", estimator=kind, pip_packages=["spam==9.9"])
        assert (run.status, run.record().attempts) == (states.FAILED, ())
        assert run.failure is not None
        assert run.failure.cause == "environment"
        assert "spam==9.9" in run.failure.message
        assert run.failure.see == f"paceline logs {run.id} --prepare"


def test_failed_package_build_is_reported_with_the_error_of_the_package(lab: Lab, tmp_path: Path) -> None:
    source = make_source(tmp_path / "watched", "spam")
    (source.parent / "broken").touch()
    run = lab.finish(LOOK, pip_packages=[str(source)])
    assert run.failure is not None
    assert run.failure.cause == "environment"
    assert "spam" in run.failure.message
    assert "the compiler of spam is missing" in f"{run.failure.message}{prepare_log(run)}"

    (source.parent / "broken").unlink()
    assert lab.complete(LOOK, pip_packages=[str(source)]).status == states.COMPLETED


@pytest.mark.promise("two-runs-need-one-environment")
def test_concurrent_runs_build_a_shared_environment_once(lab: Lab, tmp_path: Path) -> None:
    source = make_source(tmp_path / "watched", "spam")
    (source.parent / "hold").touch()
    runs = [lab.submit(LOOK, pip_packages=[str(source)]) for _ in range(2)]
    wait_until((source.parent / "started").exists, "the build has started")
    wait_for_status(runs[1], states.PREPARING)
    (source.parent / "hold").unlink()
    assert [wait_for_end(run) for run in runs] == [states.COMPLETED] * 2
    assert builds(source.parent) == 1


@pytest.mark.parametrize("who", ["node", "supervisor"])
def test_build_after_a_killed_build_succeeds(lab: Lab, tmp_path: Path, who: str) -> None:
    source = make_source(tmp_path / "watched", "spam")
    (source.parent / "hold").touch()
    run = lab.submit(LOOK, pip_packages=[str(source)])
    wait_until((source.parent / "started").exists, "the build has started")
    if who == "supervisor":
        os.kill(run.record().owner["pid"], signal.SIGKILL)
    else:
        (node,) = [pid for pid, line in processes_below(lab.folder).items() if "paceline.node prepare" in line]
        os.kill(node, signal.SIGKILL)

    assert wait_for_end(run) == states.FAILED
    assert run.failure is not None
    assert run.failure.cause == {"node": "prepare", "supervisor": "supervisor"}[who]
    wait_until(lambda: not processes_below(lab.folder), "no process of the run is left")
    (source.parent / "hold").unlink()
    assert seen(lab.complete(LOOK, pip_packages=[str(source)]))["spam"]


@pytest.mark.promise("rerun-exact-versions")
def test_rerun_keeps_package_versions_despite_newer_releases(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = KEEP + "import spam, eggs\nkeep([spam.VERSION, eggs.VERSION])\n"
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "spam", "1.0", requires=["eggs"])
    make_wheel(wheels, "eggs", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PACELINE_WORKSPACE", str(lab.workspace_dir))
    run = lab.complete(script, pip_packages=["spam"])
    assert sorted(run.get_environment()["pip"]) == ["eggs==1.0", "spam==1.0"]

    make_wheel(wheels, "spam", "2.0", requires=["eggs"])
    make_wheel(wheels, "eggs", "2.0")
    shutil.rmtree(lab.workspace_dir / "environments")  # otherwise the old environment would be used again
    again = json.loads(subprocess.check_output([paceline(), "rerun", run.id, "--json"], text=True))
    assert seen(pl.Run(lab.experiment, again["run_id"])) == ["1.0", "1.0"]
    assert seen(lab.complete(script, pip_packages=["spam"])) == ["2.0", "2.0"]


def paceline() -> str:
    return os.path.join(sysconfig.get_path("scripts"), "paceline")


@pytest.mark.promise("conda-packages-need-conda")
def test_conda_environment_provides_the_interpreter_of_the_run(
    lab: Lab, tmp_path: Path, spam: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rattler")
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "rattler"))
    channel = make_channel(tmp_path / "the channel")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "environment.yml").write_text(
        f"channels: ['{channel.url}']\ndependencies: [python, greet, app, pip: ['{spam}']]\n"
    )
    script = KEEP + (
        "import greet, spam, subprocess\n"
        "keep([sys.prefix, os.environ['CONDA_PREFIX'], subprocess.getoutput('hello'), subprocess.getoutput('greet')])\n"
    )
    run = lab.complete(script, estimator=pl.PyTorch, conda_dependencies_file="environment.yml")
    prefix = seen(run)[0]
    assert seen(run) == [prefix, prefix, f"hello again from {prefix}", f"greetings from {prefix}"]
    assert prefix.startswith(str(lab.workspace_dir))

    missing = lab.finish("print()\n", conda_packages=["python", "broken"], conda_channels=[channel.url])
    assert missing.failure is not None
    assert missing.failure.cause == "environment"
    assert "nowhere-to-be-found" in missing.failure.message


@pytest.mark.promise("environment-use-pruned")
def test_an_environment_in_use_is_not_pruned(lab: Lab, spam: str) -> None:
    from paceline.environments.store import EnvironmentStore

    run = lab.submit(KEEP + "import spam, time\nkeep(1)\ntime.sleep(600)\n", pip_packages=[spam])
    wait_for_file(run.folder.outputs / "seen_0.json")
    store = EnvironmentStore(lab.workspace_dir / "environments")
    assert store.prune() == []
    run.cancel()
    wait_for_end(run)
    assert [built.key for built in store.prune()] == [read_json(run.folder.environment)["key"]]


def test_packages_with_a_user_managed_interpreter_are_refused(lab: Lab) -> None:
    lab.write("print()\n")
    values: dict[str, Any] = {"user_managed": True, "pip_packages": ["spam"]}
    with pytest.raises(pl.errors.EnvironmentSpecError, match="user_managed"):
        lab.experiment.submit(pl.PyTorch(str(lab.source), entry_script="train.py", **values))
    assert processes.descendants(os.getpid()) == [] or not processes_below(lab.folder)
