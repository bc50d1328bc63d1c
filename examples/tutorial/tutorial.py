"""Train, tune, register, deploy, call: the whole way of a model, on this machine.

python examples/tutorial/tutorial.py
"""

from pathlib import Path

from sklearn.datasets import load_digits

import paceline as pl

HERE = Path(__file__).parent

ws = pl.Workspace.from_config()
experiment = pl.Experiment(ws, "tutorial")

# Train.
estimator = pl.Estimator(source_directory=HERE, entry_script="train.py", script_params={"--C": 0.001})
run = experiment.submit(estimator)
run.wait_for_completion(show_output=True)
print("accuracy:", run.get_metrics()["accuracy"])

# Tune.
sweep = pl.Sweep(
    pl.Estimator(source_directory=HERE, entry_script="train.py"),
    {"--C": pl.choice(0.01, 0.1, 1.0)},
    metric="accuracy",
    goal="maximize",
    sampler="grid",
    trials=3,
    concurrent=2,
)
tuned = experiment.submit(sweep)
tuned.wait_for_completion()
best = tuned.best_child()
assert best is not None, "no trial has logged an accuracy"
print("best:", tuned.best_point(), best.get_metrics()["accuracy"])

# Register: both, so that there is something to go back to.
first = run.register_model("tutorial-digits", "outputs/model")
second = best.register_model("tutorial-digits", "outputs/model")
print("registered:", first.id, second.id)

# Deploy.
service = first.deploy(ws, "tutorial", entry_script=HERE / "score.py", overwrite=True)
service.wait_for_deployment(show_output=True)
print("served at", service.scoring_uri)

# Call.
pixels, digits = load_digits(return_X_y=True)
images = (pixels[:5] / 16).tolist()
print("asked for", digits[:5].tolist(), "answered", service.run({"data": images}))

# Another model, and back, without a lost request.
service.update(second)
print("revision", service.record().revision, "answered", service.run({"data": images}))
service.rollback()
print("revision", service.record().revision)

service.delete()
