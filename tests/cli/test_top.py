"""top and profile in a shell: the load of a run's workers, and how they spend their time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from paceline.cli import top
from paceline.observe.stragglers import RunPace, Straggler
from paceline.runs import read, states
from tests.cli.conftest import Cli
from tests.cli.terminal import Terminal
from tests.helpers import make_run, wait_until

STAYS = """
import time
def computes():
    return sum(range(1_000_000))
print("up", flush=True)
while True:
    computes()
    time.sleep(0.01)
"""


@pytest.mark.promise("nodes-workers-take-sampled-target")
def test_top_shows_the_load_of_a_running_run_and_profile_refuses_an_ended_run(cli: Cli) -> None:
    cli.environment["PACELINE_SAMPLE_SECONDS"] = "1"
    run_id = cli.submit(STAYS)
    log = cli.run_folder(run_id) / "logs" / "rank_0.log"
    wait_until(lambda: log.exists() and "up" in log.read_text(), "the worker computes", 60)
    cli.wait(run_id, "Running")
    wait_until(lambda: cli.json("top", run_id)["ranks"], "it was sampled", 60)
    found = cli.json("top", run_id)
    assert (found["run_id"], found["status"]) == (run_id, "Running")
    assert found["ranks"]["0"]["memory_gib"] > 0
    assert found["nodes"]["0"]["memory_total_gib"] > found["ranks"]["0"]["memory_gib"]
    # If the output is not a terminal, `top` prints the table once.
    printed = cli("top", run_id).stdout
    assert printed.startswith(f"{run_id}  Running for ")
    assert "\nRANK  NODE" in printed
    assert "\x1b" not in printed
    terminal = Terminal(cli, "top", run_id, "--interval", "0.5")
    try:
        terminal.read_until("RANK  NODE")
        terminal.read_until("RANK  NODE")
        terminal.press("\x03")
        assert terminal.exit_code() == 130
        # At the end, `top` restores the cursor and the previous screen, and prints the last table once more.
        assert "\x1b[?25l" in terminal.text
        _, _, after = terminal.text.rpartition("\x1b[?25h\x1b[?1049l")
        assert "RANK  NODE" in after
        assert "\x1b" not in after
    finally:
        terminal.hang_up()
    profiled = cli("profile", run_id, "--seconds", "3", "-o", "all.json").stdout
    assert "computes  src/train.py:" in profiled
    assert "All samples: all.json." in profiled
    assert json.loads((cli.folder / "all.json").read_text())["profiles"][0]["name"] == "rank 0, main"
    cli("cancel", "--wait", run_id)
    ended = cli("top", "--once").stdout
    assert ended.startswith(f"{run_id}  Canceled; the last sample:\n")
    shown = cli("show", run_id).stdout
    assert "\nLoad:        local, cpu " in shown
    assert cli.json("show", run_id)["load"]["ranks"]["0"]["node"] == "local"
    said = cli("profile", run_id, code=1).stderr
    assert f"run {run_id} is Canceled: its workers have stacks while it is Running" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["top", "--interval", "0"], "--interval 0: give a number of seconds from 0.5 to 3600."),
        (["profile", "--seconds", "0"], "--seconds 0: give a number from 1 to 600."),
        (["profile", "--rate", "1000"], "--rate 1000: give a number of samples a second from 1 to 500."),
        (["profile", "-o", "."], "--output '.': name a file in a folder that exists."),
    ],
    ids=["interval", "seconds", "rate", "output"],
)
def test_wrong_top_and_profile_calls_are_refused(cli: Cli, words: list[str], said: str) -> None:
    run_id = cli("run", "-q", cli.script("pass")).stdout
    assert said in cli(*words, code=2).stderr, run_id


def test_top_reports_that_a_short_run_was_never_sampled(cli: Cli) -> None:
    cli("run", cli.script("pass"))
    assert "nothing was sampled of it: it was too short" in cli("top", "--once", code=1).stderr


@pytest.mark.parametrize(("nodes", "workers"), [(1000, 8), (2, 300), (1000, 0), (3, 1)])
def test_top_command_limits_a_large_run_to_the_screen_height_but_shows_its_slow_ranks(
    nodes: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = nodes * workers - 2
    straggler = Straggler(
        ranks=(slow,), node=f"node-{nodes - 1}", factor=2.0, own_s=1.0, others_s=0.5, lost_s=9.0, why="data"
    )
    sample = {
        "time": time.time(),
        "every_s": 5.0,
        "nodes": {str(node): {"name": f"node-{node}", "cpu_percent": 50.0} for node in range(nodes)},
        "ranks": {
            str(rank): {"node": f"node-{rank // workers}", "cpu_percent": 90.0} for rank in range(nodes * workers)
        },
        "pace": RunPace(straggler=straggler if workers else None).to_json(),
    }
    monkeypatch.setattr("paceline.cli.top.loads.last", lambda folder: sample)
    folder, _lock = make_run(tmp_path / "runs", status=states.RUNNING)

    lines = top._lines(folder, read.record(folder), most_rows=14)

    assert len(lines) <= 24
    if workers:
        assert lines[-1].startswith(f"Rank {slow} on node-{nodes - 1} is 2.0 times as slow")
        assert any(line.split()[0] == str(slow) for line in lines if line)
    more = [int(line.split()[0].replace(",", "")) for line in lines if "more rows" in line]
    shown = sum(line.startswith("node-") or " node-" in line for line in lines[: -1 if workers else None])
    assert shown + sum(more) == nodes + nodes * workers
    assert len(top._lines(folder, read.record(folder))) > nodes + nodes * workers
