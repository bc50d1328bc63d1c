"""Submit the digits example on two nodes of this machine and see it through: what `make demo` runs."""

import sys
from pathlib import Path

import paceline as pl

ws = pl.Workspace.from_config()  # ./.paceline, made on first use
exp = pl.Experiment(ws, "digits")
est = pl.PyTorch(
    source_directory=Path(__file__).parent,
    entry_script="train.py",
    script_params={"--epochs": 5},
    compute_target="local",
    node_count=2,
    process_count_per_node=1,
    distributed_backend="mpi",
    cores=0,  # it takes seconds: do not wait for runs of other workspaces
)
run = exp.submit(est)  # returns at once; the run goes on if this program ends
run.wait_for_completion(show_output=True)

metrics = run.get_metrics()
print(f"Loss by epoch: {', '.join(f'{loss:.3f}' for loss in metrics['loss'])}")
print(f"Test accuracy: {metrics['accuracy'][-1]:.3f}")
print(f"Files: {', '.join(run.get_file_names())}")
print(f"The curves, in a browser: {Path(sys.executable).with_name('paceline')} ui")
if metrics["accuracy"][-1] < 0.95:
    sys.exit("The accuracy is below 0.95: something is wrong.")
