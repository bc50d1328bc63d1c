"""Programs below mpirun: how a script with backend "mpi" begins and ends. Its helpers run the other files' checks."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import require_engine
from tests.ranks import MPI
from tests.warm import TORCH, below_mpirun, run_alone

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).parent / "mpirun"

Check = Callable[[int, int], None]


def need_mpi() -> None:
    for name in ("torch", "mpi4py"):
        require_engine(name, importlib.util.find_spec(name))
    require_engine("an mpirun beside the interpreter", MPIRUN.exists())


def mpirun(
    ranks: int, *command: object, cwd: Path, timeout_s: float = 240, is_fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run this Python on so many ranks, and return output and exit code. is_fresh: torch is loaded at their import of it."""
    words = [str(word) for word in command]
    environment = {
        **os.environ,
        **MPI,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    options = ("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none")
    return subprocess.run(
        [
            str(MPIRUN),
            *options,
            "-n",
            str(ranks),
            *below_mpirun(ranks, *words, hides=is_fresh),
        ],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def mpirun_text(ranks: int, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The same of a script with this text, in the folder."""
    script = folder / "script.py"
    script.write_text(text)
    return mpirun(ranks, script, cwd=folder)


def run_checks(file: str, ranks: int, folder: Path) -> dict[str, str]:
    """The checks of this test file that failed on any of so many ranks, with their tracebacks."""
    need_mpi()
    done = mpirun(ranks, file, folder, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    failed: dict[str, str] = {}
    reports = sorted(folder.glob("rank_*.json"))
    assert len(reports) == ranks, done.stderr[-4000:]
    for report in reports:
        for name, error in json.loads(report.read_text()).items():
            if error:
                failed[name] = f"{failed.get(name, '')}{report.stem}:\n{error}\n"
    return failed


def main(checks: Iterable[Check]) -> None:
    """Run on one rank: each check is called with the rank and the number of ranks."""
    from paceline.torch_mpi import backend

    faulthandler.dump_traceback_later(220, exit=True)
    backend.install_when_loaded()
    import torch.distributed as dist

    dist.init_process_group("mpi", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    report: dict[str, str | None] = {}
    for check in checks:
        try:
            check(rank, size)
            report[check.__name__] = None
        except Exception:
            report[check.__name__] = traceback.format_exc()
        try:
            dist.barrier()
        except Exception:
            # After a failed check, a rank may call other collectives than the other ranks, so further checks would mean
            # nothing.
            report[check.__name__] = f"{report[check.__name__] or ''}\n{traceback.format_exc()}"
            break
    (Path(sys.argv[1]) / f"rank_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


SETUP = """
from paceline.torch_mpi import backend
backend.install_when_loaded()
import sys
assert not [name for name in sys.modules if name.partition(".")[0] in ("torch", "mpi4py", "numpy")]
import torch, torch.distributed as dist
"""


#: A setup for tests in which torch may be loaded already.
SETUP_LOADED = """
from paceline.torch_mpi import backend
backend.install_when_loaded()
import torch, torch.distributed as dist
"""


def run_script(
    tmp_path: Path, ranks: int, script: str, *, is_fresh: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """is_fresh: as a user's program starts, without anything loaded: of what a start or an end has to do with."""
    need_mpi()
    (tmp_path / "script.py").write_text((SETUP if is_fresh else SETUP_LOADED) + script)
    return mpirun(ranks, "script.py", cwd=tmp_path, is_fresh=is_fresh, **options)


def test_script_that_never_destroys_its_group_exits_with_0(tmp_path: Path) -> None:
    done = run_script(
        tmp_path, 2, "dist.init_process_group('mpi'); dist.all_reduce(torch.ones(3)); print('end')", is_fresh=True
    )
    assert (done.returncode, done.stdout.count("end")) == (0, 2), done.stderr


def test_a_rank_that_fails_ends_the_run_with_its_own_traceback(tmp_path: Path) -> None:
    script = """
dist.init_process_group("mpi")
if dist.get_rank() == 1:
    raise ValueError("no such label")
dist.all_reduce(torch.ones(3))
"""
    done = run_script(tmp_path, 2, script, is_fresh=True, timeout_s=120)
    assert done.returncode != 0
    assert "ValueError: no such label" in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.proof
def test_process_group_can_be_created_and_destroyed_repeatedly(tmp_path: Path) -> None:
    script = """
import threading
for number in range(60):
    dist.init_process_group("mpi")
    pairs = dist.new_group([1, 0]); alone = dist.new_group([1])
    x = torch.full((5,), 1.0 + dist.get_rank()); dist.all_reduce(x, group=pairs)
    assert x[0] == 3
    dist.destroy_process_group()
    assert not dist.is_initialized()
assert threading.active_count() == 1, threading.enumerate()
"""
    done = run_script(tmp_path, 2, script)
    assert done.returncode == 0, done.stderr


@pytest.mark.promise("rank-does-come-error-group")
def test_missing_rank_is_reported_at_the_time_limit(tmp_path: Path) -> None:
    script = """
import time
from datetime import timedelta
dist.init_process_group("mpi", timeout=timedelta(seconds=1))
if dist.get_rank() == 0:
    try:
        dist.all_reduce(torch.ones(7))
    except RuntimeError as error:
        print("said:", error)
    try:
        dist.barrier()
    except RuntimeError as error:
        print("then:", error)
else:
    time.sleep(3)
from paceline.collectives import mpi
mpi.abandon()
"""
    done = run_script(tmp_path, 2, script, timeout_s=120)
    assert "said: waited 1 s for the other ranks in all_reduce SUM(7 of float32)" in done.stdout, done.stderr
    assert "then: this process group can't be used any more" in done.stdout, done.stdout


def test_mpi_world_outside_mpirun_has_one_rank(tmp_path: Path) -> None:
    need_mpi()
    script = SETUP + "dist.init_process_group('mpi'); dist.barrier(); print(dist.get_world_size(), dist.get_backend())"
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = run_alone("script.py", loaded=TORCH, environment=environment, folder=tmp_path, hides=True)
    assert done.stdout.split() == ["1", "mpi"], done.stderr


@pytest.mark.proof
def test_an_idle_group_uses_no_cpu(tmp_path: Path) -> None:
    script = """
import resource, time
dist.init_process_group("mpi"); dist.all_reduce(torch.ones(3), async_op=True).wait()
before = resource.getrusage(resource.RUSAGE_SELF)
time.sleep(2)
after = resource.getrusage(resource.RUSAGE_SELF)
assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.02, (before, after)
"""
    done = run_script(tmp_path, 2, script)
    assert done.returncode == 0, done.stderr


def test_mpi_backend_mixed_with_another_backend_is_refused(tmp_path: Path) -> None:
    script = """
try:
    dist.init_process_group("cpu:mpi,cuda:nccl", init_method="file:///tmp/never", rank=0, world_size=1)
except RuntimeError as error:
    print("said:", error)
"""
    done = run_script(tmp_path, 1, script)
    assert "said: backend='cpu:mpi,cuda:nccl': the backend 'mpi' can't be mixed" in done.stdout, done.stderr
