"""Supervisors that are forked for the tests are those that are started, for all who look at them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import paceline as pl
from paceline.runs import states
from paceline.system import detached_process, processes
from tests.cli.conftest import Cli
from tests.engines.lab import Lab, log_text, processes_below, wait_for_end, wait_for_status
from tests.helpers import wait_until
from tests.warm.asking import Forked

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def test_a_forked_supervisor_shows_as_one_that_was_started(lab):
    """By its command line and its variables the library knows a supervisor, and finds the processes of a run."""
    run = lab.submit("import time; time.sleep(600)")
    started = detached_process.started[-1]
    assert isinstance(started, Forked)
    wait_for_status(run, states.RUNNING)
    command, variables = processes.command_of(started.pid), processes.environment_of(started.pid)
    assert command[:4] == [sys.executable, "-m", "paceline.supervisor", str(run.folder.path)]
    assert (variables[processes.SUPERVISOR_VARIABLE], variables.get("ROOM")) == (run.id, None)
    assert {**os.environ, **variables} == variables
    assert os.getsid(started.pid) == started.pid, "Ctrl-C does not reach it"
    run.cancel()
    assert wait_for_end(run) == states.CANCELED
    wait_until(lambda: started.poll() is not None, "it has ended")


def parent_of(pid: int) -> str:
    """Its parent's command line."""
    # After the name, which may have blanks: the state, and the parent.
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{parent}/cmdline").read_text()


def test_those_of_forked_commands_are_forked_too(tmp_path):
    cli = Cli(tmp_path)
    run_id = cli.submit("import time; time.sleep(600)")
    cli.wait(run_id, states.RUNNING)
    assert any("supervising.py" in parent_of(pid) for pid in processes_below(tmp_path))
    cli("cancel", run_id)
    wait_until(lambda: not processes_below(tmp_path), "all has ended")


def test_a_controller_and_the_supervisors_of_its_trials_are_forked_too(lab, tmp_path):
    lab.write("import time; time.sleep(600)")
    estimator = pl.Estimator(str(lab.source), entry_script="train.py")
    sweep = lab.experiment.submit(pl.Sweep(estimator, {"x": pl.choice(1)}, metric="score"))
    assert isinstance(detached_process.started[-1], Forked)
    wait_until(lambda: any("supervising.py" in parent_of(pid) for pid in processes_below(tmp_path)), "a trial runs")
    sweep.cancel()
    assert wait_for_end(sweep) == states.CANCELED


@pytest.mark.parametrize("name", ["PYTHONWARNINGS", "LD_PRELOAD", "LC_ALL"])
def test_one_that_would_be_another_with_such_a_variable_is_started(lab, monkeypatch, name):
    monkeypatch.setenv(name, "C" if name == "LC_ALL" else "")
    run = lab.complete("print(1)")
    assert not isinstance(detached_process.started[-1], Forked), run.id


def test_the_workers_of_another_python_run_on_that_one(lab, monkeypatch, tmp_path):
    """They had the Python of the first supervisor, so that torch was loaded by each worker that was to be forked with it."""
    pythons = [sys.executable, str(tmp_path / "environment" / "bin" / "python")]
    Path(pythons[1]).parent.mkdir(parents=True)
    for name in ("pyvenv.cfg", "lib"):
        (tmp_path / "environment" / name).symlink_to(Path(sys.prefix) / name)
    Path(pythons[1]).symlink_to(pythons[0])
    for python in pythons:
        monkeypatch.setattr(sys, "executable", python)
        run = lab.complete("import sys; print(sys.executable)")
        assert isinstance(detached_process.started[-1], Forked)
        assert log_text(run).splitlines()[-1] == python
