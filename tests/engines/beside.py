"""What `paceline exec` does on every target: checks of a run of two workers, for each target's own tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest

import paceline as pl
from paceline.errors import RunStateError, UserError
from paceline.observe import loads
from paceline.runs import states
from paceline.runs.execute import Beside
from tests.engines.lab import wait_for_end
from tests.helpers import wait_until

#: Each worker waits until an `exec` command creates a file for it.
WAITS = """
import os, time
print("up", flush=True)
while not os.path.exists("outputs/stop_" + os.environ["PACELINE_RANK"]):
    time.sleep(0.05)
"""
#: `LOUD` first prints far more lines than fit into a log of `LIMIT` bytes.
LOUD, LIMIT = "for number in range(100_000): print(f'{number:07d}')\n" + WAITS, "100kB"
STOP = ["sh", "-c", "touch outputs/stop_$PACELINE_RANK"]
WORDS = ["a 'b\" $(touch oops); {x} \\n", "", "é", "-x"]


def check_exec(run: pl.Run) -> None:
    """Run commands beside both workers of a run of `WAITS` with MINE=abc in its environment, and end it."""
    # Use a long timeout, because an engine may need some time to allocate nodes.
    wait_until(lambda: run.status == states.RUNNING, "the run is Running", 120)
    show = "import json, os, sys; print(json.dumps([os.environ['PACELINE_RANK'], os.environ['MINE'], os.getcwd(), sys.argv[1:]]))"
    folders = set()
    for rank in range(2):
        done = run.exec([sys.executable, "-c", show, *WORDS], rank=rank)
        assert (done.returncode, done.stderr) == (0, b""), done
        found = json.loads(done.stdout)
        assert found[:2] == [str(rank), "abc"]
        assert found[3] == WORDS
        folders.add(found[2])
        host = run.exec(["hostname"], rank=rank).stdout.decode().strip()
        node = run.record().attempts[-1].nodes[rank] if len(run.record().attempts[-1].nodes) > 1 else host
        assert node in (host, "local"), "it is on that worker's node"
    assert {os.path.basename(folder) for folder in folders} == {"work"}
    # A command has the given input, two separate outputs and its own exit code.
    data = os.urandom(200_000)
    done = run.exec(["sh", "-c", "cat; echo wrong >&2; exit 7"], rank=1, input=data)
    assert (done.returncode, done.stderr) == (7, b"wrong\n")
    assert done.stdout == data
    assert run.exec(["sh", "-c", "kill -9 $$"]).returncode == 137
    done = run.exec(["no-such-program"])
    assert (done.returncode, done.stderr) == (127, b"paceline exec: 'no-such-program': No such file or directory\n")
    _check_command_line(run)
    _check_stacks(run)
    _check_load(run)
    # If the client of `exec` ends without a message, Paceline ends that client's command. All other commands end with
    # the run.
    mark = f"6{os.getpid()}"
    with Beside(run.folder, ["sh", "-c", f"trap '' HUP; echo up; sleep {mark} & wait"], rank=1) as beside:
        wait_until(beside.heard, "it says something")
        wait_until(lambda: _count(run, f"sleep {mark}") == 1, "it runs")
    wait_until(lambda: _count(run, f"sleep {mark}") == 0, "nothing is left of it")
    with Beside(run.folder, ["sh", "-c", f"echo up; exec sleep {mark}"], rank=0) as beside:
        # First wait until the command has begun, because a command that has not begun is refused with another message.
        wait_until(beside.heard, "it says something")
        assert run.exec(STOP, rank=0).returncode == 0
        with contextlib.suppress(RunStateError):  # the run may end before this command does
            run.exec(STOP, rank=1)
        with pytest.raises(
            RunStateError, match=f"run {run.id}: its workers have ended, and the command or tunnel with them"
        ):
            _hear_all(beside)
    assert wait_for_end(run) == states.COMPLETED
    with pytest.raises(RunStateError, match="is Completed: a command can be run beside a worker while it is Running"):
        run.exec(["true"])
    # `exec` leaves no files in the run's folder.
    left = [str(path) for path in run.folder.path.rglob("*") if "exec" in path.name and path.name != "exec_key"]
    assert left == []


def check_short(run: pl.Run) -> None:
    """The logs of a run of two workers of `LOUD`, with a limit of `LIMIT`, have their first and last lines alone."""
    for rank in range(2):
        first, *lines, last = run.folder.rank_log(1, rank).read_text().splitlines()
        assert (first, last) == ("0000000", "up")
        assert len(lines) < 2 * 100_000 / 8
        assert sum("left out" in line for line in lines) == 1


def _hear_all(beside: Beside) -> None:
    while beside.exit_code is None:
        beside.heard()


def _check_command_line(run: pl.Run) -> None:
    command = [sys.executable, "-m", "paceline", "exec", run.id, "--rank", "1", "--", "sh", "-c", "echo $RANK; exit 5"]
    environment = {**os.environ, "PACELINE_WORKSPACE": str(run.folder.path.parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (5, "1\n", "")
    with pytest.raises(UserError, match=r"rank 2: run \S+ has ranks 0 to 1"):
        run.exec(["true"], rank=2)


def _check_stacks(run: pl.Run) -> None:
    """Both workers wait in the same line, and say so."""
    looks = [run.stacks()]

    def have_answered() -> bool:
        looks.append(run.stacks())
        return len([one for one in looks[-1].ranks.values() if one.get("threads")]) == 2

    wait_until(have_answered, "both workers answer", 60)
    found = looks[-1]
    assert sorted(found.ranks) == [0, 1], found.to_json()
    assert found.waiting == []
    # The worker calls `os.path.exists` and `sleep` in a loop. On a busy machine, the dump may show `exists`.
    frames = {one["threads"][0]["frames"][0]["function"] for one in found.ranks.values()}
    assert frames <= {"<module>", "exists"}, found.to_json()
    assert "thread main\n    train.py:" in str(found).replace("genericpath.py:19 exists\n    ", ""), str(found)


def _check_load(run: pl.Run) -> None:
    """Samples of their stacks show where both workers are, and their load is known."""
    for _ in range(3):
        profile = run.profile(seconds=1)
        if whole := all("<module>" in str(one.get("frames")) for one in profile.ranks.values()):
            break
        # On an overloaded machine, a worker may not answer in time, so try up to three times.
    assert whole, dict(profile.told)["ranks"]
    record = run.record()
    wait_until(
        lambda: run.status and len((loads.last(run.folder) or {}).get("ranks", {})) == 2, "they were sampled", 60
    )
    found = loads.last(run.folder)
    assert found is not None
    assert all(one["memory_gib"] > 0 for one in found["ranks"].values()), found
    assert [found["nodes"][str(number)]["name"] for number in range(len(found["nodes"]))] == list(
        dict.fromkeys(record.attempts[-1].nodes[: len(found["nodes"])])
    )


#: In this script, the second of two workers stops itself with SIGSTOP.
STOPS = """
import os, signal, time
print("up", flush=True)
if os.environ["PACELINE_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
def rests():
    time.sleep(1000)
rests()
"""


def check_hang(run: pl.Run) -> None:
    """A reader here finds that a run of `STOPS` with a small `hang_seconds` hangs, because of its second rank."""
    wait_until(lambda: run.record().hang is not None or run.status in states.TERMINAL, "it hangs", 120)
    record = run.record()
    assert record.hang is not None, record.failure
    assert record.hang["text"].startswith("Rank 1: it is stopped, by SIGSTOP or Ctrl-Z"), record.hang
    node = record.attempts[-1].nodes[1]
    assert f"on {node} lets it go on" in record.hang["text"]
    assert "rests" in (run.folder.path / record.hang["report"]).read_text()
    run.cancel()
    assert wait_for_end(run) == states.CANCELED


def _count(run: pl.Run, command: str) -> int:
    """How many such processes there are on rank 1's node."""
    script = "import glob\nfor name in glob.glob('/proc/[0-9]*/cmdline'):\n try: print(open(name).read().replace('\\0', ' '))\n"
    done = run.exec([sys.executable, "-c", script + " except OSError: pass\n"], rank=1)
    return sum(line.strip() == command for line in done.stdout.decode(errors="replace").splitlines())
