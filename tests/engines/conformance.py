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

#: Variables of a worker that follow from the node's cores and network.
PLACE = {"OMP_NUM_THREADS", "OMPI_MCA_btl", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
#: What readers leave to a supervisor whose job is gone: these clusters' files are this machine's, where nothing is late.
GRACE_S = 2.0
#: How old Slurm's or Ray's answer may be, 5 s otherwise: few runs ask here, and nobody else.
FRESH_S = 0.5
#: `silence_s` of targets whose nodes are lost without a word; each kind has a test at the default.
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
        # A run without a living supervisor no longer counts; the next run that asks removes it.
        return [*super().left(run), *(str(path) for path in mine if locks.is_held(run.folder.lock))]


#: Checks of each backend's workers. What agents do with these is the same on all targets, so that hosts over SSH have Gloo's or
#: mpirun's, Slurm and Ray, which only bring the agents, mpirun's or none: they have all that Gloo's have, and daemons. The single
#: one, which is Gloo's first, is left to this machine's own suite. `make proof` does the others.
_OF_LOST_SUPERVISORS = (
    "test_a_run_whose_supervisor_was_killed_has_failed",
    "test_a_run_whose_supervisor_and_guardian_were_killed_has_failed",
)
_OF_ATTEMPTS = (
    "test_a_run_whose_worker_was_killed_makes_a_second_attempt",
    "test_the_report_names_the_worker_that_failed_and_why",
)
_OF_WORKERS = ("test_a_run_is_canceled_while_it_runs", *_OF_LOST_SUPERVISORS, *_OF_ATTEMPTS)
#: Checks of one plain run with each backend. On Slurm and Ray, Gloo's workers are compared with this machine's by
#: test_workers_on_slurm_get_the_same_ranks_and_world_size_variables_as_on_this_machine and
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
#: Checks that only the single worker's plain run serves: mpirun's workers have the others' check of the same run.
_OF_ONE_PLAIN_RUN = ("test_canceling_a_run_that_has_ended_changes_nothing",)
#: Checks of what supervisors and agents do, which is the same code on all targets; this machine's suite and that of hosts over
#: SSH have them all. What an engine does with runs that wait, and with those that it ends, test_slurm.py and test_ray.py ask.
_OF_SUPERVISORS = (
    "test_runs_at_the_same_time_have_separate_outputs_and_logs",
    "test_the_report_distinguishes_a_killed_worker_from_a_failed_one",
    "test_a_run_is_canceled_while_it_waits",
    "test_a_run_is_canceled_while_it_prepares",
    "test_a_run_is_ended_at_its_time_limit",
    # Without a shared folder reading is another matter: see the suites of those.
    "test_metrics_logs_and_outputs_can_be_read_while_a_run_runs",
)
_OF_SUPERVISORS_BY_BACKEND = ("test_a_run_whose_supervisor_was_killed_has_failed", *_OF_ATTEMPTS)
# Suite -> check -> its backends that `make proof` does, "" for a check that has none. Of losses, each way to lose a host and each
# backend is once among those that end a run and once among those that a run outlives, with test_ssh.py, where a host is cut off
# from Gloo's workers; test_slurm.py and test_ray.py have a loss with Gloo, with the next attempt and at the default silence.
_OF_AGENTS_ALONE = {
    **dict.fromkeys(_OF_WORKERS, ("single", "gloo")),
    **dict.fromkeys(_OF_PLAIN_RUNS, ("single", "gloo")),
    **dict.fromkeys((*_OF_ONE_PLAIN_RUN, *_OF_SUPERVISORS), ("",)),
    **dict.fromkeys(_OF_SUPERVISORS_BY_BACKEND, ("single", "gloo", "mpi")),
    _ENDS: ("gloo",),
}
# Over SSH, what a lost supervisor leaves is looked at where there is more of it, with mpirun's daemons. That one of mpirun's
# workers fails is seen in test_ended_mpi_workers_leave_no_container_on_any_node, and another attempt of such workers in
# the check of a run that goes on.
_LEFT_TO_PROOF: Mapping[str, Mapping[str, Sequence[str]]] = {
    # On this machine test_end.py, test_failure.py and test_restart.py ask the same of Gloo's workers or of single ones; what
    # mpirun's daemons leave where a supervisor is lost is looked at over SSH, where they are on two hosts.
    "TestLocal": {
        **dict.fromkeys((*_OF_LOST_SUPERVISORS, *_OF_ATTEMPTS), ("gloo", "mpi")),
        "test_a_run_is_canceled_while_it_runs": ("single", "gloo"),
    },
    "TestSsh": {
        **dict.fromkeys(_OF_WORKERS, ("single",)),
        # Gloo's workers, and their cancel, test_ssh.py has on two hosts.
        **dict.fromkeys(_OF_PLAIN_RUNS, ("gloo",)),
        "test_a_run_is_canceled_while_it_runs": ("single", "gloo"),
        **dict.fromkeys(_OF_LOST_SUPERVISORS, ("single", "gloo")),
        **dict.fromkeys(_OF_ATTEMPTS, ("single", "mpi")),
        _ENDS: ("mpi",),
        _GOES_ON: ("gloo",),
    },
    "TestSshWithASharedFolder": {_ENDS: ("gloo",)},
    # test_slurm.py has cancels of its own: by Paceline, with the grace period, and by scancel.
    "TestSlurm": _OF_AGENTS_ALONE | {"test_a_run_is_canceled_while_it_runs": ("single", "gloo", "mpi")},
    # Each loss takes several of Ray's processes to make good; test_ray.py has one.
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
