"""The driver that runs before its supervisor does, and the one that is started for the next attempt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import paceline
from paceline.errors import TargetError
from paceline.targets.ray.driver_process import driver_path, driver_process
from paceline.targets.ray.entry import shared_entrypoint
from tests.helpers import wait_until
from tests.targets.ray.test_entry import program, run

ECHO = """\
import os, sys
for line in sys.stdin:
    if line == "end\\n":
        break
    print("heard", line.strip(), os.getpid(), flush=True)
"""
#: This program stands in for a supervisor.
SUPERVISOR = """\
import os, sys
sys.path.insert(0, {source!r})
from pathlib import Path
from paceline.errors import TargetError
from paceline.targets.ray.driver_process import driver_process
pid = os.environ["PACELINE_RAY_DRIVER"]
driver = driver_process("/nowhere", Path("/nowhere"))
driver.tell(b"hello")
print(driver.says.readline().decode().strip() == "heard hello " + pid)
driver.end()
print(os.path.exists("/proc/" + pid + "/exe"))
try:
    driver_process("/nowhere", Path("/nowhere"))
except TargetError as error:
    print(error)
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Holds a driver that echoes."""
    path = driver_path(tmp_path / "li b")
    path.parent.mkdir(parents=True)
    path.write_text(ECHO)
    return tmp_path / "li b"


def test_supervisor_uses_the_running_ray_driver_once_and_then_tries_to_start_a_new_one(
    library: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs" / "x_1"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "state.json").write_text('{"status": "Completed"}')
    (tmp_path / "supervisor.py").write_text(SUPERVISOR.format(source=str(Path(paceline.__file__).parents[1])))
    mine = program(tmp_path / "mine" / "python", f"exec {sys.executable} {tmp_path}/supervisor.py")
    script = shared_entrypoint(run_dir, library, str(mine))
    done = run(script, Path(sys.executable), tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, third = (run_dir / "logs" / "driver.log").read_text().splitlines()
    assert (first, second) == ("True", "False")
    assert third.startswith("the cluster's interpreter '/nowhere' can't be run")


def test_unused_driver_ends_with_the_supervisor(library: Path, tmp_path: Path) -> None:
    driver_path(library).write_text(f"import sys\nsys.stdin.read()\nopen({str(tmp_path / 'ended')!r}, 'w').close()\n")
    run_dir = tmp_path / "runs" / "x_1"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "state.json").write_text('{"status": "Completed"}')
    mine = program(tmp_path / "mine" / "python", "exit 0")
    # The shell that starts the driver and the supervisor waits until both have closed its output.
    run(shared_entrypoint(run_dir, library, str(mine)), Path(sys.executable), tmp_path)
    wait_until((tmp_path / "ended").exists, "the driver has ended")


def test_driver_is_started_when_none_is_running(library: Path) -> None:
    driver = driver_process(sys.executable, library)
    driver.tell(b"hello")
    assert driver.says.readline().startswith(b"heard hello ")
    driver.end()
    driver.says.close()
    driver.tell(b"gone")  # telling a closed driver is harmless


def test_missing_interpreter_raises_target_error(library: Path) -> None:
    with pytest.raises(TargetError, match=r"'/nowhere/python' can't be run"):
        driver_process("/nowhere/python", library)
