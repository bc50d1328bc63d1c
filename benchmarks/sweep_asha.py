"""ASHA with promotion, and Bandit, against running everything: epochs spent, and whether the same best is found.

Simulated curves: 100 configurations of 81 epochs, 8 at a time, 11 seeds. Then real sweeps of a convolutional network on
scikit-learn's digits, 40 configurations of 81 epochs, 4 at a time. Epochs are counted and not seconds, so other work on the
machine changes little: a trial that is told to end may train an epoch more.

    python benchmarks/sweep_asha.py [simulated] [digits]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sweeps.policies.simulated import best_without_policy, chosen, power_laws, simulated

import paceline as pl
from common import report, scratch

SEEDS = 11
EPOCHS, CONFIGURATIONS, DIGITS_CONFIGURATIONS = 81, 100, 40
BANDIT = pl.Bandit(slack_factor=0.2, delay_evaluation=5)
SPACE = {
    "--lr": pl.loguniform(1e-4, 1),
    "--momentum": pl.uniform(0, 0.95),
    "--batch": pl.choice(16, 32, 64, 128),
    "--width": pl.choice(4, 8, 16),
    "--dropout": pl.uniform(0, 0.5),
    "--decay": pl.loguniform(1e-6, 1e-2),
}


def on_simulated_curves() -> None:
    sides = {
        "promote": (pl.ASHA(first=3, eta=3, last=EPOCHS, promote=True), 0.15),
        "bandit": (BANDIT, 0.20),
    }
    for name, (policy, most) in sides.items():
        shares, lost = [], []
        for seed in range(SEEDS):
            loss = power_laws(seed)
            spent, trials = simulated(policy, loss)
            shares.append(spent / (CONFIGURATIONS * EPOCHS))
            lost.append(chosen(trials)[1] - best_without_policy(loss))
        same = sum(value == 0 for value in lost)
        met = max(shares) <= most and same == SEEDS
        report(
            f"sweep_asha_simulated_{name}",
            f"{name}, simulated curves, {SEEDS} seeds: epochs of running everything, and how often the same best",
            f"the same best at no more than {most:.0%} of the epochs",
            met,
            median_share=statistics.median(shares),
            largest_share=max(shares),
            same_best=same,
            seeds=SEEDS,
            most_lost=max(lost),
        )


def on_digits() -> None:
    with scratch() as folder:
        experiment = pl.Experiment(pl.Workspace(folder / "workspace"), "digits")
        everything = digits(experiment, None)
        print("everything:", everything, flush=True)
        sides = {
            "promote": (pl.ASHA(first=3, eta=3, last=EPOCHS, promote=True, budget="--epochs"), 0.15),
            "bandit": (BANDIT, 0.20),
        }
        for name, (policy, most) in sides.items():
            found = digits(experiment, policy)
            share = found["epochs"] / everything["epochs"]
            same = found["best_trial"] == everything["best_trial"]
            report(
                f"sweep_asha_digits_{name}",
                f"{name}, digits CNN, {DIGITS_CONFIGURATIONS} trials of {EPOCHS} epochs: epochs of running everything",
                f"the same best at no more than {most:.0%} of the epochs",
                share <= most and same,
                share=share,
                same_best=int(same),
                epochs=found["epochs"],
                all_epochs=everything["epochs"],
                loss=found["loss"],
                loss_of_all=everything["loss"],
                runs=found["runs"],
            )


def digits(experiment: Any, policy: Any) -> dict[str, Any]:
    """A sweep's epochs, in all of its runs, its best trial and that one's loss."""
    estimator = pl.Estimator(
        Path(__file__).parent / "sweep_asha", entry_script="train.py", arguments=["--epochs", EPOCHS]
    )
    run = experiment.submit(
        pl.Sweep(
            estimator,
            SPACE,
            metric="loss",
            goal="minimize",
            trials=DIGITS_CONFIGURATIONS,
            concurrent=4,
            seed=1,
            stop=policy,
        )
    )
    run.wait_for_completion()
    runs = run.lineage()
    best = min((row for row in runs if row["best"] is not None), key=lambda row: row["best"])
    return {
        "epochs": sum(row["intervals"] for row in runs),
        "best_trial": best["trial"],
        "loss": best["best"],
        "runs": len(runs),
    }


if __name__ == "__main__":
    asked = sys.argv[1:] or ["simulated", "digits"]
    if "simulated" in asked:
        on_simulated_curves()
    if "digits" in asked:
        on_digits()
