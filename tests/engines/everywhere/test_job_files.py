"""The files that a job brings with it are in the working directory of every node, with or without a shared file system."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as pl
from paceline.runs import states
from tests.engines.places import TWO, place

SCRIPT = """
import json, os
import paceline

given = json.load(open("given.json"))
assert given == {"model": {"layers": 3}, "x": 2}, given
if os.environ["PACELINE_RANK"] == "1":
    print("read on node", os.environ["NODE_RANK"])
paceline.Run.get_context().log("score", given["x"])
"""


# Test two ways to send the run's folder to nodes, because the file with the values is in this folder.
@pytest.mark.promise("script-gets-values-arguments-assignments")
@pytest.mark.parametrize("way", ["ssh", pytest.param("slurm, login host", marks=pytest.mark.proof)])
def test_trial_reads_its_parameter_values_from_a_file_on_both_nodes(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place(way, request, tmp_path, monkeypatch) as there:
        there.lab.write(SCRIPT)
        estimator = pl.Estimator(str(there.lab.source), entry_script="train.py", **TWO)
        space = {"x": 2, "model": {"layers": pl.choice(3)}}
        sweep = pl.Sweep(estimator, space, metric="score", sampler="grid", pass_as="given.json")
        run = there.lab.experiment.submit(sweep)
        run.wait_for_completion()
        (row,) = run.trial_rows()
        assert (row["status"], row["score"]) == (states.COMPLETED, 2)
        trial = pl.Run(run.experiment, row["run_id"])
        assert "read on node 1" in trial.folder.rank_log(1, 1).read_text()
        assert not (trial.folder.work / "given.json").exists()
