"""Fit a line to noisy points, and log the loss. A first script: it needs no other package.

paceline run train.py -- --rate 0.3
"""

import argparse
import json
import random
from pathlib import Path

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
parser.add_argument("--steps", type=int, default=50)
arguments = parser.parse_args()

# Points around y = 2x + 1.
chance = random.Random(7)
xs = [number / 50 for number in range(100)]
points = [(x, 2 * x + 1 + chance.gauss(0, 0.1)) for x in xs]

run = paceline.Run.get_context()
slope = offset = 0.0
for step in range(arguments.steps):
    errors = [slope * x + offset - y for x, y in points]
    loss = sum(error * error for error in errors) / len(points)
    run.log("loss", loss, step=step)
    slope -= arguments.rate * 2 * sum(error * x for error, x in zip(errors, xs, strict=True)) / len(points)
    offset -= arguments.rate * 2 * sum(errors) / len(points)

print(f"loss {loss:.4f}: y = {slope:.2f} x + {offset:.2f}")
# Files in outputs/ are kept with the run.
Path("outputs").mkdir(exist_ok=True)
Path("outputs/line.json").write_text(json.dumps({"slope": slope, "offset": offset}))
