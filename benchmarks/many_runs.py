"""A workspace of many ended runs, made from one real run: each has its own id, name, tags, argument and metrics."""

from __future__ import annotations

import json
import random
import secrets
from pathlib import Path

import paceline as pl
from paceline.runs.folder import RunFolder

#: Metrics of each run, which has `STEPS` values of each.
METRICS, STEPS = ("loss", "val/acc", "lr"), 4


def make_runs(folder: Path, count: int, *, metrics: int = len(METRICS), steps: int = STEPS) -> list[str]:
    """Add runs until the workspace has so many, a minute apart, and return the ids of the added ones.

    folder: where the script of the real run lies. metrics: how many each added run has; beyond `METRICS`, "layer0/weight_0" and
    so on.
    """
    workspace = pl.Workspace.from_config()
    there = sorted(path.name for path in workspace.runs_dir.iterdir()) if workspace.runs_dir.exists() else []
    if not there:
        (folder / "source").mkdir()
        (folder / "source" / "train.py").write_text("import paceline\npaceline.Run.get_context().log('loss', 0.1)\n")
        estimator = pl.Estimator(source_directory=folder / "source", entry_script="train.py")
        run = pl.Experiment(workspace, "many").submit(estimator)
        run.wait_for_completion()
        there = [run.id]
    real = RunFolder(workspace.runs_dir / there[-1])
    record, state = json.loads(real.job.read_text()), real.state.read_bytes()
    names = (METRICS + tuple(f"layer{number // 100}/weight_{number}" for number in range(metrics)))[:metrics]
    newest, chance, added = int(real.run_id.split("_")[1]), random.Random(0), []
    for number in range(len(there), count):
        copy = RunFolder(workspace.runs_dir / f"many_{newest - 60 * number}_{secrets.token_hex(4)}")
        copy.metrics.mkdir(parents=True)
        rate, best = chance.choice((0.1, 0.03, 0.01)), chance.random()
        job = record["job"] | {"arguments": ["--lr", str(rate), "--seed", str(number % 1000)]}
        copy.job.write_text(json.dumps(record | {"run_id": copy.run_id, "job": job}))
        copy.state.write_bytes(state)
        notes = ({"name": f"run {number}"}, {"tag": "team", "value": f"team{number % 20}"})
        copy.notes.write_text("".join(json.dumps(note) + "\n" for note in notes))
        copy.metric_log(0).write_text(
            "".join(
                f'{{"name":"{name}","value":{best / (1 + place % 9 + step):.5f},"time":{1.7e9 + step:.6f},"step":{step}}}\n'
                for step in range(steps)
                for place, name in enumerate(names)
            )
        )
        added.append(copy.run_id)
    return added
