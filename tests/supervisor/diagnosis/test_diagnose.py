from __future__ import annotations

import json
import signal

import pytest

from paceline.supervisor.diagnosis.diagnose import WorkerEnd, first_failure, worker_report
from paceline.worker import report as worker_side


def error(text: str, *, at: float = 0.0, **values: object) -> dict[str, object]:
    """An error file as a worker writes it, of an exception whose last line is `text`."""
    message = {"message": text, "extraInfo": {"py_callstack": f"Traceback\n{text}\n", "timestamp": "0"}}
    kind = text.partition(":")[0].rpartition(".")[2]
    return {
        "message": message,
        "exception": text,
        "type": kind,
        "exit_code": 1,
        "is_memory": False,
        "time": at,
        **values,
    }


def raised(rank: int, text: str, at: float, **values: object) -> WorkerEnd:
    return WorkerEnd(rank=rank, node="n", exit_code=1, error=error(text, at=at, **values), ended_at=at + 1)


def exited(rank: int, code: int | None, at: float = 9.0, *lines: str, **values: object) -> WorkerEnd:
    return WorkerEnd(rank=rank, node="n", exit_code=code, ended_at=at, last_lines=lines, **values)


def reported(*ends: WorkerEnd, oom_killed: bool = False, disk_full: bool = False):
    return worker_report("digits_1_2", 1, ends, oom_killed=oom_killed, disk_full=disk_full)


# Messages of workers that lost another worker, as the frameworks write them.
GLOO = "../third_party/gloo/gloo/transport/tcp"
NCCL = "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691"
TF = "tensorflow.python.framework.errors_impl"
LOST = [
    "paceline.collectives.errors.LostRankError: rank 1 was lost, and MPI can't go on in this process without it.",
    "paceline.compat.horovod.tensorflow.launch.HorovodUnknownError: rank 1 is gone",
    f"RuntimeError: [{GLOO}/pair.cc:534] Connection closed by peer [127.0.0.1]:43213",
    f"RuntimeError: [{GLOO}/pair.cc:547] Read error [127.0.0.1]:38017: Connection reset by peer",
    f"RuntimeError: [{GLOO}/pair.cc:589] Read error [10.0.0.2]:3333: Broken pipe",
    f"RuntimeError: [{GLOO}/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    f"RuntimeError: Gloo connectFullMesh failed with [{GLOO}/pair.cc:144] no error",
    f"RuntimeError: Gloo connectFullMesh failed with [{GLOO}/pair.cc:150] timed out connecting: SO_ERROR: Connection refused",
    "RuntimeError: Application timeout caused pair closure",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect.",
    "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    f"torch.distributed.DistBackendError: NCCL error in: {NCCL}, remote process exited or there was a network error",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "socketProgress: Connection closed by remote peer gpu-1<41234>",
    "RuntimeError: [1] is setting up NCCL communicator, but store->get('0') got error: Connection reset by peer",
    "RuntimeError: failed to recv, got 0 bytes",
    "mpi4py.MPI.Exception: MPI_ERR_PROC_FAILED: Process Failure",
    "mpi4py.MPI.Exception: MPI_ERR_REVOKED: Communication Object Revoked",
    f"{TF}.UnavailableError: Collective ops is aborted by: failed to connect to all addresses",
    f"{TF}.AbortedError: Collective ops is aborted by: Connection reset by peer",
    f"{TF}.UnavailableError: {{{{function_node __wrapped__CollectiveReduceV2}}}} Socket closed",
    "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.",
    "jaxlib.xla_extension.XlaRuntimeError: UNAVAILABLE: a task is unhealthy, says the coordination service.",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "BrokenPipeError: [Errno 32] Broken pipe",
]

# Messages of workers that failed by themselves.
OWN = [
    "ValueError: bad batch",
    "AssertionError",
    "KeyError: 'peer'",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'",
    "RuntimeError: CUDA error: device-side assert triggered",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 10x5)",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "MemoryError",
    "ModuleNotFoundError: No module named 'torch'",
    "mpi4py.MPI.Exception: MPI_ERR_TRUNCATE: message truncated",
    "socket.gaierror: [Errno -2] Name or service not known",
    "ZeroDivisionError: division by zero",
    "SyntaxError: invalid syntax",
    "OSError: [Errno 28] No space left on device",
]


# --- Which worker is to blame


@pytest.mark.parametrize("text", LOST)
def test_worker_that_lost_a_peer_is_a_victim_even_if_it_failed_first(text):
    blamed, victim = raised(1, "ValueError: bad batch", at=5), raised(0, text, at=3)
    assert victim.is_victim
    assert first_failure([victim, blamed]) is blamed
    report = reported(victim, blamed)
    assert (report.rank, report.exception) == (1, "ValueError: bad batch")
    assert report.victims == ((0, f"lost its connection to a worker that was gone: {text}"),)


