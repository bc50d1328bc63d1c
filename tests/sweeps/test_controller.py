"""A sweep's controller, where what it looks after goes away."""

from __future__ import annotations

import shutil
from typing import Any

import paceline as pl
from paceline.runs import states
from paceline.system.processes import is_alive
from tests.sweeps.helpers import until


def test_a_controller_whose_sweep_is_removed_by_hand_ends_its_trials_and_itself(submit: Any) -> None:
    # The story: it went on for ever, deaf to SIGTERM, for the end could not be asked for in a folder that is not there.
    run = submit({"x": pl.choice(1, 2)}, sampler="grid", concurrent=1, arguments=("--values", "600", "--pause", "0.1"))
    until(lambda: [row["status"] for row in run.trial_rows()] == [states.RUNNING])
    pid = run.record().owner["pid"]
    trial = pl.Run(run.experiment, f"{run.id}_0")
    shutil.rmtree(run.folder.path)

    until(lambda: not is_alive(pid))
    until(lambda: trial.status == states.CANCELED)
    assert trial.tags["stopped"] == "the sweep's folder is gone"
    assert not pl.Run(run.experiment, f"{run.id}_0").folder.path.with_name(f"{run.id}_1").exists()
