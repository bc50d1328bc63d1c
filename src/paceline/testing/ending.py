"""Checks of runs that end early: canceled, timed out, failed, or without their supervisor or a node."""

from __future__ import annotations

import pytest

from paceline.errors import TargetError
from paceline.runs import states
from paceline.runs.run import Run
from paceline.targets import configured
from paceline.targets.base import PARTS
from paceline.testing import scripts
from paceline.testing.bench import GRACE_S, Bench, exit_codes, node_of, text_of
from paceline.testing.completing import WAYS

HOLDS = "rank {rank} holds"

_BACKENDS = pytest.mark.parametrize("backend", ["gloo", "mpi"])


class EndingChecks:
    """Checks that a canceled or timed-out run soon leaves nothing behind."""

    @WAYS
    def test_a_run_is_canceled_while_it_runs(self, bench: Bench, backend: str | None) -> None:
        run = bench.submit(scripts.HOLD, backend)
        job = run.record().job
        assert job is not None
        # Users must be able to read logs and metrics before the first worker has ended.
        bench.wait_for_line(run, HOLDS)
        bench.wait_for_status(run, states.RUNNING)
        for rank in range(job.world_size):
            bench.wait_until(lambda r=rank: run.get_metrics("alive", rank=r) == {"alive": r}, "its metrics arrive")  # type: ignore[misc]
        assert bench.target.processes(run)
        run.cancel()

        assert run.status in (states.CANCEL_REQUESTED, states.FINALIZING, states.CANCELED)
        bench.wait_for_nothing(run, GRACE_S + 5)
        assert bench.wait_for_end(run) == states.CANCELED, bench.story(run)
        record = run.record()
        assert (record.exit_code, record.failure, record.attempts[0].cause) == (143, None, "cancel")
        assert record.canceled_by
        # All workers get the grace period and save a file, except the last worker, which ignores SIGTERM.
        deaf = {job.world_size - 1} if job.world_size > 1 else set()
        for rank in range(job.world_size):
            saved = run.folder.checkpoints / f"rank_{rank}"
            assert saved.exists() == (rank not in deaf), bench.story(run)
            assert rank in deaf or saved.read_text() == "all of it"
            assert ("saved" in text_of(run.folder.live_log(rank)).splitlines()) == (rank not in deaf)
            # SIGKILL ends the last worker. Accept None, because mpirun can't always report a worker's exit code after SIGKILL.
            assert exit_codes(run).get(rank) in ((137, None) if rank in deaf else (0,))

    def test_a_run_is_canceled_while_it_waits(self, bench: Bench) -> None:
        if not bench.target.has_queue:
            pytest.skip(f"target {bench.target.kind!r} has no queue")
        holder = bench.submit(scripts.WAIT, **bench.target.whole)
        bench.wait_for_line(holder, HOLDS)
        waiter = bench.submit(scripts.WAIT, **bench.target.whole)
        bench.wait_for_status(waiter, states.QUEUED)
        bench.wait_until(lambda: waiter.record().waiting_for, "a queued run says what it waits for")
        waiter.cancel()

        assert bench.wait_for_end(waiter) == states.CANCELED
        assert waiter.record().attempts == ()
        # Canceling the waiting run must not end `holder`. Wait for the status, because the record may be older than the log.
        bench.wait_for_status(holder, states.RUNNING)
        next_one = bench.submit("print('at last')\n", **bench.target.whole)
        holder.cancel()
        # Canceling `holder` frees its resources, so the next run can use them.
        assert bench.wait_for_end(next_one) == states.COMPLETED, bench.story(next_one)

    def test_a_run_is_canceled_while_it_prepares(self, bench: Bench) -> None:
        slow = bench.target.slow_preparation()
        if slow is None:
            pytest.skip(f"target {bench.target.kind!r} has no slow preparation")
        run = bench.submit(scripts.HOLD, **slow)
        bench.wait_for_status(run, states.PREPARING)
        run.cancel()

        bench.wait_for_nothing(run, GRACE_S + 5)
        assert bench.wait_for_end(run) == states.CANCELED
        assert run.record().attempts == ()

    def test_a_run_canceled_right_after_its_submission_ends_as_canceled(self, bench: Bench) -> None:
        run = bench.submit(scripts.HOLD, bench.target.backends[0] if bench.target.backends else None)
        run.cancel()

        assert bench.wait_for_end(run) == states.CANCELED, bench.story(run)

    def test_canceling_a_run_that_has_ended_changes_nothing(self, bench: Bench) -> None:
        run = bench.plain(None)
        run.cancel()

        assert run.status == states.COMPLETED

    def test_a_run_is_ended_at_its_time_limit(self, bench: Bench) -> None:
        run = bench.finish(scripts.HOLD, max_run_duration_seconds=1.5)

        report = run.failure
        assert report is not None, run.status
        assert (report.cause, report.exit_code) == ("time_limit", 124), bench.story(run)
        assert run.record().exit_code == 124

    @WAYS
    def test_a_run_whose_supervisor_was_killed_has_failed(self, bench: Bench, backend: str | None) -> None:
        run = bench.submit(scripts.HOLD, backend)
        bench.wait_for_line(run, HOLDS)
        bench.target.kill_supervisor(run, with_guardian=False)

        _has_failed_and_left_nothing(bench, run)

    @WAYS
    def test_a_run_whose_supervisor_and_guardian_were_killed_has_failed(
        self, bench: Bench, backend: str | None
    ) -> None:
        run = bench.submit(scripts.WAIT, backend)
        bench.wait_for_line(run, HOLDS)
        bench.target.kill_supervisor(run, with_guardian=True)

        _has_failed_and_left_nothing(bench, run)