@pytest.mark.parametrize("text", OWN)
def test_worker_with_its_own_error_is_blamed(text):
    blamed = raised(1, text, at=5)
    assert not blamed.is_victim
    assert first_failure([raised(0, LOST[0], at=3), blamed, raised(2, LOST[0], at=4)]) is blamed


@pytest.mark.parametrize("text", LOST)
def test_crashed_worker_whose_last_log_lines_show_a_lost_peer_is_not_blamed(text):
    # C++ code that throws in another thread ends by abort(), which is exit code 134.
    victim = exited(0, 134, 3.0, "epoch 1", f"terminate called after throwing an instance of '{text}'", "")
    assert first_failure([victim, exited(1, 1, 5.0)]).rank == 1


@pytest.mark.parametrize("code", [137, 139])
def test_killed_or_crashed_worker_is_blamed_even_if_its_log_shows_a_connection_error(code):
    blamed = exited(1, code, 5.0, "ConnectionResetError: retrying")
    assert first_failure([raised(0, LOST[0], at=3), blamed]) is blamed


def test_worker_whose_script_failed_first_is_blamed_even_if_its_process_ends_later():
    # Blame the worker that failed first, although it exits later: it may still be printing its traceback.
    slow = WorkerEnd(rank=1, node="n", exit_code=1, error=error("ValueError: b", at=5), ended_at=60)
    quick = WorkerEnd(rank=0, node="n", exit_code=1, error=error("KeyError: a", at=6), ended_at=7)
    assert first_failure([quick, slow]) is slow


def test_first_victim_is_named_if_all_are_victims():
    assert first_failure([raised(0, LOST[0], at=4), raised(1, LOST[0], at=3)]).rank == 1


def test_lowest_rank_is_blamed_if_several_fail_at_the_same_time():
    assert first_failure([raised(2, "ValueError: a", at=3), raised(1, "ValueError: a", at=3)]).rank == 1


@pytest.mark.parametrize("ends", [[], [exited(0, 0)], [exited(0, 0), exited(1, 143, stopped=True)], [exited(0, None)]])
def test_successful_workers_are_not_blamed(ends):
    assert first_failure(ends) is None
    assert reported(*ends) is None


def test_worker_ended_by_paceline_is_not_blamed():
    report = reported(exited(0, 143, 1.0, stopped=True), raised(1, "ValueError: bad batch", at=5))
    assert report.rank == 1
    assert report.victims == ((0, "was ended by Paceline because of it."),)


def test_failure_report_lists_workers_that_failed_later_with_their_own_errors():
    report = reported(raised(0, "ValueError: a", at=3), raised(1, "KeyError: b", at=4), exited(2, 5, 6.0))
    assert report.victims == ((1, "failed after it: KeyError: b"), (2, "failed after it: exit code 5"))


def test_error_shared_by_all_workers_is_reported_once():
    # Regression: three ranks raised the same error of five lines, and the report repeated all fifteen lines.
    report = reported(raised(0, "ValueError: a", at=3), raised(1, "ValueError: a", at=4))
    assert report.victims == ((1, "failed after it with the same error."),)


def test_worker_that_ended_its_script_and_was_then_terminated_is_not_blamed():
    lost = "HorovodInternalError: allreduce.x: rank 1 has shut down."
    victim, waiting = raised(0, lost, at=3), exited(1, 143, 4.0)
    assert first_failure([victim, waiting]) is victim
    assert "Before that, rank 1 had ended its script." in reported(victim, waiting).message


def test_worker_killed_from_outside_is_blamed():
    victim, killed = (
        raised(0, "HorovodInternalError: allreduce.x: rank 1 (process 7 on n) has died.", at=3),
        exited(1, 143),
    )
    assert first_failure([victim, killed]) is killed


def test_failure_message_names_ranks_that_exited_with_0_before_the_reported_rank_failed():
    # Ranks 0 and 2 left the loop early with exit code 0. Only rank 1, which waited for them, failed.
    report = reported(exited(0, 0, 2.0), raised(1, LOST[0], at=3), exited(2, 0, 2.0))
    assert report.rank == 1
    assert "Before that, rank 0, 2 had ended with exit code 0." in report.message


# --- The cause of a failure


@pytest.mark.parametrize(
    ("end", "cause", "said", "code"),
    [
        (raised(0, "ValueError: bad batch", at=1), "exception", "ValueError: bad batch", 1),
        (raised(0, "MemoryError", at=1, is_memory=True), "memory", "out of memory: MemoryError", 1),
        (exited(0, 3), "exception", "ended with exit code 3 and without an exception", 3),
        (exited(0, 137), "killed", "killed by SIGKILL (killed from outside)", 137),
        (exited(0, 139), "killed", "killed by SIGSEGV (a segmentation fault", 139),
        (exited(0, 134), "killed", "SIGABRT", 134),
        (exited(0, 135), "killed", "/dev/shm", 135),
        (exited(0, 143), "killed", "SIGTERM", 143),
        (exited(0, 128 + 40), "killed", "killed by signal 40.", 168),
        (exited(0, 255), "exception", "exit code 255", 255),
    ],
)
def test_failure_message_describes_each_cause(end, cause, said, code):
    report = reported(end)
    assert (report.cause, report.exit_code) == (cause, code)
    assert said in report.message


