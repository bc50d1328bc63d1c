"""Checks of runs that are ended from outside: by cancel, by their time limit, by the death of their supervisor."""

from __future__ import annotations

import pytest

from paceline.runs import states
from paceline.runs.run import Run
from paceline.testing import scripts
from paceline.testing.bench import GRACE_S, Bench, exit_codes, text_of
from paceline.testing.completing import WAYS

HOLDS = "rank {rank} holds"


class EndingChecks:
    """What is left, and when, of runs that somebody ends: nothing, within the grace period and 5 s."""

    @WAYS
    def test_a_run_is_canceled_while_it_runs(self, bench: Bench, backend: str | None) -> None:
        run = bench.submit(scripts.HOLD, backend)
        job = run.record().job
        assert job is not None
        # Logs and metrics are live: nobody has ended yet.
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
        # The grace period was theirs; one did not hear of it.
        deaf = {job.world_size - 1} if job.world_size > 1 else set()
        for rank in range(job.world_size):
            saved = run.folder.checkpoints / f"rank_{rank}"
            assert saved.exists() == (rank not in deaf), bench.story(run)
            assert rank in deaf or saved.read_text() == "all of it"
            assert ("saved" in text_of(run.folder.live_log(rank)).splitlines()) == (rank not in deaf)
            # mpirun's workers can't all tell of their own death by SIGKILL.
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
        # It goes on as if nothing had been; on a busy machine its record may still be behind its log.
        bench.wait_for_status(holder, states.RUNNING)
        next_one = bench.submit("print('at last')\n", **bench.target.whole)
        holder.cancel()
        # What the holder had is given back.
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

    def test_a_run_is_canceled_at_once(self, bench: Bench) -> None:
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
    def test_so_has_one_that_nobody_looks_after_any_more(self, bench: Bench, backend: str | None) -> None:
        run = bench.submit(scripts.WAIT, backend)
        bench.wait_for_line(run, HOLDS)
        bench.target.kill_supervisor(run, with_guardian=True)

        _has_failed_and_left_nothing(bench, run)


def _has_failed_and_left_nothing(bench: Bench, run: Run) -> None:
    assert bench.wait_for_end(run) == states.FAILED
    # Nodes that hear nothing more of the supervisor end what they have by themselves.
    bench.wait_for_nothing(run, bench.target.node_lost_s)
    report = run.failure
    assert report is not None
    assert report.cause in ("supervisor", "engine", "node_lost"), report
    assert run.record().attempts[0].ended_utc
