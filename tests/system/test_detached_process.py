"""Processes that outlive the program which starts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import paceline
from paceline.system import detached_process
from paceline.system.detached_process import library_dir
from tests.helpers import run_python, start_python, wait_until, write_tree


def test_ended_process_is_reaped_at_the_next_start(tmp_path: Path) -> None:
    """Otherwise a program that submits many sweeps, such as a notebook, would collect a zombie of each."""
    write_tree(tmp_path, {"library/ends.py": "", "x_1/here": ""})

    def start() -> int:
        with open(tmp_path / "lock", "ab") as lock:
            return detached_process.start(
                "ends", tmp_path / "x_1", lock.fileno(), python=sys.executable, library_dir=tmp_path / "library"
            ).pid

    first = start()
    # WNOWAIT waits until the process has ended, but does not reap it.
    wait_until(lambda: os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, "it has ended")
    second = start()
    try:
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        pass
    else:
        raise AssertionError("its exit code is still there to be taken")
    detached_process.started[-1].wait(60)
    assert detached_process.started[-1].pid == second


def test_folder_added_to_pythonpath_of_workers_holds_only_paceline(tmp_path):
    folder = library_dir(tmp_path / "workspace")
    assert [path.name for path in folder.iterdir()] == ["paceline"]
    assert (folder / "paceline").resolve() == Path(paceline.__file__).parent.resolve()


def test_folder_added_to_pythonpath_of_workers_is_created_once(tmp_path):
    first = library_dir(tmp_path)
    made = (first / "paceline").lstat().st_mtime_ns
    assert library_dir(tmp_path) == first
    assert (first / "paceline").lstat().st_mtime_ns == made


def test_another_interpreter_imports_only_paceline_from_library_dir(tmp_path):
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; import paceline, importlib.util\n"
        "print(paceline.__file__, importlib.util.find_spec('pytest'))"
    )
    folder = library_dir(tmp_path)
    where, other = run_python(code, environment={"PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1"}).split()
    assert Path(where).is_relative_to(folder)
    assert other == "None"


def test_concurrent_programs_share_one_folder_for_pythonpath(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from paceline.system.detached_process import library_dir; print(library_dir(Path(sys.argv[1])))"
    )
    started = [start_python(code, tmp_path) for _ in range(4)]
    answers = {process.communicate()[0].strip() for process in started}
    assert answers == {str(library_dir(tmp_path))}
