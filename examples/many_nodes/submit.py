"""Train on many nodes: data fetched once by each node, checkpoints on a shared folder, restarts, a limit to what it may cost.

python examples/many_nodes/prepare.py
python examples/many_nodes/submit.py                                                  two nodes of this machine
python examples/many_nodes/submit.py --compute cluster --nodes 16 --processes 8       a cluster
"""

import argparse
from pathlib import Path

import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--compute", default="local")
parser.add_argument("--nodes", type=int, default=2)
parser.add_argument("--processes", type=int, default=1, help="workers of each node: with GPUs, one for each")
parser.add_argument("--gpu", action="store_true", help="a GPU for each worker, NCCL between them")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--checkpoints", type=Path, help="folder that all nodes see; below the workspace if left out")
parser.add_argument("--hours", type=float, default=24, help="end the run after so long, whatever it has come to")
parser.add_argument("--node-price", type=float, default=0.0, help="what an hour of a node costs")
parser.add_argument(
    "--notify", action="append", default=[], help="whom to tell when it ends, such as mail:ann@example.com"
)
args = parser.parse_args()

ws = pl.Workspace.from_config()
checkpoints = args.checkpoints or ws.path / "data" / "checkpoints" / "characters"
checkpoints.mkdir(parents=True, exist_ok=True)

estimator = pl.PyTorch(
    source_directory=Path(__file__).parent,
    entry_script="train.py",
    script_params={
        # Fetched by each node before its workers start, once for all of them, and kept on its disk for later runs.
        "--data": pl.Dataset.get_by_name(ws, "characters").as_named_input("characters").as_download(),
        "--checkpoints": str(checkpoints.resolve()),
        "--steps": args.steps,
        "--batch-size": 16 * args.nodes * args.processes,
        # Within a node a model is cut in as many parts as there are workers; between nodes only gradients travel.
        "--shard": args.processes if args.processes > 1 else 0,
    },
    compute_target=args.compute,
    node_count=args.nodes,
    process_count_per_node=args.processes,
    use_gpu=args.gpu,
    distributed_backend="nccl" if args.gpu else "gloo",
    max_restarts=3 + args.nodes // 8,  # the more nodes, the sooner one of them is lost
    on_hang="restart",
    max_run_duration_seconds=3600 * args.hours,
    notify=args.notify,
)
run = pl.Experiment(ws, "many-nodes").submit(estimator)
run.wait_for_completion(show_output=True)

record = run.record()
step_s = run.metrics("step_s").values
node_hours = args.nodes * (record.duration_s or 0) / 3600
print(f"step {1000 * sorted(step_s)[len(step_s) // 2]:.0f} ms, {len(record.attempts)} attempt(s)")
print(f"{node_hours:.3f} node hours, at {args.node_price:g} each: {node_hours * args.node_price:.2f}")
