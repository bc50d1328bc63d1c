"""Checks of runs that lose a node."""

from __future__ import annotations

import pytest

from paceline.runs import states
from paceline.runs.run import Run
from paceline.testing import scripts
from paceline.testing.bench import Bench
from paceline.testing.ending import HOLDS

_BACKENDS = pytest.mark.parametrize("backend", ["gloo", "mpi"])


class LosingChecks:
    """A node that goes ends the attempt, on all that are left. For targets that can be told to lose one."""

    @_BACKENDS
    def test_a_lost_node_ends_the_run_everywhere(self, bench: Bench, backend: str) -> None:
        run, name = _lose_a_node(bench, scripts.HOLD, HOLDS, backend)
        try:
            assert bench.wait_for_end(run, bench.target.node_lost_s + 5) == states.FAILED
            report = run.failure
            assert report is not None
            assert (report.cause, report.node, report.attempt) == ("node_lost", name, 1), bench.story(run)
            assert name in report.message
        finally:
            bench.target.bring_back(name)
        # A node that was only cut off has ended everything by itself.
        bench.wait_for_nothing(run, bench.target.node_lost_s)
        again = bench.finish("print('works again')\n", **bench.way(backend))
        assert again.status == states.COMPLETED, bench.story(again)

    @_BACKENDS
    def test_a_run_goes_on_without_a_lost_node(self, bench: Bench, backend: str) -> None:
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
