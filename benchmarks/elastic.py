"""How long an elastic run takes from the notice that a node is lost until it trains on the others.

The nodes train together with Gloo, a checkpoint every few steps. One is lost without a word: an ssh host's link is cut, a Slurm
node and one of Ray's crash. The notice is the supervisor's line in the driver's log. The run trains again when rank 0 of the next
attempt has done a step with all others. So what counts is: to end the workers that are left, which wait in a collective, to
take stock of the nodes, to start Python and torch on them, to meet, to read the checkpoint, a step.

The machines are network namespaces of this one. Takes names: ssh, slurm, ray, and "spare": a run on two of three ssh hosts, from
the cut of one host's link to the next step, with the third host in its place.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import median, report
from elsewhere import Elsewhere, ray, slurm, ssh, wanted
from paceline.system.files import read_json

ROUNDS = 3
LIMIT_S = 180.0
TICK_S = 0.05

SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from paceline import checkpoint

dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
state = {{"model": model}}
step = 0
if found := checkpoint.latest():
    found.load_into(state)
    step = found.step
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
is_over = torch.zeros(1)
while not is_over:
    optimizer.zero_grad()
    parallel(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    step += 1
    checkpoint.save(state, step, every=20)
    mark = os.path.join({marks!r}, os.environ["PACELINE_RUN_ID"] + "_" + os.environ["PACELINE_ATTEMPT"])
    if dist.get_rank() == 0 and not os.path.exists(mark):
        open(mark, "w").close()
    time.sleep(0.05)
    # All of them after the same step: who is left alone fails.
    is_over += os.path.exists({stop!r})
    dist.all_reduce(is_over)
"""


def until(condition: Callable[[], object], what: str) -> float:
    """The time at which this came true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(TICK_S)
    return time.time()


def again_s(
    there: Elsewhere, lose: Callable[[str], None], back: Callable[[str], None], head: str, *words: str
) -> tuple[float, float]:
    """Seconds from a loss, and from its notice, to the first step of the next attempt.

    lose, back: of the last node but `head`. words: options of the run.
    """
    marks, stop = there.folder / "marks", there.folder / "stop"
    marks.mkdir(exist_ok=True)
    stop.unlink(missing_ok=True)
    script = there.folder / "source" / "trains.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT.format(marks=str(marks), stop=str(stop)))
    run_dir = there.submit(script, "--backend", "gloo", *words)
    until((marks / f"{run_dir.name}_1").exists, "it trains")
    record = read_json(run_dir / "state.json") or {}
    node = next(name for name in reversed(record["attempts"][0]["nodes"]) if name != head)
    lost = time.time()
    lose(node)
    try:
        noticed = until(lambda: is_noticed(run_dir, node), "the loss is noticed")
        again = until((marks / f"{run_dir.name}_2").exists, "it trains again")
    finally:
        back(node)
        stop.touch()
    until(lambda: "Completed" in there.call("status", run_dir.name), "it has ended")
    return again - lost, again - noticed


def is_noticed(run_dir: Path, node: str) -> bool:
    text = (run_dir / "logs" / "driver.log").read_text(errors="replace")
    return re.search(rf"node {re.escape(node)} is lost", text) is not None


def measure(
    there: Elsewhere, name: str, size: str, lose: Callable[[str], None], back: Callable[[str], None], head: str
) -> None:
    words = ("-j", size, "--elastic-after", "1h")
    found = [again_s(there, lose, back, head, *words)[1] for _ in range(ROUNDS)]
    report(
        f"elastic_{name}",
        f"an elastic run on {name}, from the notice of a lost node to training again on the others",
        "at most 30 s",
        max(found) <= 30.0,
        median_s=median(found),
        longest_s=max(found),
        size=size,
        rounds=ROUNDS,
    )


def on_ssh() -> None:
    with ssh(3) as there:
        # Not the first: hosts that see one folder share rank 0's checkpoints, and which host is lost changes little.
        measure(there, "ssh", "1..3x1", there.hosts.cut, there.hosts.heal, "")


def on_spare() -> None:
    for name, most_s, settings in (("", 17.0, ()), ("_quick", 6.0, ("--silence-s", "3"))):
        with ssh(3, *settings) as there:
            words = ("-j", "2x1", "--max-restarts", "1")
            found = [again_s(there, there.hosts.cut, there.hosts.heal, "", *words)[0] for _ in range(ROUNDS)]
        report(
            f"recovery_cut{name}_ssh",
            f"from the cut of an ssh host's link to the next step with a spare host, {' '.join(settings) or 'defaults'}",
            f"at most {most_s:g} s",
            max(found) <= most_s,
            median_s=median(found),
            longest_s=max(found),
            rounds=ROUNDS,
        )


def on_slurm() -> None:
    with slurm() as (there, lab):
        # The first node has the supervisor: without it, the job is requeued.
        measure(there, "slurm", "1..2x1", lab.kill_node, lab.boot_node, lab.hosts.names[0])


def on_ray() -> None:
    with ray() as (there, lab):
        measure(there, "ray", "1..3x1", lab.hosts.kill, lab.revive, lab.head)


if __name__ == "__main__":
    for target in wanted():
        {"ssh": on_ssh, "slurm": on_slurm, "ray": on_ray}[target]()
    if "spare" in sys.argv[1:]:
        on_spare()
