"""A trial goes on from its checkpoints where the nodes see nothing of the workspace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline as pl
from paceline.runs import states
from tests.engines.places import place
from tests.helpers import wait_until, write_tree

#: This script writes a checkpoint of several files for each value. At epoch 1 it sleeps until the sweep stops it.
TRAIN = """
import json, os, sys, time
import paceline

x = float(sys.argv[sys.argv.index("--x") + 1])
folder, run = os.environ["PACELINE_CHECKPOINT_DIR"], paceline.Run.get_context()
steps = sorted(name for name in os.listdir(folder) if name.startswith("step_"))
seen = json.load(open(os.path.join(folder, steps[-1], "state.json"))) if steps else []
for epoch in range(len(seen), 4):
    seen.append(run.id)
    os.makedirs(os.path.join(folder, ".new"), exist_ok=True)
    with open(os.path.join(folder, ".new/state.json"), "w") as file:
        json.dump(seen, file)
    os.rename(os.path.join(folder, ".new"), os.path.join(folder, f"step_{epoch}"))
    run.log("score", x + epoch / 100, step=epoch)
    time.sleep(600 if epoch == 1 else 0)
"""


#: Targets whose nodes do not see the workspace, so checkpoints have to be sent. The other targets behave like this
#: machine.
APART = ("ssh", pytest.param("slurm, login host", marks=pytest.mark.proof), "ray")


@pytest.mark.parametrize("way", APART)
def test_trial_promoted_by_asha_resumes_from_its_earlier_checkpoints_on_the_nodes(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place(way, request, tmp_path, monkeypatch) as there:
        write_tree(there.lab.folder / "source", {"train.py": TRAIN})
        estimator = pl.Estimator(there.lab.folder / "source", entry_script="train.py", compute_target="there")
        sweep = pl.Sweep(
            estimator,
            {"x": pl.choice(0.4, 0.3)},
            metric="score",
            sampler="grid",
            concurrent=1,
            stop=pl.ASHA(first=2, eta=2, last=4, promote=True),
        )
        run = pl.Experiment(pl.Workspace(there.lab.workspace_dir), "tuned").submit(sweep)
        wait_until(lambda: run.record().is_terminal, "the sweep has not ended", 300)
        assert run.record().failure is None
        first, second = f"{run.id}_0", f"{run.id}_0_2"
        assert [(row["run_id"], row["from"], row["status"], row["intervals"]) for row in run.lineage()] == [
            (first, None, states.CANCELED, 2),
            (second, first, states.COMPLETED, 2),
            (f"{run.id}_1", None, states.CANCELED, 2),
        ]
        there_now = pl.Run(run.experiment, second).folder.checkpoints
        assert json.loads((there_now / "step_3" / "state.json").read_text()) == [first, first, second, second]
        assert sorted(path.name for path in there_now.iterdir()) == [f"step_{number}" for number in range(4)]
