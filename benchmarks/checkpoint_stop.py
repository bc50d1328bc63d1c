"""How long training stands still for a checkpoint of 1 GiB: paceline.checkpoint and torch's DCP, sync and async, in turn.

For each side a process trains 21 layers with Adam. In each round it saves model and optimizer after a step, and trains on. The
figures are the time of the call, and how much longer than a plain step the next one takes. Paceline's last checkpoint is compared
with a copy that was taken at the call. With the right to do so, the calls have a real-time priority, so that other programs on
the machine count less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from common import median, report, scratch
from paceline import checkpoint

LAYERS, WIDTH = 21, 2048
#: Seconds for Paceline to prepare its memory after the first step.
PREPARED_S = 20.0
#: "cached" is DCP with a stager that keeps its memory for the next save.
SIDES = ("paceline", "dcp_async", "dcp_async_cached", "dcp_sync")


class Training:
    def __init__(self, rows: int) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.batch = torch.randn(rows, WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def undisturbed_seconds(work: Callable[[], object]) -> float:
    with contextlib.suppress(PermissionError):
        # Processes and threads that the call starts have the usual priority.
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        return seconds(work)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def train(side: str, rows: int, folder: Path) -> None:
    """One side's process: a line on standard input is a round, answered by the milliseconds of stop and delay."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{side}", rank=0, world_size=1)
    training, target, step = Training(rows), folder / side, 0
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    stager = DefaultStager(options) if side == "dcp_async_cached" else None
    running: list[object] = []

    def save(every: int = 1) -> None:
        if side == "paceline":
            state = {"model": training.model, "optimizer": training.optimizer}
            checkpoint.save(state, step, every=every, folder=target)
        elif every == 1 and side == "dcp_sync":
            dcp.save(training.state(), checkpoint_id=target)
        elif every == 1:
            running.append(dcp.async_save(training.state(), checkpoint_id=target, async_stager=stager))

    for line in sys.stdin:
        if line == "compare\n":
            print(json.dumps(compare(training, target)), flush=True)
            continue
        step += 1
        training.step()
        # Called after each step, and due in the second.
        save(every=1_000_000)
        if step == 1:
            time.sleep(PREPARED_S)
        step += 1
        plain = seconds(training.step)
        stop = undisturbed_seconds(save)
        after = seconds(training.step)
        if side == "paceline":
            checkpoint.wait()
        while running:
            running.pop().result()  # type: ignore[attr-defined]
        shutil.rmtree(target, ignore_errors=True)
        print(json.dumps([1000 * stop, 1000 * (after - plain)]), flush=True)
    dist.destroy_process_group()


def compare(training: Training, folder: Path) -> bool:
    """Whether a checkpoint has the bits of the state at the call, though training has gone on meanwhile."""
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    checkpoint.save(training.state(), 1, folder=folder)
    training.step()
    found = checkpoint.latest(folder)
    return found is not None and all(torch.equal(tensor, found.state["model"][name]) for name, tensor in before.items())


def ask(process: subprocess.Popen[str], line: str) -> list[float]:
    to, answers = process.stdin, process.stdout
    assert to is not None
    assert answers is not None
    print(line, file=to, flush=True)
    answer: list[float] = json.loads(answers.readline())
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=256, help="rows of a batch: more make a step longer")
    parser.add_argument("--side", help="used by the script itself", choices=SIDES)
    parser.add_argument("--folder", help="used by the script itself", type=Path)
    given = parser.parse_args()
    if given.side:
        train(given.side, given.rows, given.folder)
        return
    with scratch() as folder, contextlib.ExitStack() as ends:
        processes = {}
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--rows", str(given.rows), "--folder", str(folder)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ends.callback(process.wait)
            ends.callback(process.communicate)
            processes[side] = process
        results: dict[str, list[list[float]]] = {side: [] for side in SIDES}
        for number in range(given.rounds + 1):
            for side, process in processes.items():
                result = ask(process, "round")
                if number:
                    results[side].append(result)
        is_equal = bool(ask(processes["paceline"], "compare"))
        stops = {side: [stop for stop, _ in of_side] for side, of_side in results.items()}
        figures = {f"{side}_ms": median(of_side) for side, of_side in stops.items()}
        ratio = figures["dcp_async_ms"] / figures["paceline_ms"]
        report(
            "checkpoint_stop",
            "a checkpoint of 1 GiB on the CPU: milliseconds of the call, in which training stands still",
            "at most 20 ms, a tenth of DCP's async_save, bits equal",
            figures["paceline_ms"] <= 20 and ratio >= 10 and is_equal,
            ratio_to_dcp_async=ratio,
            **figures,
            **{f"{side}_least_ms": min(of_side) for side, of_side in stops.items()},
            **{f"{side}_next_step_longer_by_ms": median([later for _, later in results[side]]) for side in SIDES},
            bits_equal=is_equal,
            rounds=given.rounds,
            rows=given.rows,
        )


if __name__ == "__main__":
    main()
