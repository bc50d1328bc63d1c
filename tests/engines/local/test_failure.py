"""How a run fails, and its error: which rank failed first, why, and with which exit code."""

from __future__ import annotations

import re
from typing import Any

import pytest

import paceline as pl
from paceline.compat import azureml
from paceline.runs import states
from paceline.runs.failure import FailureReport
from tests.engines.lab import Lab, exit_codes, log_text
from tests.engines.parents import BELOW_THE_SUPERVISOR

TWO = {"process_count_per_node": 2, "distributed_backend": "gloo"}

#: Code that connects rank 0 and rank 1 of a script: `peer` is the socket to the other rank.
CONNECTED = """
import os, socket, sys, time
rank, place = int(os.environ["PACELINE_RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as server:
        peer, _ = server.accept()
else:
    while True:
        try:
            peer = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""

#: Append this code to `CONNECTED`: rank 0 exits with code 0, and rank 1 waits until the supervisor has noticed this
#: exit.
SEES_THE_END = """
if rank == 0:
    peer.sendall(str(os.getpid()).encode())
    sys.exit(0)
there = f"/proc/{peer.recv(100).decode()}"
while os.path.exists(there):
    time.sleep(0.01)
"""

NO_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"


def failed(run: pl.Run) -> FailureReport:
    assert run.status == states.FAILED
    report = run.failure
    assert report is not None
    assert run.record().exit_code == report.exit_code
    return report


ENDS = {
    "sys.exit(3)": ("import sys; sys.exit(3)", 3, "exception", None),
    "sys.exit of a text": ("import sys; sys.exit('no data')", 1, "exception", None),
    "os._exit(7)": ("import os; os._exit(7)", 7, "exception", None),
    "an interrupt": ("raise KeyboardInterrupt", 130, "exception", None),
    "SIGSEGV": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed", "SIGSEGV"),
    "a null pointer": ("import ctypes; ctypes.string_at(0)", 139, "killed", "SIGSEGV"),
    "abort": ("import os; os.abort()", 134, "killed", "SIGABRT"),
    "SIGKILL": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "killed", "SIGKILL"),
    "SIGTERM": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143, "killed", "SIGTERM"),
}


@pytest.mark.promise("command-exits-worker-s-own")
@pytest.mark.parametrize("end", ENDS)
def test_exit_code_of_the_run_is_that_of_its_worker(lab: Lab, end: str) -> None:
    code, exit_code, cause, signal_name = ENDS[end]
    run = lab.finish(NO_CORE + code)

    report = failed(run)
    assert (report.exit_code, report.cause, report.signal) == (exit_code, cause, signal_name)
    assert exit_codes(run) == {"0": exit_code}
    if signal_name:
        assert signal_name in report.message
    if signal_name in ("SIGSEGV", "SIGABRT"):
        assert report.traceback is not None
        assert re.search(r'train.py", line \d+ in <module>$', report.traceback)
    assert report.see == f"paceline logs {run.id}"


@pytest.mark.promise("command-exits-worker-s-own")
@pytest.mark.parametrize("end", ["sys.exit(3)", "a null pointer"])
def test_exit_code_of_an_mpirun_run_is_that_of_its_failed_worker(lab: Lab, mpirun: str, end: str) -> None:
    code, exit_code, cause, signal_name = ENDS[end]
    script = f"""
        import os, time
        {NO_CORE}
        if os.environ["PACELINE_RANK"] == "0":
            open("outputs/there", "w")
            time.sleep(600)
        while not os.path.exists("outputs/there"):
            time.sleep(0.01)
        {code}
    """
    run = lab.finish(script, process_count_per_node=2, distributed_backend="mpi")

    report = failed(run)
    assert (report.rank, report.exit_code, report.cause, report.signal) == (1, exit_code, cause, signal_name)
    assert exit_codes(run) == {"0": 143, "1": exit_code}
    assert report.victims == ((0, "was ended by Paceline because of it."),)
    assert signal_name is None or "Fatal Python error: Segmentation fault" in str(report)
    assert report.see == f"paceline logs {run.id} --rank 1"


@pytest.mark.promise("report-names-worker-failed-first")
def test_failed_rank_is_named_even_if_a_rank_that_lost_its_connection_exits_earlier(lab: Lab) -> None:
    script = CONNECTED + (
        "import atexit\n"
        "if rank == 1:\n"
        # Python calls the last registered function first: rank 1 closes the connection, and then sleeps. It has already
        # reported its exception.
        "    atexit.register(time.sleep, 600)\n"
        "    atexit.register(peer.shutdown, socket.SHUT_RDWR)\n"
        "    raise ValueError('bad batch')\n"
        "if not peer.recv(1):\n"
        "    raise RuntimeError('[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2345')\n"
    )
    run = lab.finish(script, **TWO)

    report = failed(run)
    assert (report.rank, report.exception) == (1, "ValueError: bad batch")
    ((victim, what),) = report.victims
    assert victim == 0
    assert "Connection closed by peer" in what
    assert "rank 0 lost its connection" in str(report)


def test_failed_rank_that_never_exits_is_named(lab: Lab) -> None:
    script = CONNECTED + (
        "import atexit\n"
        "if rank == 0:\n"
        "    atexit.register(time.sleep, 600)\n"
        "    raise ValueError('bad batch')\n"
        "time.sleep(600)\n"
    )
    report = failed(lab.finish(script, **TWO))

    assert (report.rank, report.exception, report.exit_code) == (0, "ValueError: bad batch", 1)


@pytest.mark.promise("report-names-worker-failed-first")
def test_first_of_two_independent_failures_is_named(lab: Lab) -> None:
    script = CONNECTED + (
        "if rank == 1:\n"
        # Rank 1 calls this function after it has reported its exception. It lets the other rank fail and waits until
        # that rank has ended.
        "    import atexit\n"
        "    atexit.register(lambda: (peer.sendall(b'x'), peer.recv(1)))\n"
        "    raise KeyError('first')\n"
        "peer.recv(1)\n"
        "raise ValueError('second')\n"
    )
    report = failed(lab.finish(script, **TWO))

    assert (report.rank, report.exception) == (1, "KeyError: 'first'")
    assert report.victims == ((0, "failed after it: ValueError: second"),)


def test_rank_that_exits_with_0_does_not_hide_a_failed_rank(lab: Lab) -> None:
    run = lab.finish(CONNECTED + SEES_THE_END + "sys.exit(4)\n", **TWO)

    report = failed(run)
    assert (report.rank, report.exit_code, report.victims) == (1, 4, ())
    assert exit_codes(run) == {"0": 0, "1": 4}


def test_failure_report_mentions_a_rank_that_exited_with_0_before_its_peer_failed(lab: Lab) -> None:
    script = SEES_THE_END + "if not peer.recv(1):\n    raise ConnectionResetError('Connection reset by peer')\n"
    report = failed(lab.finish(CONNECTED + script, **TWO))

    assert report.rank == 1
    assert "Before that, rank 0 had ended with exit code 0." in report.message


@BELOW_THE_SUPERVISOR
def test_traceback_of_a_syntax_error_shows_the_line_and_no_paceline_frames(lab: Lab, parent: dict[str, Any]) -> None:
    run = lab.finish("x = 1\nprint('unfinished'\n", **parent)

    report = failed(run)
    assert report.cause == "exception"
    assert report.exception == "SyntaxError: '(' was never closed"
    assert report.traceback is not None
    assert 'train.py", line 2' in report.traceback
    assert "paceline" not in report.traceback.replace(str(lab.folder), "")
    assert "SyntaxError: '(' was never closed" in log_text(run, report.rank or 0)


@BELOW_THE_SUPERVISOR
def test_failure_report_names_the_module_that_could_not_be_imported(lab: Lab, parent: dict[str, Any]) -> None:
    run = lab.finish("def main():\n    import nonesuch\nmain()\n", **parent)

    report = failed(run)
    assert report.exception == "ModuleNotFoundError: No module named 'nonesuch'"
    lines = (report.traceback or "").splitlines()
    assert [line.split(", ")[-1] for line in lines if line.startswith("  File")] == ["in <module>", "in main"]
    # Compare the report with the traceback that Python itself has printed at the end of the log.
    printed = log_text(run, report.rank or 0).splitlines()[-len(lines) :]
    # The report has the user's own path instead of the path of the run's copy.
    assert [line.replace(f"{run.folder.work}/", f"{run.record().source_directory}/") for line in printed] == lines


@pytest.mark.promise("exception-waiting-raises-same-report")
def test_wait_for_completion_raises_the_failure_report(lab: Lab) -> None:
    run = lab.submit("print('before')\nraise ValueError('bad batch')\n")
    with pytest.raises(pl.errors.RunFailedError, match="ValueError: bad batch") as caught:
        run.wait_for_completion()

    assert caught.value.report == failed(run)
    assert caught.value.report.last_lines[0] == "before"
    details = azureml.Run(run.experiment, run.id).get_details()
    assert details["error"]["error"]["code"] == "exception"
    assert "ValueError: bad batch" in details["error"]["error"]["message"]


def test_failure_report_names_an_exception_whose_str_raises(lab: Lab) -> None:
    script = """
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("no text")
        raise Odd
    """
    report = failed(lab.finish(script))
    assert report.exception is not None
    assert "Odd" in report.exception


def test_sys_excepthook_set_by_the_script_is_called(lab: Lab) -> None:
    script = "import sys\nsys.excepthook = lambda *e: print('hook saw', e[1])\nraise ValueError('bad batch')\n"
    run = lab.finish(script)

    assert log_text(run) == "hook saw bad batch\n"
    assert failed(run).exception == "ValueError: bad batch"
