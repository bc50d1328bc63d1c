"""Batches of what waits: a torch MLP of 6 million weights, one thread, with max_batch=16 against max_batch=1.

apt-get install wrk
python benchmarks/serve_batching.py
"""

from __future__ import annotations

import argparse
import json

from common import in_turn, median, report, scratch
from serving import answered, configured, free_port, process, wrk

ROUNDS, SECONDS = 5, 8

MODEL = """
import json
import torch
def init():
    global model
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = (64, 2000, 2000, 850, 10)
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers[:-1]).eval()
    assert 5.8e6 < sum(each.numel() for each in model.parameters()) < 6.2e6
def run(data):
    return run_batch([data])[0]
def run_batch(texts):
    with torch.inference_mode():
        return model(torch.tensor([json.loads(text)["data"] for text in texts])).tolist()
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    asked = parser.parse_args()
    body = json.dumps({"data": [0.5] * 64})
    with scratch() as folder:
        ports = {16: free_port(), 1: free_port()}
        urls = {size: f"http://127.0.0.1:{port}/score" for size, port in ports.items()}
        commands = {
            size: configured(folder / str(size), MODEL, port=port, max_batch=size) for size, port in ports.items()
        }
        with process(commands[16], folder / "16"), process(commands[1], folder / "1"):
            for url in urls.values():
                answered(url, body)
            for clients, name, target in ((32, "serve_batching", 2.5), (1, "serve_batching_one", 0.95)):
                together, alone = in_turn(
                    asked.rounds,
                    lambda clients=clients: wrk(urls[16], body, clients, asked.seconds).per_second,
                    lambda clients=clients: wrk(urls[1], body, clients, asked.seconds).per_second,
                )
                ratio = median(together) / median(alone)
                report(
                    name,
                    f"requests a second of a torch MLP of 6 million weights, {clients} clients, batches against none",
                    f"at least {target:g} times" if clients > 1 else "no slower: at least 0.95",
                    ratio >= target,
                    batches_per_second=median(together),
                    alone_per_second=median(alone),
                    ratio=ratio,
                    rates=[together, alone],
                )


if __name__ == "__main__":
    main()
