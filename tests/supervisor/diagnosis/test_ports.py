from __future__ import annotations

import os
import socket

import pytest

from paceline.supervisor.diagnosis.diagnose import WorkerEnd, worker_report
from paceline.supervisor.diagnosis.ports import find_clash, holder_here
from tests.helpers import make_job, make_launch
from tests.supervisor.diagnosis.test_diagnose import exited, raised

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
def test_a_port_of_the_run_that_was_taken_is_named_with_who_has_it(error, log, port):
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
        raised(0, "ValueError: 29500 is no batch size", at=5.0),
        exited(0, 1, 5.0, "INFO 29500 steps"),
    ],
    ids=["its own port", "a longer number", "a port that is free", "no port", "no exception"],
)
def test_what_is_no_port_of_the_run_is_the_scripts_own_failure(end):
    assert clash(end, log=("retried: port 29500: address already in use",) if end.error is None else ()) is None


def test_a_port_that_the_exception_does_not_name_is_one_of_the_runs_if_somebody_is_there():
    end = raised(1, BARE, at=5.0)
    assert clash(end, held={29501: "pid 7 (x)"})[1].startswith(
        "port 29501 (JAX_COORDINATOR_ADDRESS) was taken by pid 7 (x)"
    )


def test_a_worker_without_an_exception_is_judged_by_its_last_lines():
    assert clash(exited(0, 134, 5.0, GRPC.format(port=25))) is not None


def test_the_clash_is_to_blame_though_others_failed_before():
    ends = (raised(1, "RuntimeError: Connection reset by peer", at=1.0), raised(0, TORCH.format(port=29500), at=5.0))
    report = worker_report("digits_1_2", 1, ends, oom_killed=False, clash=clash(*ends))
    assert (report.cause, report.rank, report.exit_code) == ("port", 0, 1)
    assert report.message.startswith("Rank 0 on node n failed first: port 29500 (MASTER_PORT) was taken")
    assert [rank for rank, _ in report.victims] == [1]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_who_listens_here_is_found_and_whoever_is_only_connected_is_not(family):
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
