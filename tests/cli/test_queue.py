"""`paceline queue` and `paceline share`: one queue for all users of a machine, as users type it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import queue as queue_module
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.targets.status import JobUse, NodeStatus, Status, host_status
from paceline.targets.status_of_all import TargetLook
from tests.cli.conftest import Cli
from tests.helpers import write_tree

#: This script trains until the file `go` exists, and saves its step on SIGTERM.
TRAIN = """
import os, pathlib, signal, sys, time
saved = pathlib.Path(os.environ["PACELINE_CHECKPOINT_DIR"]) / "step"
step, asked = int(saved.read_text()) if saved.exists() else 0, []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("starts at", step, flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
    step += 1
    if asked:
        saved.write_text(str(step))
        print("saved", step, flush=True)
        sys.exit(1)
"""


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the text that `paceline queue` prints for a status of the target `lab`."""

    def show(status: Status) -> str:
        look = TargetLook(name="lab", kind="slurm", status=status)
        monkeypatch.setattr(queue_module, "look_at_all", lambda *_: [look])
        queue_module.queue(name=None, timeout_s=1.0, as_json=False)
        return capsys.readouterr().out

    monkeypatch.setenv("PACELINE_WORKSPACE", str(tmp_path))
    return show


@pytest.mark.promise("queue-says-who-why-when")
def test_queue_shows_waiting_runs_and_runs_on_several_nodes_of_a_cluster(shown: Callable[..., str]) -> None:
    jobs = (
        JobUse(run_id="one", user="ann", node="n1", cores=2),
        JobUse(run_id="both", user="bob", node="n[1-2]", cores=4, gpus="2"),
        JobUse(run_id="next", user="bob", cores=8, gpus="4", is_waiting=True, reason="jobs are ahead (Priority)"),
        JobUse(run_id="rays", user=""),
        JobUse(run_id="rays2", user="", is_waiting=True),
    )
    nodes = (NodeStatus(name="n1", cores=8, used_cores=4), NodeStatus(name="n2", cores=8, used_cores=2))
    assert shown(Status(nodes=nodes, jobs=jobs)).splitlines() == [
        "lab, n1: 4 of 8 cores free",
        "  RUN  USER  PRIORITY  CORES  GPUS  STATE",
        "  one  ann   -         2      -     runs",
        "lab, n2: 6 of 8 cores free",
        "lab, other runs:",
        "  RUN    USER  PRIORITY  CORES  GPUS  STATE",
        "  both   bob   -         4      2     runs on n[1-2]",
        "  next   bob   -         8      4     waits: jobs are ahead (Priority)",
        "  rays   -     -         -      -     runs",
        "  rays2  -     -         -      -     waits",
    ]


@pytest.mark.promise("queue-says-who-why-when")
def test_queue_shows_hangs_expected_starts_and_runs_that_leave(shown: Callable[..., str]) -> None:
    def ticket(run_id: str, *gpus: str, **values: Any) -> dict[str, Any]:
        granted = {"gpus": list(gpus)} if gpus else None
        return {"run_id": run_id, "user": "ann", "cores": 1, "gpu_count": 1, "granted": granted, **values}

    hang, bob = {"hangs_since": "2026-11-29 01:12:03 UTC"}, "GPU 3: used by bob's python (pid 4711), 40.0 GB"
    tickets = [
        ticket("runs", "0", hangs_since=None),
        ticket("hangs", "1", **hang),
        ticket("leaves", "2", is_asked_to_leave=True, **hang),
        ticket("first", priority="urgent", starts_in_s=60.5),
        ticket("second", starts_in_s=2400.0),
        ticket("third", starts_in_s=3 * 3600.0),
        ticket("now", starts_in_s=0.0),
        ticket("outside", why=bob, starts_in_s=200_000.0),
        ticket("quota", why="over quota: ann may hold 4 at once"),
    ]
    gpus = ["0", "1", "2", "3"]
    text = shown(host_status("gpu1", {"cores": 16, "gpus": gpus, "tickets": tickets, "blocked": {"3": bob}}))
    assert text.startswith("lab, gpu1: 13 of 16 cores free, 0 of 4 GPUs free\n")
    assert [re.split(" {2,}", line.strip(), maxsplit=5)[::5] for line in text.splitlines()[2:]] == [
        ["runs", "runs"],
        ["hangs", "runs, hangs since 2026-11-29 01:12:03 UTC"],
        ["leaves", "runs, hangs since 2026-11-29 01:12:03 UTC, leaves for an urgent run"],
        ["first", "waits: free cores or GPUs, first in the queue; likely to start in a minute"],
        ["second", "waits: 1 run before it in the queue; likely to start in 40 min"],
        ["third", "waits: 2 runs before it in the queue; likely to start in 3 h"],
        ["now", "waits: 3 runs before it in the queue"],
        ["outside", f"waits: {bob}; likely to start in 2 days"],
        ["quota", "waits: over quota: ann may hold 4 at once"],
    ]


@pytest.fixture
def shared(cli: Cli) -> Cli:
    """A machine with two GPUs that its users share."""
    cli.environment["PACELINE_GPUS"] = "0,1"
    assert "This machine is shared" in cli("share", "init").stdout
    write_tree(cli.folder, {"train.py": TRAIN, "quick.py": "print('quick')"})
    return cli


def wait_for(text: str, path: Path) -> str:
    deadline = time.monotonic() + 60
    while not re.search(text, found := path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, f"no {text!r} in {found!r}"
        time.sleep(0.05)
    return found


@pytest.mark.promise("urgent-run-makes-room")
def test_urgent_run_preempts_another_which_resumes_at_its_step(shared: Cli) -> None:
    go = shared.folder / "go"
    words = ("--gpu", "-j", "2", "--backend", "gloo", "--cores", "0", "train.py", "--", go)
    run_id = shared("submit", *words).stdout.strip()
    log = shared.folder / ".paceline/runs" / run_id / "logs/rank_0.log"
    wait_for("starts at 0", log)

    told = shared("run", "--gpu", "--cores", "0", "--priority", "urgent", "quick.py")

    assert "quick" in told.stdout
    wait_for("starts at [1-9]", log)
    (row,) = shared.json("queue")["targets"][0]["status"]["jobs"]
    assert (row["run_id"], row["gpus"], row["is_waiting"]) == (run_id, "0, 1", False)
    shown = shared("queue", "local").stdout
    assert "0 of 2 GPUs free" in shown
    assert re.search(rf"{run_id} +\w+ +normal +0 +0, 1 +runs", shown)
    go.touch()
    wait_for('"status": "Completed"', shared.folder / ".paceline/runs" / run_id / "state.json")
    first, second = store.stored(RunFolder(shared.folder / ".paceline/runs" / run_id)).attempts
    assert (first.cause, second.cause) == ("preempted", None)
    assert second.reason.startswith("preempted: the urgent run ")


def test_share_init_refuses_an_already_shared_machine_and_share_check_reports_an_invalid_file(shared: Cli) -> None:
    assert "is shared already, by " in shared("share", "init", code=2).stderr
    assert "is correct" in shared("share", "check").stdout
    path = shared.folder / "leases/paceline-share/shares.json"
    path.write_text('{"limits": {"*": {"gpu": 1}}}')
    assert "unknown key 'gpu'" in shared("share", "check", code=1).stdout
    assert "Equal shares apply until it is corrected" in shared("queue").stdout
    path.write_text('{"limits": {')
    assert "line 1 column 13" in shared("share", "check", code=1).stdout
    assert "Equal shares apply until it is corrected" in shared("queue").stdout
    path.unlink()
    assert "This machine is not shared" in shared("share", "check", code=1).stdout


def test_machine_is_not_shared_while_a_run_waits_or_runs_in_the_queue_of_its_user(cli: Cli) -> None:
    write_tree(cli.folder, {"train.py": TRAIN})
    run_id = cli("submit", "--cores", "0", "train.py", "--", cli.folder / "go").stdout.strip()
    wait_for("starts at 0", cli.folder / ".paceline/runs" / run_id / "logs/rank_0.log")
    assert f"run {run_id} uses this machine. Wait for its end" in cli("share", "init", code=2).stderr
    cli("cancel", "--wait", run_id)
    assert "This machine is shared" in cli("share", "init").stdout


@pytest.mark.promise("queue-says-who-why-when")
def test_run_over_its_quota_reports_its_quota(shared: Cli) -> None:
    path = shared.folder / "leases/paceline-share/shares.json"
    path.write_text('{"limits": {"*": {"gpus": 1}}}')
    words = ["--notify", f"command:tee -a {shared.folder}/told", "--notify-on", "quota"]
    run_id = shared("submit", *words, "--gpu", "-j", "2", "--backend", "gloo", "train.py").stdout.strip()
    record = shared.folder / ".paceline/runs" / run_id / "state.json"
    wait_for("holds 0 GPUs, asks for 2 more, and may hold 1 at once", record)
    wait_for('"event": "quota".*: Queued, over quota: ', shared.folder / "told")
    assert "waits: " in (shown := shared("queue").stdout)
    assert "may hold 1 at once" in shown
    shared("cancel", "--wait", run_id)
    assert (shared.folder / "told").read_text().count('"event"') == 1
    assert shared.json("queue")["targets"][0]["status"]["jobs"] == []
