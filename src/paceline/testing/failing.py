"""Checks of jobs that are refused, and of scripts that fail."""

from __future__ import annotations

import pytest

from paceline.errors import TargetError
from paceline.runs import states
from paceline.targets import configured
from paceline.targets.base import PARTS
from paceline.testing import scripts
from paceline.testing.bench import Bench, exit_codes, node_of
from paceline.testing.completing import WAYS


class FailingChecks:
    """What is said of what goes wrong."""

    def test_what_a_target_does_beyond_the_least_is_whole(self, bench: Bench) -> None:
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

    def test_a_worker_that_was_killed_is_told_from_one_that_failed(self, bench: Bench) -> None:
        run = bench.finish("import os\nos.kill(os.getpid(), 9)\n")

        report = run.failure
        assert report is not None
        assert (report.cause, report.exit_code, report.signal) == ("killed", 137, "SIGKILL"), bench.story(run)
        assert run.record().attempts[0].cause == "killed"


def missing_members(target: object) -> dict[str, list[str]]:
    """Name of a part (`paceline.targets.base.PARTS`) -> its members that the target lacks, though it has others of them."""
    found = {}
    for part in PARTS:
        names = [name for name in vars(part) if not name.startswith("_")]
        lacks = [name for name in names if not hasattr(target, name)]
        if lacks and len(lacks) < len(names):
            found[part.__name__] = lacks
    return found
