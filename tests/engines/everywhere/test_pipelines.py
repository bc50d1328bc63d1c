"""Pipelines whose steps are on different targets: what one leaves the next one finds, wherever both are."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as pl
from paceline.runs import states
from tests.engines.places import place

SCRIPT = """
import os, sys
import paceline

found, left = sys.argv[1:3]
value = 1
if os.path.isdir(found):
    value += int(open(os.path.join(found, "value")).read())
if left != "-":
    open(os.path.join(left, "value"), "w").write(str(value))
paceline.Run.get_context().log("value", value)
"""


@pytest.mark.parametrize("way", ["ssh", "slurm"])
def test_pipeline_steps_on_this_and_another_machine_read_outputs_of_each_other(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place(way, request, tmp_path, monkeypatch) as there:
        there.lab.write(SCRIPT)

        def step(name: str, target: str, takes: pl.PipelineData | str, leaves: pl.PipelineData | str) -> pl.Step:
            estimator = pl.Estimator(
                str(there.lab.source), entry_script="train.py", arguments=[takes, leaves], compute_target=target
            )
            return pl.Step(name, estimator, outputs=[leaves] if isinstance(leaves, pl.PipelineData) else [])

        one, two = pl.PipelineData("one"), pl.PipelineData("two")
        steps = [step("a", "there", "-", one), step("b", "local", one, two), step("c", "there", two, "-")]
        for reused in (False, True):
            run = there.lab.experiment.submit(pl.Pipeline(steps))
            assert isinstance(run, pl.PipelineRun)
            record = run.wait_for_completion(raise_on_error=False)
            assert record.status == states.COMPLETED, f"{record.failure}\n{run.folder.driver_log.read_text()}"
            assert [one.get_metrics()["value"] for one in run.steps.values()] == [1, 2, 3]
            assert [row["reused_from"] is not None for row in run.step_rows()] == [reused] * 3
