"""Tune the learning rate and the size of the network in train.py. The same as a file is sweep.yaml:

python examples/sweep/submit.py
paceline sweep run examples/sweep/sweep.yaml
"""

from pathlib import Path

import paceline as pl

sweep = pl.Sweep(
    pl.Estimator(source_directory=Path(__file__).parent, entry_script="train.py"),
    {"--lr": pl.loguniform(1e-4, 1), "--hidden": pl.choice(8, 32, 128)},
    metric="accuracy",
    goal="maximize",
    trials=6,
    concurrent=2,
    stop=pl.ASHA(first=2, eta=2, last=8),
    seed=1,
)
run = pl.Experiment(pl.Workspace.from_config(), "digits").submit(sweep)
run.wait_for_completion(show_output=True)

best = run.best_child()
if best is not None:
    print(f"best: {best.id} with {run.best_point()}")
print(f"pictures: {run.folder.outputs / 'sweep.html'}")
