"""Submit train.py to two nodes of this machine, follow it, and look at what is left: `make demo`."""

import sys
from pathlib import Path

import paceline as pl

ws = pl.Workspace.from_config()
exp = pl.Experiment(ws, "digits")
est = pl.PyTorch(
    source_directory=Path(__file__).parent,
    entry_script="train.py",
    script_params={"--epochs": 5},
    compute_target="local",
    node_count=2,
    process_count_per_node=1,
    distributed_backend="mpi",
)
run = exp.submit(est)
run.wait_for_completion(show_output=True)

metrics = run.get_metrics()
for name, values in metrics.items():
    print(f"{name:<14} {values[-1]:.4f}  (the last of {len(values)})")
print("Files:", ", ".join(run.get_file_names()))
print("The loss as a plot:", run.folder.outputs / "loss.png")

if metrics["accuracy"][-1] < 0.95:
    sys.exit(f"The test accuracy is {metrics['accuracy'][-1]:.4f}; this model reaches 0.95 and more.")
