"""What each compute target's folder tests of it: the suite that Paceline ships, and that one job is the same on all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.runs.run import Run
from paceline.system import locks
from paceline.testing.bench import Bench, seen, states_of, text_of
from paceline.testing.completing import WAYS
from paceline.testing.targets import TargetConformance, TargetUnderTest
from paceline.testing.worker_environment import comparable, expected

#: Variables of a worker that depend on the cores and the network of its node.
PLACE = {"OMP_NUM_THREADS", "OMPI_MCA_btl", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
#: Seconds that readers wait for a supervisor whose job is gone. A few seconds suffice, because all files are on this
#: machine.
GRACE_S = 2.0
#: Maximum age in seconds of a cached response of Slurm or Ray (default: 5). Few runs send requests here, so the
#: responses can be newer.
FRESH_S = 0.5
#: Seconds without a message after which a target counts a node as lost. For each kind of target, another test uses the
#: default.
SILENCE_S = 12.0


class Local(TargetUnderTest):
    """This machine."""

    kind = "local"
    never_fits: Mapping[str, Any] = {"use_gpu": True}
    slack_s = 60.0

    @property
    def whole(self) -> Mapping[str, Any]:
        cores = len(os.sched_getaffinity(0))
        return {"process_count_per_node": cores, "distributed_backend": "gloo"}

    def left(self, run: Run) -> list[str]:
        tickets = Path(os.environ["PACELINE_LEASES"]).glob("tickets/*.ticket")
        mine = [path for path in tickets if run.id in path.read_text()]
        # A run has a ticket in the machine's queue. Ignore the ticket of a run whose supervisor has ended: the next run
        # removes it.
        return [*super().left(run), *(str(path) for path in mine if locks.is_held(run.folder.lock))]


#: Tests that run once for each backend of the workers. Paceline's agents start and end workers in the same way on every
#: target, so `make test` uses some backends: a single worker on this machine, Gloo or mpirun on SSH hosts, mpirun on
#: Slurm and Ray.
_OF_LOST_SUPERVISORS = (
    "test_a_run_whose_supervisor_was_killed_has_failed",
    "test_a_run_whose_supervisor_and_guardian_were_killed_has_failed",
)
_OF_ATTEMPTS = (
    "test_a_run_whose_worker_was_killed_makes_a_second_attempt",
    "test_the_report_names_the_worker_that_failed_and_why",
)
_OF_WORKERS = ("test_a_run_is_canceled_while_it_runs", *_OF_LOST_SUPERVISORS, *_OF_ATTEMPTS)
#: Tests of one plain run that run once for each backend. On Slurm and Ray, two other tests compare Gloo's workers with
#: those on this machine: test_workers_on_slurm_get_the_same_ranks_and_world_size_variables_as_on_this_machine and
#: test_workers_on_two_ray_nodes_train_together_and_inherit_no_environment_variable_of_ray.
_OF_PLAIN_RUNS = (
    "test_a_run_goes_through_its_states_in_order",
    "test_workers_logs_outputs_and_metrics_arrive_in_the_run_folder",
    "test_workers_get_the_documented_environment_variables",
    "test_run_on_an_engine_has_the_same_states_files_metrics_and_logs_as_locally",
)
_ENDS, _GOES_ON = (
    "test_the_loss_of_a_node_ends_the_attempt_on_all_nodes",
    "test_a_run_continues_after_the_loss_of_a_node",
)
#: Tests of one plain run that need only a single worker.
_OF_ONE_PLAIN_RUN = ("test_canceling_a_run_that_has_ended_changes_nothing",)
#: Tests of supervisors and agents. `make test` runs them on this machine and on SSH hosts, because the code is the same
#: on all targets. test_slurm.py and test_ray.py test runs that wait, and runs that the engine ends.
_OF_SUPERVISORS = (
    "test_runs_at_the_same_time_have_separate_outputs_and_logs",
    "test_the_report_distinguishes_a_killed_worker_from_a_failed_one",
    "test_a_run_is_canceled_while_it_waits",
    "test_a_run_is_canceled_while_it_prepares",
    "test_a_run_is_ended_at_its_time_limit",
    # For targets without a shared folder, separate tests read a run while it runs.
    "test_metrics_logs_and_outputs_can_be_read_while_a_run_runs",
)
_OF_SUPERVISORS_BY_BACKEND = ("test_a_run_whose_supervisor_was_killed_has_failed", *_OF_ATTEMPTS)
# Test -> backends with which only `make proof` runs it, or "" for a test without a backend. `make test` still tests
# each way to lose a host, and each backend once for runs that end and once for runs that continue.
_OF_AGENTS_ALONE = {
    **dict.fromkeys(_OF_WORKERS, ("single", "gloo")),
    **dict.fromkeys(_OF_PLAIN_RUNS, ("single", "gloo")),
    **dict.fromkeys((*_OF_ONE_PLAIN_RUN, *_OF_SUPERVISORS), ("",)),
    **dict.fromkeys(_OF_SUPERVISORS_BY_BACKEND, ("single", "gloo", "mpi")),
    _ENDS: ("gloo",),
}
# Test class -> test -> backends with which only `make proof` runs it. The loss of a supervisor is tested over SSH with
# mpirun, because mpirun's daemons outlive the supervisor. The failure of one of mpirun's workers is tested in
# test_ended_mpi_workers_leave_no_container_on_any_node.
_LEFT_TO_PROOF: Mapping[str, Mapping[str, Sequence[str]]] = {
    # On this machine, test_end.py, test_failure.py and test_restart.py cover runs with Gloo and runs of single workers.
    # The tests on two SSH hosts cover runs with mpirun.
    "TestLocal": {
        **dict.fromkeys((*_OF_LOST_SUPERVISORS, *_OF_ATTEMPTS), ("gloo", "mpi")),
        "test_a_run_is_canceled_while_it_runs": ("single", "gloo"),
    },
    "TestSsh": {
        **dict.fromkeys(_OF_WORKERS, ("single",)),
        # test_ssh.py runs and cancels Gloo's workers on two hosts.
        **dict.fromkeys(_OF_PLAIN_RUNS, ("gloo",)),
        "test_a_run_is_canceled_while_it_runs": ("single", "gloo"),
        **dict.fromkeys(_OF_LOST_SUPERVISORS, ("single", "gloo")),
        **dict.fromkeys(_OF_ATTEMPTS, ("single", "mpi")),
        _ENDS: ("mpi",),
        _GOES_ON: ("gloo",),
    },
    "TestSshWithASharedFolder": {_ENDS: ("gloo",)},
    # test_slurm.py cancels a run by Paceline, with its grace period, and by scancel.
    "TestSlurm": _OF_AGENTS_ALONE | {"test_a_run_is_canceled_while_it_runs": ("single", "gloo", "mpi")},
    # After the loss of a node, Ray starts several processes again, which takes long. So only test_ray.py tests such a
    # loss.
    "TestRay": _OF_AGENTS_ALONE
    | {
        _ENDS: ("gloo", "mpi"),
        "test_a_run_whose_supervisor_and_guardian_were_killed_has_failed": ("single", "gloo", "mpi"),
        "test_a_run_canceled_right_after_its_submission_ends_as_canceled": ("",),
    },
}


def is_left_to_proof(nodeid: str) -> bool:
    """Return whether the test repeats for a target or a backend what other tests check."""
    *_, suite, name = nodeid.split("::")
    check, _, backend = name.rstrip("]").partition("[")
    return backend in _LEFT_TO_PROOF.get(suite, {}).get(check, ())


class SameAsLocal(TargetConformance):
    """The suite, and that a run has the same result as on `local`."""

    @WAYS
    def test_run_on_an_engine_has_the_same_states_files_metrics_and_logs_as_locally(
        self, bench: Bench, local: Local, backend: str | None, request: pytest.FixtureRequest
    ) -> None:
        run, here = bench.plain(backend), Bench(local).plain(backend)

        assert states_of(run) == states_of(here)
        assert files_of(run) == files_of(here)
        assert (run.get_metrics(by_rank=True), run.tags) == (here.get_metrics(by_rank=True), here.tags)
        (mine,), (theirs,) = run.record().attempts, here.record().attempts
        assert mine.exit_codes == theirs.exit_codes
        for rank in map(int, mine.exit_codes):
            assert text_of(run.folder.live_log(rank)) == text_of(here.folder.live_log(rank))
            found = [seen(one, rank) for one in (run, here)]
            names = [expected(one, rank, what["environment"]) for one, what in zip((run, here), found, strict=True)]
            assert set(names[0]) - PLACE == set(names[1]) - PLACE
            assert comparable(found[0]["environment"], set(names[0]) - PLACE) == comparable(
                found[1]["environment"], set(names[1]) - PLACE
            )
            same = ("argv", "stdin", "tool", "link", "sum", "blob", "python")
            assert {name: found[0][name] for name in same} == {name: found[1][name] for name in same}


def files_of(run: Run) -> dict[str, str]:
    """Return name -> hash of the script's files; the records of each worker are compared separately."""
    found = {}
    for top in (run.folder.outputs, run.folder.checkpoints, run.folder.artifacts):
        for path in top.rglob("*"):
            if path.is_file() and not path.name.startswith("seen_"):
                found[str(path.relative_to(run.folder.path))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
