"""What a training on N nodes takes, from a few figures of the job and the machines: staging, exchange, checkpoints, losses, cost.

    python arithmetic.py
    python arithmetic.py --nodes 2 16 256 --parameters 7e9 --node-price 25

Every default is an assumption, not a measurement: put in your own. Formulas stand beside the lines that use them.
"""

import argparse
import math

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 256])
parser.add_argument("--parameters", type=float, default=1.3e9, help="of the model")
parser.add_argument("--data-gb", type=float, default=500, help="that each node fetches")
parser.add_argument("--step-s", type=float, default=1.0, help="computing of a step, without the exchange")
parser.add_argument("--node-gbps", type=float, default=400, help="network of a node, Gbit/s")
parser.add_argument("--store-node-gbs", type=float, default=2, help="what a node gets from the store, GB/s")
parser.add_argument("--store-gbs", type=float, default=20, help="what the store gives to all nodes together, GB/s")
parser.add_argument("--hours-between-losses", type=float, default=6300, help="of one node")
parser.add_argument("--notice-s", type=float, default=20, help="until a lost node is noticed and its place taken")
parser.add_argument(
    "--start-s", type=float, default=30, help="from the start of an attempt to its first step, but for the checkpoint"
)
parser.add_argument(
    "--held-s", type=float, default=1.0, help="that a save holds the training; the rest is written meanwhile"
)
parser.add_argument("--node-price", type=float, default=1.0, help="of an hour of a node")
parser.add_argument(
    "--steps", type=float, default=1e6, help="of one node; N nodes with N times the rows need 1/N of them"
)
args = parser.parse_args()


def column(nodes: int) -> dict[str, str]:
    """The figures for so many nodes."""
    # All nodes fetch at once; the slower of the two lines counts.
    stage_s = max(args.data_gb / args.store_node_gbs, nodes * args.data_gb / args.store_gbs)
    part_s = max(args.data_gb / nodes / args.store_node_gbs, args.data_gb / args.store_gbs)
    # A ring sends 2 (N - 1) / N of the gradients (Patarasu and Yuan, 2009), 4 bytes each; nothing of it is hidden here.
    exchange_s = 2 * (nodes - 1) / nodes * 4 * args.parameters / (args.node_gbps / 8 * 1e9)
    # Parameters and the two moments of Adam in float32. One copy is written, all nodes read it.
    checkpoint_gb = 12 * args.parameters / 1e9
    write_s = checkpoint_gb / min(args.store_gbs, args.store_node_gbs)
    read_s = max(checkpoint_gb / args.store_node_gbs, nodes * checkpoint_gb / args.store_gbs)
    loss_s = 3600 * args.hours_between_losses / nodes
    # The best time between two checkpoints (Young, 1974), but no less than one takes to be written.
    every_s = max(math.sqrt(2 * args.held_s * loss_s), write_s)
    restart_s = args.notice_s + args.start_s + read_s
    lost = args.held_s / every_s + (every_s / 2 + restart_s) / loss_s
    efficiency = args.step_s / (args.step_s + exchange_s) * (1 - lost)
    hours = args.steps * args.step_s / nodes / efficiency / 3600 + stage_s / 3600
    return {
        "staging the data, the first time": f"{stage_s / 60:.1f} min",
        "the same, each node its part": f"{part_s / 60:.1f} min",
        "exchange in each step": f"{1000 * exchange_s:.0f} ms",
        "checkpoint": f"{checkpoint_gb:.1f} GB, {write_s:.0f} s",
        "a node is lost every": f"{loss_s / 3600:,.0f} h",
        "checkpoint every": f"{every_s / 60:.0f} min",
        "a restart takes": f"{restart_s:.0f} s",
        "lost to checkpoints and restarts": f"{100 * lost:.2f} %",
        "of N times one node": f"{100 * efficiency:.0f} %",
        "the whole training": f"{hours:,.1f} h",
        "node hours, times the price": f"{nodes * hours * args.node_price:,.0f}",
    }


columns = [column(nodes) for nodes in args.nodes]
print(f"| {'nodes':32} |", "".join(f" {nodes:>14} |" for nodes in args.nodes), sep="")
print(f"|{'-' * 34}|", "".join(f"{'-' * 15}:|" for _ in args.nodes), sep="")
for name in columns[0]:
    print(f"| {name:32} |", "".join(f" {column[name]:>14} |" for column in columns), sep="")
