"""Checks of what can be read of a run while it goes on, without asking for its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.runs import states, store
from paceline.testing import scripts
from paceline.testing.bench import Bench, text_of


class ReadingChecks:
    """What those find who look at a run that goes on; where nodes see another folder than this one, each look brings it here."""

    def test_a_run_can_be_read_while_it_goes_on(self, bench: Bench) -> None:
        run, copy = bench.submit(scripts.LEAVE_AND_WAIT), bench.target.folder / "early.txt"

        def until(condition: Callable[[], bool], what: str) -> None:
            # The record as it is written: who asks for the state brings the run up to date, and that is not tried here.
            bench.wait_until(lambda: condition() or store.stored(run.folder).is_terminal, what)
            assert condition(), bench.story(run)

        until(lambda: run.get_metrics() == {"early": 0.5}, "the metric is there")
        assert (run.metrics("early").steps, run.metrics("early").values) == ((3,), (0.5,))
        until(lambda: run.tags == {"early": "tag"}, "the tag is there")
        until(lambda: any(name.startswith("logs/") for name in run.get_file_names()), "there is a log")
        if bench.target.has_outputs_early:
            until(lambda: {"kept/early.txt", "outputs/early.txt"} <= {*run.get_file_names()}, "the files are there")
            assert Path(run.download_file("outputs/early.txt", copy)).read_text() == "early"

        run.cancel()
        record = run.wait_for_completion(raise_on_error=False)
        assert record.status == states.CANCELED
        assert record.canceled_by
        # By now all is here, wherever it was.
        assert text_of(run.folder.live_log(0)).splitlines() == ["has left it", "told to end"], bench.story(run)
        assert {"kept/early.txt", "outputs/early.txt"} <= {*run.get_file_names()}
        assert run.get_metrics() == {"early": 0.5}
