"""Machines that run out of something: a disk that is full, a limit on memory that is reached."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.compat import azureml
from paceline.runs import states
from paceline.system import processes
from tests.engines.lab import Lab, log_text
from tests.helpers import wait_until

MIB = 1 << 20


@pytest.fixture
def small_disk(lab: Lab) -> Iterator[Path]:
    """A file system of 1 MiB, which holds the lab's workspace."""
    folder = lab.folder / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if done is None or done.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip() if done else 'not root'}")
    lab.workspace_dir = folder / "ws"
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


#: Rank 0 fills the disk until it fails, and the other rank sleeps. The file `kept` is on another disk.
FILL = """
import json, os, sys, time, paceline
run = paceline.Run.get_context()
if os.environ["PACELINE_RANK"] != "0":
    time.sleep(600)
done = 0
try:
    while True:
        {step}
        done += 1
finally:
    with open({kept!r}, "w") as file:
        json.dump(done, file)
"""


def check_full(run: pl.Run) -> None:
    """The run has failed of its full disk, and everything about it can be read."""
    assert run.status == states.FAILED
    report = run.failure
    assert report is not None
    assert report.cause == "disk", report
    assert "disk of the run's folder is full" in report.message
    assert report.rank == 0
    json.loads(run.folder.state.read_text())
    assert run.record().ended_utc
    azureml.Run(run.experiment, run.id).get_details_with_logs()


@pytest.mark.promise("full-disk-fails-run-loses")
def test_metrics_logged_until_the_disk_is_full_are_kept_and_the_run_fails(
    lab: Lab, small_disk: Path, parent: dict[str, Any]
) -> None:
    kept = lab.folder / "kept"
    run = lab.finish(FILL.format(step="run.log('loss', done)", kept=str(kept)), **parent)

    check_full(run)
    assert run.failure is not None
    assert "No space left on device" in str(run.failure)
    done = json.loads(kept.read_text())
    assert done > 1000
    # The metrics contain every value whose log call returned, and no other value.
    assert run.get_metrics("loss", rank=0)["loss"] == list(range(done))


@pytest.mark.promise("full-disk-fails-run-loses")
@pytest.mark.parametrize("backend", [None, "mpi"])
def test_output_printed_until_the_disk_is_full_is_kept_and_the_run_fails(
    lab: Lab, small_disk: Path, any_mpirun: str, backend: str | None
) -> None:
    way = {"process_count_per_node": 2, "distributed_backend": "mpi"} if backend else {}
    kept = lab.folder / "kept"
    run = lab.finish(FILL.format(step="print(f'line {done:08d}', flush=True)", kept=str(kept)), **way)

    check_full(run)
    done = json.loads(kept.read_text())
    assert done > 1000
    expected = "".join(f"line {number:08d}\n" for number in range(done))
    assert log_text(run).startswith(expected)
    assert len(log_text(run)) < len(expected) + len("line 00000000\n")


def test_run_whose_checkpoint_fills_the_disk_fails(lab: Lab, small_disk: Path) -> None:
    step = "open(f\"{os.environ['PACELINE_CHECKPOINT_DIR']}/{done}\", 'wb').write(b'x' * 100_000)"
    run = lab.finish(FILL.format(step=step, kept=str(lab.folder / "kept")))

    check_full(run)


def test_run_completes_if_its_script_succeeds_on_a_full_disk(lab: Lab, small_disk: Path) -> None:
    script = """
        import os
        with open("outputs/large", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError as error:
                assert error.errno == 28
    """
    run = lab.finish(script)

    assert (run.status, run.failure) == (states.COMPLETED, None)
    assert run.record().exit_code == 0


def test_a_run_that_waits_on_a_full_disk_can_still_be_canceled(lab: Lab, small_disk: Path) -> None:
    script = f"""
        import os, time
        with open("outputs/large", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                open({str(lab.folder / "full")!r}, "w").write("full")
        time.sleep(600)
    """
    run = lab.submit(script)
    wait_until((lab.folder / "full").exists, "the disk is full")
    run.cancel()
    run.wait_for_completion()

    assert run.status == states.CANCELED


