"""The digits example on 2 workers: samples a second under paceline, against the same script under torchrun."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from common import in_turn, median, program, report, scratch

ROUNDS = 7
EPOCHS = 20
EXAMPLE = Path(__file__).parents[1] / "examples" / "digits"


def steady(metrics: Path) -> float:
    """The median over the epochs of the samples a second that the script measured; the first epochs warm up."""
    return median([epoch["samples_per_s"] for epoch in json.loads(metrics.read_text())["epochs"]][2:])


def main() -> None:
    with scratch() as folder:
        source = folder / "digits"
        shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("outputs", "__pycache__"))
        script = source / "train.py"

        def ours() -> float:
            command = [program("paceline"), "run", str(script), "-j", "2", "--backend", "gloo", "--json"]
            done = subprocess.run([*command, "--", "--epochs", str(EPOCHS)], check=True, capture_output=True, text=True)
            return steady(Path(json.loads(done.stdout)["folder"]) / "outputs" / "metrics.json")

        def theirs() -> float:
            command = [
                program("torchrun"),
                "--standalone",
                "--nproc-per-node",
                "2",
                "train.py",
                "--epochs",
                str(EPOCHS),
            ]
            subprocess.run(command, check=True, capture_output=True, cwd=source)
            return steady(source / "outputs" / "metrics.json")

        mine, peers = in_turn(ROUNDS, ours, theirs)
    ratio = median([a / b for a, b in zip(mine, peers, strict=True)])
    report(
        "throughput",
        "throughput of the digits example, 2 workers, against the same script under torchrun",
        "at least 0.98",
        ratio >= 0.98,
        ours_samples_per_s=median(mine),
        torchrun_samples_per_s=median(peers),
        ratio=ratio,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