def _has_failed_and_left_nothing(bench: Bench, run: Run) -> None:
    assert bench.wait_for_end(run) == states.FAILED
    # The nodes have no connection to the supervisor, so they must end their processes by themselves.
    bench.wait_for_nothing(run, bench.target.node_lost_s)
    report = run.failure
    assert report is not None
    assert report.cause in ("supervisor", "engine", "node_lost"), report
    assert run.record().attempts[0].ended_utc


class FailingChecks:
    """Checks of the failure reports of runs whose script fails."""

    def test_optional_protocols_of_a_target_are_implemented_completely(self, bench: Bench) -> None:
        target = configured.find_target(bench.target.name, bench.target.workspace_dir)
        assert missing_members(target) == {}, "members that are left out; without them nothing of the part is used"

    def test_a_job_that_can_never_fit_is_refused_at_submission(self, bench: Bench) -> None:
        before = list(bench.experiment.get_runs())
        with pytest.raises(TargetError) as refused:
            bench.submit(scripts.PLAIN, **bench.target.never_fits)

        assert bench.target.name in str(refused.value)
        assert list(bench.experiment.get_runs()) == before

    @WAYS
    def test_the_report_names_the_worker_that_failed_and_why(self, bench: Bench, backend: str | None) -> None:
        run = bench.finish(scripts.FAIL, backend)

        assert run.status == states.FAILED
        record, report = run.record(), run.failure
        assert report is not None
        assert record.job is not None
        last = record.job.world_size - 1
        assert (report.cause, report.rank, report.attempt) == ("exception", last, 1), bench.story(run)
        assert report.node == node_of(run, last)
        assert record.exit_code == report.exit_code == exit_codes(run)[last] == (7 if backend is None else 1)
        if backend is not None:
            assert report.exception == "ValueError: wrong; $(touch owned) 'x'"
            assert report.traceback is not None
            assert "in <module>" in report.traceback
            assert [rank for rank, _ in report.victims] == list(range(last))

    def test_the_report_distinguishes_a_killed_worker_from_a_failed_one(self, bench: Bench) -> None:
        run = bench.finish("import os\nos.kill(os.getpid(), 9)\n")

        report = run.failure
        assert report is not None
        assert (report.cause, report.exit_code, report.signal) == ("killed", 137, "SIGKILL"), bench.story(run)
        assert run.record().attempts[0].cause == "killed"


def missing_members(target: object) -> dict[str, list[str]]:
    """Return {protocol: missing members} of optional protocols that a target has partly.

    `paceline.targets.base.PARTS` lists the optional protocols.
    """
    found = {}
    for part in PARTS:
        names = [name for name in vars(part) if not name.startswith("_")]
        lacks = [name for name in names if not hasattr(target, name)]
        if lacks and len(lacks) < len(names):
            found[part.__name__] = lacks
    return found


class LosingChecks:
    """Checks of runs that lose a node, for targets that can simulate it."""

    @_BACKENDS
    def test_the_loss_of_a_node_ends_the_attempt_on_all_nodes(self, bench: Bench, backend: str) -> None:
        run, name = _lose_a_node(bench, scripts.HOLD, HOLDS, backend)
        try:
            assert bench.wait_for_end(run, bench.target.node_lost_s + 5) == states.FAILED
            report = run.failure
            assert report is not None
            assert (report.cause, report.node, report.attempt) == ("node_lost", name, 1), bench.story(run)
            assert name in report.message
        finally:
            bench.target.bring_back(name)
        # The disconnected node must have ended all of its processes by itself.
        bench.wait_for_nothing(run, bench.target.node_lost_s)
        again = bench.finish("print('works again')\n", **bench.way(backend))
        assert again.status == states.COMPLETED, bench.story(again)

    @_BACKENDS
    def test_a_run_continues_after_the_loss_of_a_node(self, bench: Bench, backend: str) -> None:
        if not bench.target.has_spare_node:
            pytest.skip(f"target {bench.target.kind!r} has no spare node")
        line = "attempt 1 of rank {rank}"
        run, name = _lose_a_node(bench, scripts.LOST_ONCE, line, backend, max_restarts=1)
        try:
            bench.wait_until(
                lambda: run.record().attempts[0].ended_utc, "the first attempt has ended", bench.target.node_lost_s
            )
            assert bench.wait_for_end(run) == states.COMPLETED, bench.story(run)
        finally:
            bench.target.bring_back(name)
        first, second = run.record().attempts
        assert (first.cause, second.cause) == ("node_lost", None)
        assert name not in second.nodes


def _lose_a_node(bench: Bench, script: str, line: str, backend: str, **values: int) -> tuple[Run, str]:
    if bench.target.lose_node is None:
        pytest.skip(f"target {bench.target.kind!r} can't be told to lose a node")
    run = bench.submit(script, backend, **values)
    bench.wait_for_line(run, line)
    name = bench.target.node_to_lose(run.record().attempts[0].nodes)
    bench.target.lose_node(name)
    return run, name
