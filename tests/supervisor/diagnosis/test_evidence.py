"""What a report tells of the crash, the stalled operations and the lonely training that an attempt's processes left."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest

from paceline.supervisor.diagnosis.diagnose import WorkerEnd, worker_report
from paceline.supervisor.diagnosis.evidence import (
    alone_text,
    crash_stack,
    find_clash,
    holder_here,
    printed_traceback,
    stalled_text,
)
from paceline.system.files import write_json
from tests.helpers import make_job, make_launch, make_run
from tests.supervisor.diagnosis.test_diagnose import exited, raised

TWO = {"process_count_per_node": 2, "distributed_backend": "gloo"}

CRASH = """
import ctypes, threading, time
def waits():
    time.sleep(60)
def crashes(depth):
    return ctypes.string_at(0) if depth == 0 else crashes(depth - 1)
threading.Thread(target=waits, daemon=True).start()
print("step 1", flush=True)
crashes(%d)
"""

LAUNCH = make_launch(make_job(distributed_backend="tensorflow", process_count_per_node=2), ports=(29500, 29501, 25, 26))

TORCH = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
TENSORFLOW = "tensorflow.python.framework.errors_impl.UnknownError: Could not start gRPC server"
GRPC = (
    "E0000 add_port.cc:83] Failed to add port to server: No address added out of total 1 resolved for '0.0.0.0:{port}'"
)
BARE = "OSError: [Errno 98] Address already in use"


def crashed(depth):
    words = [sys.executable, "-X", "faulthandler", "-c", CRASH % depth]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()


def test_crash_stack_lists_calls_innermost_first():
    lines = crashed(1)
    assert any("in waits" in line for line in lines)
    error, thread, *calls = crash_stack(lines).splitlines()
    assert error == "Fatal Python error: Segmentation fault"
    assert thread.startswith("Current thread ")
    assert [call.rpartition(" in ")[2] for call in calls] == ["string_at", "crashes", "crashes", "<module>"]


def test_crash_stack_of_a_deep_recursion_has_the_innermost_calls():
    assert len(crash_stack(crashed(50)).splitlines()) == 17


def test_crash_stack_omits_frames_of_the_paceline_worker():
    ours = '  File "/ws/lib/0a/paceline/worker/script.py", line 7 in run'
    lines = ["Fatal Python error: Aborted", "Current thread 0x1:", '  File "train.py", line 1 in <module>', ours]
    assert crash_stack(lines).splitlines() == lines[:3]


def test_log_without_a_crash_has_no_crash_stack():
    assert crash_stack([]) is None
    assert crash_stack(["step 1", "Current thread 0x1 (most recent call first):", '  File "a.py", line 1 in f']) is None


def test_crash_without_stack_lines_is_reported_by_its_error_line():
    assert crash_stack(["Fatal Python error: Aborted"]) == "Fatal Python error: Aborted"


# --- Stalled collectives


def line(name: str, *missing: int, waited_s: float = 60, ago_s: float = 0, **values: object) -> str:
    """A line as the engine writes it."""
    told = {
        "time_s": time.time() - ago_s,
        "operation": "allreduce",
        "name": name,
        "process_set": 0,
        "waited_s": waited_s,
        "missing_ranks": missing,
        "submitted_ranks": [0],
        "resolved": False,
    }
    return json.dumps(told | values) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stalled.jsonl"


def test_missing_or_empty_stall_file_gives_no_stall_report(path):
    assert stalled_text(path) is None
    path.touch()
    assert stalled_text(path) is None


def test_stalled_operation_is_named_with_its_ranks_and_duration(path):
    path.write_text(line("gradient.3", 3, 1, waited_s=60, ago_s=15))
    found = re.fullmatch(
        r"At its end the ranks were stalled: allreduce 'gradient\.3' has waited for ranks 1, 3 for (\d+) s\.",
        stalled_text(path) or "",
    )
    assert found is not None
    assert int(found[1]) >= 75


def test_resolved_stall_is_omitted(path):
    path.write_text(line("a", 1) + line("b", 1) + line("a", 1, resolved=True))
    text = stalled_text(path) or ""
    assert "'b'" in text
    assert "'a'" not in text


def test_resolved_stall_does_not_hide_a_stall_of_equal_name_in_another_process_set(path):
    path.write_text(line("a", 1) + line("a", 2, process_set=1) + line("a", 1, resolved=True))
    assert "rank 2 for" in (stalled_text(path) or "")


def test_stall_report_names_some_operations_and_counts_the_others(path):
    path.write_text("".join(line(f"t{number}", 1) for number in range(10)))
    assert (stalled_text(path) or "").endswith("; and 7 more.")


@pytest.mark.parametrize("broken", ['{"time_s": 1', "[]\n", '"x"\n', "{}\n", "\x00\xff\n"])
def test_truncated_line_of_the_stall_file_does_not_hide_other_stalls(path, broken):
    path.write_bytes(line("a", 1).encode() + broken.encode("latin-1"))
    assert "'a'" in (stalled_text(path) or "")


# --- Workers that trained without the others


@pytest.fixture
def folder(tmp_path):
    folder, fd = make_run(tmp_path / "runs")
    os.close(fd)
    folder.attempt(1).mkdir(parents=True)
    return folder


def left(folder, *ranks: int, library: str = "torch") -> None:
    for rank in ranks:
        write_json(folder.worker_alone(1, rank), {"library": library})


@pytest.mark.promise("workers-train-alone-told-warning")
def test_warning_about_workers_that_trained_separately_is_given_after_all_have_ended(folder):
    left(folder, 0)
    assert alone_text(make_job(**TWO), folder, 1) is None
    left(folder, 1)
    text = alone_text(make_job(**TWO), folder, 1)
    assert text is not None
    assert text.startswith(
        "2 workers, none joined a process group: each has trained alone. Call torch.distributed.init_"
    )
    assert text.endswith("Where it is meant, set PACELINE_SEPARATE_WORKERS=1.")


def test_warning_about_lightning_workers_that_trained_separately_has_the_trainer_arguments(folder):
    left(folder, 0, 1, 2, 3, library="lightning")
    text = alone_text(make_job(**{**TWO, "node_count": 2}), folder, 1)
    assert text is not None
    assert "Give the Trainer devices=2, num_nodes=2, strategy='ddp'." in text


def test_single_worker_or_parameter_server_run_gets_no_warning_about_separate_training(folder):
    left(folder, 0, 1, library="tensorflow")
    assert alone_text(make_job(), folder, 1) is None
    servers = {"distributed_backend": "ps", "worker_count": 1, "parameter_server_count": 1}
    assert alone_text(make_job(**servers), folder, 1) is None


RAISED = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    raise ValueError('bad batch')",
    "ValueError: bad batch",
]
OF_TORCHRUN = [
    "E1128 06:20:11 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 1",
    "Traceback (most recent call last):",
    '  File "/env/bin/torchrun", line 7, in <module>',
    "    sys.exit(main())",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    *["=" * 60] * 20,
]
OF_RICH = [
    "╭─ Traceback (most recent call last) ─╮",
    "│ train.py:3 in <module>              │",
    "╰─────────────────────────────────────╯",
]


@pytest.mark.promise("traceback-end-program-s-log")
@pytest.mark.parametrize(
    ("lines", "exception"),
    [
        (["epoch 1", *RAISED], "ValueError: bad batch"),
        ([f"[rank 1] {line}" for line in RAISED], "ValueError: bad batch"),
        ([f"[rank1]: {line}" for line in RAISED], "ValueError: bad batch"),
        ([f"[default1]:{line}" for line in RAISED], "ValueError: bad batch"),
        (
            [
                *RAISED,
                "",
                "During handling of the above exception, another exception occurred:",
                "",
                *RAISED[:3],
                "Oops",
            ],
            "Oops",
        ),
        ([*RAISED, *OF_TORCHRUN], "ValueError: bad batch"),
        ([*OF_RICH, "ValueError: bad batch"], "ValueError: bad batch"),
        ([*RAISED, "train.sh: giving up"], "ValueError: bad batch"),
        # The program continued after the traceback, and failed for another reason.
        ([*RAISED, *(f"epoch {number}" for number in range(20))], None),
        (["Traceback (most recent call last):", "  File"], None),
        ([], None),
    ],
)
def test_traceback_at_the_end_of_the_log_of_a_program_is_reported_as_its_exception(
    lines: list[str], exception: str | None
) -> None:
    found = printed_traceback(lines)
    assert (found and found[0]) == exception
    assert found is None or (found[1].endswith(found[0]) and "Traceback" in found[1].splitlines()[0])


def clash(*ends: WorkerEnd, log: tuple[str, ...] = (), held: dict[int, str] | None = None):
    return find_clash(LAUNCH, ends, log_lines=lambda rank: log, holder=(held or {}).get)


@pytest.mark.parametrize(
    ("error", "log", "port"),
    [
        (TORCH.format(port=29500), "", "29500 (MASTER_PORT)"),
        (f"RuntimeError: {GRPC.format(port=29501)}", "", "29501 (JAX_COORDINATOR_ADDRESS)"),
        (TENSORFLOW, GRPC.format(port=26), "26 (TF_CONFIG)"),
    ],
)
def test_occupied_port_of_the_run_is_named_with_its_process(error, log, port):
    end = raised(0, error, at=5.0)
    number = int(port.split()[0])
    assert clash(end, log=(log,), held={number: "pid 41 (nginx)"}) == (
        end,
        f"port {port} was taken by pid 41 (nginx) before the worker could listen on it.",
    )
    assert "by another program or by one of the run's own processes" in clash(end, log=(log,))[1]


@pytest.mark.parametrize(
    "end",
    [
        raised(0, TORCH.format(port=8080), at=5.0),
        raised(0, TORCH.format(port=129500), at=5.0),
        raised(0, BARE, at=5.0),
        raised(0, "ValueError: 29500 is not a batch size", at=5.0),
        exited(0, 1, 5.0, "INFO 29500 steps"),
    ],
    ids=["its own port", "a longer number", "a port that is free", "no port", "no exception"],
)
def test_port_error_without_an_occupied_port_of_the_run_is_not_reported_as_a_port_clash(end):
    assert clash(end, log=("retried: port 29500: address already in use",) if end.error is None else ()) is None


def test_port_error_without_a_number_is_assigned_to_the_occupied_port_of_the_run():
    end = raised(1, BARE, at=5.0)
    assert clash(end, held={29501: "pid 7 (x)"})[1].startswith(
        "port 29501 (JAX_COORDINATOR_ADDRESS) was taken by pid 7 (x)"
    )


def test_port_clash_is_recognized_in_the_last_lines_of_a_worker():
    assert clash(exited(0, 134, 5.0, GRPC.format(port=25))) is not None


def test_port_clash_is_blamed_even_if_other_workers_failed_first():
    ends = (raised(1, "RuntimeError: Connection reset by peer", at=1.0), raised(0, TORCH.format(port=29500), at=5.0))
    report = worker_report("digits_1_2", 1, ends, oom_killed=False, clash=clash(*ends))
    assert (report.cause, report.rank, report.exit_code) == ("port", 0, 1)
    assert report.message.startswith("Rank 0 on node n failed first: port 29500 (MASTER_PORT) was taken")
    assert [rank for rank, _ in report.victims] == [1]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_holder_of_a_port_is_its_listener_and_not_a_client(family):
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as listener, socket.socket(family) as client:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip("needs IPv6")
        listener.listen()
        port = listener.getsockname()[1]
        client.connect((address, port))
        assert holder_here(port).startswith(f"pid {os.getpid()} (")
        assert holder_here(client.getsockname()[1]) is None
    assert holder_here(port) is None
