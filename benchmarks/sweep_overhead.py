"""What a sweep adds to a trial over the same run alone, and whether trials of a second keep the cores busy."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import paceline as pl
from common import report, scratch
from paceline.sweeps.samplers.samplers import make_sampler
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial

CONCURRENT = 8
MOST_MS = 1.0
MOST_TPE_MS = 12.0
LEAST_BUSY = 0.9
SPACE = {
    "--a": pl.uniform(0, 1),
    "--b": pl.loguniform(1e-4, 1),
    "--c": pl.loguniform(1e-4, 1),
    "--d": pl.randint(1, 9),
    "--e": pl.choice("x", "y", "z"),
    "--f": pl.choice(32, 64),
}
GRID = {"--a": pl.choice(list(range(100))), "--b": pl.choice(list(range(100)))}
TRIVIAL = "import paceline\npaceline.Run.get_context().log('loss', 0.5)\n"
ONE_SECOND = """
import time
import paceline
while time.process_time() < 1:
    pass
paceline.Run.get_context().log('loss', 0.5)
"""


def estimator(folder: Path, text: str) -> pl.Estimator:
    source = folder / f"source_{len(text)}"
    source.mkdir(exist_ok=True)
    (source / "train.py").write_text(text)
    return pl.Estimator(source_directory=source, entry_script="train.py")


def alone_ms(folder: Path, runs: int) -> float:
    """Milliseconds of the submitting program's processor for each run, 8 at a time, that no sweep submits."""
    experiment, job = pl.Experiment(pl.Workspace.from_config(), "alone"), estimator(folder, TRIVIAL)
    live: list[pl.Run] = []
    spent = 0.0
    for _ in range(runs):
        while len(live) >= CONCURRENT:
            time.sleep(0.02)
            live = [run for run in live if not run.record().is_terminal]
        before = time.process_time()
        live.append(experiment.submit(job))
        spent += time.process_time() - before
    for run in live:
        run.wait_for_completion()
    return 1e3 * spent / runs


def sweep_ms(folder: Path, trials: int, sampler: str, space: dict[str, object]) -> float:
    """Milliseconds of the controller's processor for each trial, from when the first ones are there to when the last one is."""
    sweep = pl.Sweep(
        estimator(folder, TRIVIAL), space, metric="loss", trials=trials, concurrent=CONCURRENT, sampler=sampler, seed=1
    )
    run = pl.Experiment(pl.Workspace.from_config(), "swept").submit(sweep)
    first = last = None
    for seconds, count in controller_seconds(run):
        if count >= 2 * CONCURRENT:
            first = first or (seconds, count)
        last = (seconds, count)
    assert run.record().status == "Completed", run.record().failure
    assert first is not None, "there are more trials than that"
    assert last is not None
    return 1e3 * (last[0] - first[0]) / (last[1] - first[1])


def controller_seconds(run: pl.Run) -> Iterator[tuple[float, int]]:
    """(seconds of the controller's processor, trials that are there), again and again until the last trial is there."""
    folders, count, ticks = run.folder.path.parent, 0, os.sysconf("SC_CLK_TCK")
    # A record that is not final, and so is there to be read whenever this looks.
    trials = json.loads(run.folder.state.read_text())["sweep"]["trials"]
    while not run.record().is_terminal:
        while (folders / f"{run.id}_{count}").exists():
            count += 1
        pid = json.loads(run.folder.state.read_text())["owner"]["pid"]
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if pid != os.getpid():
            yield (int(fields[11]) + int(fields[12])) / ticks, count
        if count >= trials:
            break
        time.sleep(0.02)
    run.wait_for_completion()


def tpe_ms(told: int, asked: int = 50) -> float:
    """Milliseconds for a proposal by TPE after so many trials: told, asked, and 8 in flight."""
    space = Space(SPACE)
    sampler = make_sampler("tpe", space, 1, ("minimize",))
    trials: list[Trial] = []
    spent: list[float] = []
    for number in range(told + asked):
        before = time.process_time()
        proposal = sampler.propose(number, trials)
        if number >= told:
            spent.append(time.process_time() - before)
        assert proposal is not None
        values = space.values(proposal.chosen)
        trials.append(Trial(number=number, run_id="", chosen=proposal.chosen, values=values, status="Running"))
        if number >= CONCURRENT:
            before_it = trials[number - CONCURRENT]
            loss = (before_it.values["--a"] - 0.3) ** 2 + before_it.values["--d"] / 9
            trials[number - CONCURRENT] = dataclasses.replace(before_it, status="Completed", curve=(loss,))
    return 1e3 * sum(spent) / len(spent)


def busy(folder: Path, trials: int) -> float:
    """The share of the cores that are busy while a sweep runs trials of a second, one for each core."""
    cores = os.cpu_count() or 1
    space = {"--a": pl.uniform(0, 1)}
    sweep = pl.Sweep(estimator(folder, ONE_SECOND), space, metric="loss", trials=trials, concurrent=cores, seed=1)
    run = pl.Experiment(pl.Workspace.from_config(), "busy").submit(sweep)
    at = []
    for _, count in controller_seconds(run):
        if count >= cores:
            at.append(_jiffies())
    (idle_first, all_first), (idle_last, all_last) = at[0], at[-1]
    return 1 - (idle_last - idle_first) / (all_last - all_first)


def _jiffies() -> tuple[int, int]:
    """(idle, all) of the machine."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--told", type=int, default=1000)
    given = parser.parse_args()
    with scratch() as folder:
        alone = alone_ms(folder, given.trials)
        for sampler, space in (("random", SPACE), ("grid", GRID)):
            whole = sweep_ms(folder, given.trials, sampler, space)
            report(
                f"sweep_overhead_{sampler}",
                f"what a sweep adds to a trial over the same run alone, sampler {sampler}, {CONCURRENT} at a time",
                f"at most {MOST_MS:g} ms of the controller",
                whole - alone <= MOST_MS,
                added_ms=whole - alone,
                controller_ms=whole,
                alone_ms=alone,
                trials=given.trials,
            )
        # A thousand trials on the machine would be the sampler's time and that of random, which is above.
        proposal = tpe_ms(given.told)
        random_added = whole - alone
        report(
            "sweep_overhead_tpe",
            f"what a sweep adds to a trial with TPE at trial {given.told:,}, {CONCURRENT} at a time",
            f"at most {MOST_TPE_MS:g} ms of the controller",
            proposal + max(0.0, random_added) <= MOST_TPE_MS,
            added_ms=proposal + max(0.0, random_added),
            proposal_ms=proposal,
            trials=given.told,
        )
        share = busy(folder, given.trials)
    report(
        "sweep_busy",
        f"share of the cores that {given.trials} trials of 1 s keep busy, one for each core",
        f"at least {LEAST_BUSY:.0%}",
        share >= LEAST_BUSY,
        share=share,
        trials=given.trials,
    )


if __name__ == "__main__":
    sys.exit(main())
