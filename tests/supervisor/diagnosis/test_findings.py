from __future__ import annotations

import pytest

from paceline.observe.load_watch import Sample
from paceline.runs.folder import RunFolder
from paceline.supervisor.diagnosis.findings import Findings, may_have_lost_a_node, report
from paceline.system.files import write_json
from tests.helpers import make_job, make_launch
from tests.supervisor.diagnosis.test_diagnose import error

TWO = make_launch(make_job(distributed_backend="mpi", node_count=2, process_count_per_node=1))
RESET = error("RuntimeError: Connection reset by peer", at=1.0)
WRONG = error("ValueError: wrong", at=1.0)


@pytest.fixture
def found(tmp_path):
    def make(**values) -> Findings:
        folder = RunFolder(tmp_path)
        folder.attempt(1).mkdir(parents=True, exist_ok=True)
        folder.logs.mkdir(exist_ok=True)
        folder.driver_log.write_text(values.pop("driver", ""))
        given = {
            "launch": TWO,
            "folder": folder,
            "is_here": False,
            "has_launcher": True,
            "launcher_code": 0,
            "started": frozenset({0, 1}),
            "exit_codes": {0: 1},
            "ended_at": {},
            "errors": {},
            "asked": {},
            "lost": {},
            "driver_from": 0,
            "is_oom": lambda node: False,
            "is_disk_full": lambda: False,
        }
        return Findings(**(given | values))

    return make


SIGNALLED = "process rank 0 with PID 5 on node node-0 exited on\nsignal 9"


@pytest.mark.parametrize(
    ("values", "may"),
    [
        ({"errors": {0: RESET}}, True),
        ({"exit_codes": {0: 143}, "launcher_code": 1}, True),
        ({"exit_codes": {}, "launcher_code": 1}, True),
        ({"errors": {0: WRONG}}, False),
        ({"exit_codes": {0: 139}}, False),
        ({"exit_codes": {0: 137}, "driver": SIGNALLED}, False),
        ({"errors": {0: RESET}, "exit_codes": {0: 1, 1: 0}}, False),
        ({"errors": {0: RESET}, "is_here": True}, False),
        ({"errors": {0: RESET}, "lost": {1: "gone"}}, False),
        ({"exit_codes": {0: 143}, "has_launcher": False, "launcher_code": None}, False),
        ({"exit_codes": {0: 0, 1: 0}}, False),
        ({"exit_codes": {0: 0}}, True),
        ({"exit_codes": {0: 0}, "launcher_code": None}, False),
        ({"exit_codes": {0: 137, 1: 137}, "driver": "PRTE has lost communication with a remote daemon.\n"}, True),
        ({"exit_codes": {0: 137, 1: 137}}, False),
    ],
    ids=[
        "a peer lost its connection",
        "mpirun ended the others",
        "mpirun failed",
        "an exception",
        "a crash",
        "mpirun names a killed rank",
        "all were heard of",
        "on this machine",
        "it is known already",
        "killed by somebody",
        "all went well",
        "mpirun ended well before a rank was heard of",
        "a rank has ended and the other runs",
        "mpirun says that it has lost a daemon",
        "all were killed",
    ],
)
def test_node_loss_is_suspected_only_if_no_other_cause_explains_the_failure(found, values, may):
    assert may_have_lost_a_node(found(**values)) is may


def test_lost_node_is_blamed_even_if_a_peer_failed_first_and_mpirun_succeeded(found):
    # Open MPI 5's mpirun exits with 0 when it loses a host.
    told = report(found(errors={0: RESET}, lost={1: "ssh: nothing heard for 15 s."}))
    assert (told.cause, told.node, told.rank, told.exit_code) == ("node_lost", "node-1", 1, 1)
    assert told.message == "Node node-1 was lost, with rank 1: ssh: nothing heard for 15 s."


def test_exception_of_a_worker_is_the_reported_cause_even_if_a_node_was_lost(found):
    told = report(found(errors={0: WRONG}, lost={1: "gone"}))
    assert (told.cause, told.rank) == ("exception", 0)


def test_rank_that_ended_for_a_resize_is_not_blamed_for_a_lost_node(found):
    # Regression: both ranks exited for a resize. Then a host crashed before the supervisor knew its rank's exit code,
    # and the rank was blamed.
    launch = make_launch(make_job(distributed_backend="gloo", node_count=(1, 2), process_count_per_node=1).resized(2))
    values = {"has_launcher": False, "launcher_code": None, "exit_codes": {1: 79}}
    left = {rank: error("SystemExit: 79", at=1.0, exit_code=79) for rank in range(2)}
    told = report(found(launch=launch, errors=left, lost={0: "gone"}, **values))
    assert (told.cause, told.node) == ("node_lost", "node-0")
    # Without a detected loss, the attempt has the exit code with which the ranks left.
    assert report(found(launch=launch, errors=left, **values)).exit_code == 79


def test_sys_exit_code_of_a_script_is_reported_before_its_process_has_ended(found):
    told = report(found(errors={0: error("SystemExit: 3", at=1.0, exit_code=3)}, exit_codes={}))
    assert (told.exit_code, told.message) == (3, "Rank 0 on node node-0 failed: the script left with exit code 3.")


def test_mpirun_success_with_missing_ranks_is_a_failure(found):
    told = report(found(exit_codes={0: 0}))
    assert (told.cause, told.exit_code) == ("launcher", 1)
    assert "while ranks [1] had not reported their end" in told.message


@pytest.mark.parametrize(
    ("code", "words"),
    [(137, "mpirun was killed by SIGKILL."), (205, "mpirun ended with exit code 205 while ranks [1]")],
)
def test_exit_code_above_all_signal_numbers_is_not_reported_as_a_signal(found, code, words):
    # Exit code 205 is that of Open MPI 4's mpirun after the loss of one of its daemons.
    assert words in report(found(exit_codes={0: 0}, launcher_code=code)).message


@pytest.mark.promise("worker-ran-out-memory-told")
def test_out_of_memory_report_has_the_memory_use(found):
    folder = RunFolder(found().folder.path)
    write_json(folder.memory_plan(1, 1), {"parameters": 4 << 30})
    seen = Sample(at_s=0.0, nodes={1: {"memory_gib": 60.0, "memory_total_gib": 64.0}}, ranks={1: {"memory_gib": 55.0}})
    told = report(found(exit_codes={0: 143, 1: 137}, asked={0: 5.0}, is_oom=lambda node: node == 1, samples=(seen,)))
    assert (told.cause, told.rank) == ("memory", 1)
    assert "killed by SIGKILL, by the kernel for memory" in told.message
    assert "Rank 1 held 55.0 GiB when it was last seen" in told.message.replace(", when", " when")
    assert "By parallelize's plan: parameters 4.0 GiB" in told.message
    # The kernel counts out-of-memory kills of all users. A worker of 22 MiB was not killed for memory.
    killed = {"exit_codes": {0: 143, 1: 137}, "asked": {0: 5.0}, "is_oom": lambda node: node == 1}
    assert report(found(**killed, peaks={1: 22 << 20})).cause == "killed"
    assert report(found(**killed, peaks={1: 5 << 30})).cause == "memory"
    # torch reports a full GPU. The memory of the machine has nothing to do with it.
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    told = report(found(errors={1: error(said, at=1.0, is_memory=True)}, samples=(seen,)))
    assert told.cause == "memory"
    assert told.message.endswith(
        f"{said} By parallelize's plan: parameters 4.0 GiB; the rest is activations, data and what libraries keep."
    )
    # The message of another failure does not mention memory.
    assert "held" not in report(found(errors={0: WRONG}, samples=(seen,))).message