def test_no_worker_starts_on_a_full_disk(lab: Lab, small_disk: Path) -> None:
    lab.complete("print('fits')\n")
    with open(small_disk / "large", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(pl.errors.UserError, match="No space left on device"):
        lab.submit("print('does not fit')\n")

    runs = list(lab.experiment.get_runs())
    assert [run.status for run in runs] == [states.COMPLETED]
    # The failed submission leaves no incomplete folder.
    assert os.listdir(lab.workspace_dir / "runs") == [runs[0].id]


@pytest.fixture
def limit_memory() -> Iterator[Callable[[int], None]]:
    """Puts a process, with all it starts, under a limit of 200 MiB."""
    old = Path("/sys/fs/cgroup/memory")
    is_old = old.is_dir()
    group = (old if is_old else Path("/sys/fs/cgroup")) / f"paceline-test-{os.getpid()}"
    limit, swap = (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if is_old else ("memory.max", "memory.swap.max")
    )
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs to make a control group: {error.strerror}")
    try:
        (group / limit).write_text(str(200 * MIB))
        if (group / swap).exists():
            (group / swap).write_text(str(200 * MIB if is_old else 0))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"needs to limit the memory of a control group: {error.strerror}")

    def put(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))

    def remove() -> bool:
        try:
            group.rmdir()
        except OSError:
            return False
        return True

    yield put
    for pid in (group / "cgroup.procs").read_text().split():
        processes.send(int(pid), 9)
    wait_until(remove, "the control group is empty")


#: In this script, the last rank allocates memory until it is killed.
TAKE_ALL = """
import os, time
if int(os.environ["PACELINE_RANK"]) == int(os.environ["PACELINE_WORLD_SIZE"]) - 1:
    blocks = []
    while True:
        blocks.append(bytearray(b"x" * (1 << 20)))
time.sleep(600)
"""


@pytest.mark.promise("memory-kernel-takes-recognised")
def test_failure_cause_is_memory_if_the_kernel_oom_killer_kills_a_worker(
    lab: Lab, limit_memory: Callable[[int], None], parent: dict[str, Any]
) -> None:
    lab.write(TAKE_ALL)
    program = lab.submit_elsewhere(
        f"""
        from dataclasses import replace
        sys.stdin.read()
        print(experiment.submit(replace(estimator, **{parent!r})).id)
        """,
        stdin=subprocess.PIPE,
    )
    limit_memory(program.pid)
    run_id = program.communicate("", timeout=180)[0].strip()
    run = pl.Run(lab.experiment, run_id)
    run.wait_for_completion(raise_on_error=False)

    report = run.failure
    assert report is not None
    assert (report.cause, report.exit_code, report.signal) == ("memory", 137, "SIGKILL")
    assert report.rank == (1 if parent else 0)
    assert "out of memory" in report.message
    # The rank takes all memory quickly, usually between two memory samples, but the message still gives an amount.
    assert f"Rank {report.rank} held " in report.message


def test_failure_cause_is_memory_if_the_script_raises_memory_error(lab: Lab) -> None:
    script = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_DATA, ({100 * MIB}, {100 * MIB}))
        block = bytearray({500 * MIB})
    """
    run = lab.finish(script)

    assert run.failure is not None
    assert (run.failure.cause, run.failure.exit_code) == ("memory", 1)
    assert "MemoryError" in run.failure.message


def test_external_sigkill_is_not_reported_as_out_of_memory(lab: Lab) -> None:
    run = lab.finish("import os; os.kill(os.getpid(), 9)\n")

    assert run.failure is not None
    assert (run.failure.cause, run.failure.message) == (
        "killed",
        "The worker failed: killed by SIGKILL (killed from outside).",
    )