def test_sigkill_during_an_oom_kill_has_cause_memory():
    report = reported(exited(0, 137), oom_killed=True)
    assert report.cause == "memory"
    assert "out of memory" in report.message
    assert "smaller batch" in report.message


def test_segfault_during_an_oom_kill_has_cause_killed():
    assert reported(exited(0, 139), oom_killed=True).cause == "killed"


@pytest.mark.parametrize(
    ("end", "full", "cause"),
    [
        (raised(0, "OSError: [Errno 28] No space left on device", at=1), False, "disk"),
        (raised(0, "OSError: [Errno 122] Disk quota exceeded", at=1), False, "disk"),
        (exited(0, 1), True, "disk"),
        (raised(0, "ValueError: bad batch", at=1), True, "exception"),
        (exited(0, 137), True, "killed"),
    ],
)
def test_full_disk_is_the_cause_of_a_disk_error_or_of_a_failure_without_an_exception(end, full, cause):
    report = reported(end, disk_full=full)
    assert report.cause == cause
    assert ("free some space" in report.message) is (cause == "disk")
    # The message has two sentences: the error of the script, and what to do.
    assert (". The disk of" in report.message) is (cause == "disk")


@pytest.mark.parametrize("code", [1, 3, 137])
def test_failure_by_sys_exit_is_reported_without_a_traceback(code):
    end = WorkerEnd(rank=0, node="n", exit_code=code, error=error("SystemExit: 3", type="SystemExit"), ended_at=2)
    report = reported(end)
    assert (report.cause, report.exit_code, report.signal) == ("exception", code, None)
    assert (report.exception, report.traceback) == (None, None)
    assert f"left with exit code {code}" in report.message


def test_failure_report_has_the_signal_name():
    assert reported(exited(0, 128 + signal.SIGKILL)).signal == "SIGKILL"


# --- The report of a failure


def test_failure_of_a_single_worker_is_reported_without_a_rank():
    report = reported(raised(0, "ValueError: bad batch", at=1))
    assert report.message == "The worker failed: ValueError: bad batch"
    assert report.see == "paceline logs digits_1_2"


def test_first_failed_rank_is_named_with_its_node():
    first = WorkerEnd(
        rank=1, node="local-1", exit_code=1, error=error("ValueError: bad batch", at=5), last_lines=("a", "b")
    )
    report = reported(raised(0, LOST[0], at=6), first)
    assert report.message == "Rank 1 on node local-1 failed first: ValueError: bad batch"
    assert (report.rank, report.node, report.attempt, report.last_lines) == (1, "local-1", 1, ("a", "b"))
    assert report.traceback == "Traceback\nValueError: bad batch\n"
    assert report.see == "paceline logs digits_1_2 --rank 1"


def test_failure_message_does_not_say_first_if_only_one_rank_failed():
    report = reported(exited(0, 0), raised(1, "ValueError: bad batch", at=5))
    assert report.message == "Rank 1 on node n failed: ValueError: bad batch"


# --- Real error files


def error_file(exception: BaseException, tmp_path, monkeypatch) -> dict[str, object]:
    """What a worker writes down of this exception."""
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PACELINE_ATTEMPT", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    worker_side.failed(exception)
    return json.loads((tmp_path / "error.json").read_text())


def test_an_exception_of_several_lines_is_named_by_its_type_and_first_line(tmp_path, monkeypatch):
    # Regression: of error messages of CUDA and gloo with several lines, the report showed only the last line: "Compile
    # with `TORCH_USE_CUDA_DSA`".
    exception = RuntimeError(
        "CUDA error: device-side assert triggered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    )
    end = WorkerEnd(rank=0, node="n", exit_code=1, error=error_file(exception, tmp_path, monkeypatch))
    assert reported(end).exception == "RuntimeError: CUDA error: device-side assert triggered"


def test_victim_is_recognized_by_any_line_of_its_exception(tmp_path, monkeypatch):
    # torch appends the frames of its C++ code to the message.
    exception = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:43213\n"
        "Exception raised from recvBytes at /pytorch/Utils.hpp:670 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0xb0"
    )
    assert WorkerEnd(rank=0, node="n", exit_code=1, error=error_file(exception, tmp_path, monkeypatch)).is_victim


def test_out_of_memory_exception_has_cause_memory(tmp_path, monkeypatch):
    class OutOfMemoryError(RuntimeError):
        """As torch has it."""

    for exception in (MemoryError(), OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")):
        end = WorkerEnd(rank=0, node="n", exit_code=1, error=error_file(exception, tmp_path, monkeypatch))
        assert reported(end).cause == "memory"
