"""Workers on another Python than the one that submits: they find `paceline`, and nothing else of ours."""

from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess
import sys
import sysconfig
from typing import Any

import pytest

import paceline as pl
from tests.engines.lab import KEEP, Lab, log_text, seen

LOOK = KEEP + (
    "keep({'prefix': sys.base_prefix, 'version': sys.version_info[:2], 'path': sys.path, 'executable': sys.executable})\n"
    "import paceline\n"
    "run = paceline.Run.get_context()\n"
    "run.log('version', sys.version_info[1])\n"
    "run.tag('rank', run.get_context()._worker.rank)\n"
    "run.upload_file('notes/a.txt', __file__)\n"
    "with run.child_run('inner') as child:\n"
    "    child.log('a', float('nan'))\n"
)


@functools.cache
def others() -> dict[str, str]:
    """Version -> an installed Python of that version, 3.10 or later, that is not the one of these tests."""
    found: dict[str, str] = {}
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 16)]
    for path in [*glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python3")), *named, "/usr/bin/python3"]:
        if not path or not os.path.exists(path):
            continue
        code = "import sys; print('%d.%d' % sys.version_info[:2], sys.version_info >= (3, 10), sys.base_prefix)"
        done = subprocess.run([path, "-S", "-c", code], capture_output=True, text=True, check=False)
        version, is_new, prefix = done.stdout.split() if done.returncode == 0 else ("", "", "")
        if is_new == "True" and prefix != sys.base_prefix:
            found[version] = path
    return found


def check(run: pl.Run, python: str, rank: int = 0) -> None:
    found = seen(run, rank)
    assert found["executable"] == python
    assert found["prefix"] != sys.base_prefix
    ours = sysconfig.get_path("purelib")
    library = str(run.folder.path.parent.parent / "lib")
    # The worker's sys.path has no packages of the Python that submitted the run, only a folder with a link to Paceline.
    assert not [path for path in found["path"] if path.startswith((ours, sys.prefix))]
    ours_on_path, of_azureml, names = [path for path in found["path"] if path.startswith(library)]
    assert os.listdir(ours_on_path) == ["paceline"]
    # The last folder on sys.path has replacements for packages that are not installed.
    shim = os.path.join(ours_on_path, "paceline", "compat", "shim")
    assert of_azureml == os.path.join(shim, "azureml_names")
    assert found["path"][-1] == names == os.path.join(shim, "first")
    assert run.get_metrics("version", rank=rank) == {"version": found["version"][1]}


@pytest.fixture(params=[f"3.{minor}" for minor in range(10, 15) if minor != sys.version_info.minor])
def another(request: pytest.FixtureRequest) -> str:
    """Another Python of this version. Looked for when a test asks, since each process that collects the tests would do it."""
    python = others().get(request.param)
    if python is None:
        pytest.skip(f"needs another Python than this one, of version {request.param}")
    return python


@pytest.fixture
def any_other() -> str:
    if not others():
        pytest.skip("needs another Python of 3.10 or later")
    return next(iter(others().values()))


@pytest.mark.promise("worker-needs-python-3-10")
def test_worker_runs_on_another_python_version_than_the_submitter(lab: Lab, another: str) -> None:
    python = another
    run = lab.complete(LOOK, python=python)

    check(run, python)
    assert run.tags == {"rank": "0"}
    assert "notes/a.txt" in run.get_file_names()
    (child,) = run.get_children()
    assert (child.name, child.status) == ("inner", "Completed")
    assert str(child.get_metrics()) == "{'a': nan}"


def test_workers_run_under_the_requested_python_with_each_launcher(
    lab: Lab, parent: dict[str, Any], any_other: str
) -> None:
    python = any_other
    run = lab.complete(LOOK.split("run.tag")[0], python=python, **parent)

    for rank in range(len(parent) or 1):
        check(run, python, rank)


@pytest.mark.promise("worker-needs-python-3-10")
def test_too_old_or_missing_python_is_refused_at_submission(lab: Lab) -> None:
    lab.write("print()\n")
    old = lab.folder / "python3.9"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    for python, what in [(str(old), "is Python 3.9; workers need"), (str(lab.folder / "none"), "can't be run")]:
        with pytest.raises(pl.errors.JobError, match=what):
            lab.experiment.submit(pl.Estimator(str(lab.source), entry_script="train.py", python=python))
    assert not (lab.workspace_dir / "runs").exists() or not os.listdir(lab.workspace_dir / "runs")


def test_worker_in_an_empty_venv_cannot_import_packages_of_the_submitting_python(lab: Lab) -> None:
    # A fresh virtual environment of this interpreter contains no packages.
    venv = lab.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    script = "import paceline\nprint(paceline.Run.get_context().id)\n"
    run = lab.complete(script, python=str(venv / "bin" / "python"))
    assert log_text(run) == f"{run.id}\n"

    run = lab.finish("import click\n", python=str(venv / "bin" / "python"))
    assert run.failure is not None
    assert run.failure.exception == "ModuleNotFoundError: No module named 'click'"
