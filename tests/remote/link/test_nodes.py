from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from paceline.errors import TargetError
from paceline.job.plan import REMOTE_SHELL_PYTHON, Command
from paceline.remote.link import LinkError, bootstrap_words, copies
from paceline.remote.link.copies import clear_node
from paceline.remote.link.messages import Pending
from paceline.runs import read, states, tags_and_properties
from paceline.system import gaps, linked, processes
from paceline.system.files import append_line, write_json
from paceline.system.linked import NotCopied
from tests.helpers import fill_disk, make_job, make_run, wait_until, write_tree


def command(seen, text: str, *, rank: int = 0, log: str | None = None, attempt: int = 1, **environment: str) -> Command:
    """A shell script as a command of a node."""
    path = seen.run_dir / (log or f"attempts/{attempt}/rank_{rank}.log")
    return Command(argv=("/bin/sh", "-c", text), node_rank=rank, ranks=(rank,), log=path, environment=environment)


def run(nodes, seen, text: str, *, rank: int = 0, **values) -> int:
    """The exit code of a script on a node, in the run's folder."""
    started = nodes.start(command(seen, text, rank=rank, **values), seen.run_dir, nodes.shell(rank))
    return next(end.exit_code for end in ended(nodes) if end.pid == started.pid)


def ended(nodes, count: int = 1):
    """The first `count` ends."""
    found: list = []
    wait_until(lambda: found.extend(nodes.ended()) or len(found) >= count, f"{count} ends, have {found}")
    return found


@pytest.fixture
def own_disk(tmp_path):
    """The words of an agent that has another disk than its machine at `<tmp_path>/node`."""
    (tmp_path / "node").mkdir(mode=0o700)
    place = shlex.quote(str(tmp_path / "node"))
    words = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {place} && exec {{}}"]
    tried = subprocess.run([*words[:-1], words[-1].format("true")], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"needs to mount in a namespace of its own: {tried.stderr.strip()}")
    return [*words[:-1], words[-1].format(shlex.join(bootstrap_words(sys.executable)))]


#: This program is a supervisor. Another one takes over the run just before this one makes the copies of the run's folder.
TAKEN_OVER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from paceline.job.plan import Command, Node, NodeSetup
from paceline.remote.link import AgentNodes, Link, bootstrap_words, nodes
from paceline.runs.claim import Claim
from paceline.runs.folder import RunFolder
from paceline.supervisor import prepare
from paceline.supervisor.nodes import NodeOutcome
from paceline.supervisor.supervision import Supervision
from paceline.system.detached_process import library_dir

class LateCopies(nodes.Copies):
    def __init__(self, *given):
        folder.lock.write_bytes(b"process 1 on another-host (00000000)")
        super().__init__(*given)

def wait_for_nodes(*_):
    library = library_dir(folder.path.parents[1])
    link = Link.open(
        bootstrap_words(sys.executable), name="node-0", folder=top, library_dir=library, shared_library=True
    )
    node = Node(node_rank=0, name="node-0", address="127.0.0.1", cores=1)
    return AgentNodes([link], (node,), 2, folder=top, is_shared=False)

folder, top = RunFolder(Path(sys.argv[1])), sys.argv[2]
nodes.Copies = LateCopies
prepare._prepare = lambda *_: (NodeOutcome(), (NodeSetup(python=sys.executable),))
run = Supervision(folder, Claim.take(folder.lock, None))
run.target = SimpleNamespace(wait_for_nodes=wait_for_nodes)
assert prepare.hold_nodes(run) is None
run.nodes.begin(1)
log = Path(run.seen.run_dir) / "attempts/1/rank_0.log"
command = Command(argv=("/bin/sh", "-c", "echo line"), node_rank=0, ranks=(0,), log=log, environment={})
run.nodes.start(command, run.seen.run_dir, run.nodes.shell(0))
while not run.nodes.ended():
    time.sleep(0.05)
run.nodes.fetch()
"""


def test_supervisor_writes_no_files_of_nodes_for_a_run_that_another_one_took_over(run_folder, tmp_path):
    words = [sys.executable, "-c", TAKEN_OVER, run_folder.path, str(tmp_path / "node")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not run_folder.rank_log(1, 0).exists() or not run_folder.rank_log(1, 0).read_text()
    assert done.returncode == 75, done.stderr
    assert "process 1 on another-host (00000000) has taken over its work" in done.stdout


def test_node_receives_the_run_and_returns_its_files(make_nodes, run_folder, library):
    nodes = make_nodes()
    seen = nodes.send(run_folder, library)
    assert (seen.run_dir / "snapshot/data/a b\n.txt").read_text() == "x"
    for path in (run_folder.job, run_folder.state):
        assert (seen.run_dir / path.name).read_bytes() == path.read_bytes()
    nodes.begin(1)
    script = "echo $A; echo m >> metrics/rank_0.jsonl; echo o > outputs/o; echo c > checkpoints/c; exit 3"
    assert run(nodes, seen, script, A="a") == 3
    assert run_folder.rank_log(1, 0).read_text() == "a\n"
    assert run_folder.metric_log(0).read_text() == "m\n"
    nodes.fetch()
    assert (run_folder.outputs / "o").read_text() == "o\n"
    assert (run_folder.checkpoints / "c").read_text() == "c\n"
    nodes.close()
    nodes.close()
    assert not seen.run_dir.exists()
    assert not seen.scratch_dir.exists()
    assert not (run_folder.path / ".incoming").exists()


def test_nodes_that_share_the_run_folder_are_sent_no_files(make_nodes, run_folder, library, tmp_path):
    nodes = make_nodes(2, is_shared=None)
    seen = nodes.send(run_folder, library)
    assert (seen.is_shared, seen.run_dir) == (True, run_folder.path)
    nodes.begin(1)
    assert run(nodes, seen, "echo here > outputs/o", rank=1) == 0
    nodes.fetch()
    nodes.close()
    assert (run_folder.outputs / "o").read_text() == "here\n"
    assert not (tmp_path / "node/runs").exists()


def _own_notes(folder):
    """Return the lines of the notes but those that Paceline writes, as the run's readable name."""
    return [line for line in folder.notes.read_text().splitlines() if not line.startswith("{")]


def test_outputs_of_nodes_with_disks_of_their_own_are_joined(make_nodes, open_link, own_disk, run_folder, library):
    nodes = make_nodes(links=[open_link(f"node-{rank}", own_disk) for rank in range(2)])
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    assert not seen.run_dir.exists()
    for rank in (1, 0):
        script = "echo $N > outputs/only_$N; echo $N > outputs/both; touch -d @99 outputs/both; echo $N >> notes.jsonl"
        assert run(nodes, seen, script, rank=rank, N=str(rank)) == 0
    nodes.fetch()
    assert {path.name: path.read_text() for path in run_folder.outputs.iterdir()} == {
        "only_0": "0\n",
        "only_1": "1\n",
        "both": "0\n",
    }
    assert sorted(_own_notes(run_folder)) == ["0", "1"]


def test_shared_folder_of_two_nodes_is_fetched_once(make_nodes, run_folder, library):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    assert run(nodes, seen, "echo note >> notes.jsonl; echo x > outputs/x", rank=1) == 0
    assert run(nodes, seen, "true", rank=0) == 0
    nodes.fetch()
    assert _own_notes(run_folder) == ["note"]
    assert (run_folder.outputs / "x").exists()


def test_nodes_of_a_new_attempt_get_metrics_and_checkpoints_of_the_previous_one(
    make_nodes, open_link, own_disk, run_folder, library
):
    append_line(run_folder.metric_log(0), {"step": 1})
    write_tree(run_folder.checkpoints, {"step 1/model\n": "old"})
    nodes = make_nodes(links=[open_link("node-0", own_disk)])
    seen = nodes.send(run_folder, library)
    nodes.begin(2)
    script = (
        "cat checkpoints/*/*; echo $LINE >> metrics/rank_0.jsonl; rm -r checkpoints/step*; echo new > checkpoints/b"
    )
    assert run(nodes, seen, script, attempt=2, LINE='{"step": 2}') == 0
    assert run_folder.rank_log(2, 0).read_text() == "old"
    assert [json.loads(line)["step"] for line in run_folder.metric_log(0).read_text().splitlines()] == [1, 2]
    nodes.fetch()
    # The next attempt does not get checkpoints that the script has removed.
    assert [path.name for path in run_folder.checkpoints.iterdir()] == ["b"]


def test_checkpoint_left_on_a_lost_node_reaches_all_nodes_when_the_node_returns(
    make_nodes, open_link, own_disk, run_folder, library, tmp_path
):
    write_tree(run_folder.checkpoints, {"step_1": "1"})
    os.utime(run_folder.checkpoints / "step_1", (1e9, 1e9))
    links = [open_link(f"node-{rank}", own_disk) for rank in range(2)]
    left = f"{tmp_path}/node/runs/{run_folder.run_id}/checkpoints"
    links[1].make_folders([left])
    links[1].put_file(f"{left}/step_2", b"2")
    nodes = make_nodes(links=links)
    seen = nodes.send(run_folder, library)
    nodes.begin(2)
    # Both ranks must see both checkpoints. Otherwise each rank would resume from a different checkpoint.
    for rank in range(2):
        assert run(nodes, seen, "cat checkpoints/*", rank=rank, attempt=2, log=f"attempts/2/rank_{rank}.log") == 0
        assert run_folder.rank_log(2, rank).read_text() == "12"
    assert (run_folder.checkpoints / "step_2").read_text() == "2"


def test_returning_node_does_not_restore_removed_checkpoints(
    make_nodes, open_link, own_disk, run_folder, library, tmp_path
):
    write_tree(run_folder.checkpoints, {"step_1": "1", "step_2": "2"})
    first = make_nodes(links=[open_link("node-0", own_disk)])
    seen = first.send(run_folder, library)
    first.begin(1)
    assert run(first, seen, "rm checkpoints/step_1") == 0
    first.fetch()
    assert not (run_folder.checkpoints / "step_1").exists()
    link = open_link("node-1", own_disk)
    left = f"{tmp_path}/node/runs/{run_folder.run_id}/checkpoints"
    link.make_folders([left])
    link.put_file(f"{left}/step_1", b"1")
    second = make_nodes(links=[link])
    seen = second.send(run_folder, library)
    second.begin(2)
    assert run(second, seen, "ls checkpoints", attempt=2) == 0
    assert run_folder.rank_log(2, 0).read_text() == "step_2\n"
    second.fetch()
    assert [path.name for path in run_folder.checkpoints.iterdir()] == ["step_2"]


def test_sending_a_run_to_its_nodes_does_not_wait_for_fetching_older_checkpoints(
    make_nodes, open_link, own_disk, run_folder, library, tmp_path, monkeypatch
):
    write_tree(run_folder.checkpoints, {"step_3": "3"})
    links = [open_link(f"node-{rank}", own_disk) for rank in range(2)]
    left = f"{tmp_path}/node/runs/{run_folder.run_id}/checkpoints"
    assert links[1].run(["sh", "-c", f"mkdir -p {left} && touch -d @99 {left}/step_2"]).returncode == 0
    monkeypatch.setattr(links[1], "flush", lambda: pytest.fail("it is waited for"))
    make_nodes(links=links).send(run_folder, library)
    monkeypatch.undo()


def test_log_longer_than_log_limit_is_shortened_on_the_node_and_in_the_local_copy(make_nodes, run_folder, library):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs fallocate(2)")
    record = json.loads(run_folder.job.read_text())
    record["job"]["log_limit"] = limit = gaps.LEAST_LIMIT
    run_folder.job.write_text(json.dumps(record))
    nodes = make_nodes()
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    # Print in ten parts, so that the first lines are sent before the log is shortened.
    print_lines = "seq -f %%07g %d %d"
    script = " && ".join([print_lines % (part, part + 9999) + "; sleep 0.3" for part in range(0, 100_000, 10_000)])
    there, here = seen.run_dir / "attempts/1/rank_0.log", run_folder.rank_log(1, 0)
    started = nodes.start(command(seen, script), seen.run_dir, nodes.shell(0))
    ends: list = []

    def is_over() -> bool:
        ends.extend(nodes.ended())
        return bool(ends)

    wait_until(is_over, "the end")
    assert (ends[0].pid, ends[0].exit_code) == (started.pid, 0)
    nodes.fetch()
    for log in (there, here):
        kept = b"".join(gaps.pieces(str(log)))
        assert kept.startswith(b"0000000\n0000001\n"), log
        assert kept.endswith(b"0099999\n"), log
        assert b"\0" not in kept, log
        assert log.stat().st_size == 800_000, log
        assert log.stat().st_blocks * 512 < limit + 2 * 80_000, log


def test_fetched_files_keep_unusual_names(make_nodes, run_folder, library):
    nodes = make_nodes()
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    name = os.fsdecode(b"a b\n'\"; $(x) \xff gr\xc3\xb6\xc3\x9fe")
    write_tree(seen.run_dir, {f"outputs/{name}/{name}": "x"})
    (seen.run_dir / "outputs/link").symlink_to(name)
    assert run(nodes, seen, "true") == 0
    nodes.fetch()
    assert (run_folder.outputs / name / name).read_text() == "x"
    assert os.readlink(run_folder.outputs / "link") == name


def test_fetching_a_large_checkpoint_does_not_delay_new_log_lines(make_nodes, run_folder, library):
    nodes = make_nodes()
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    script = """echo line >> metrics/rank_0.jsonl; truncate -s 200M checkpoints/large; echo end >> checkpoints/large
        while [ ! -e stop ]; do echo line >> metrics/rank_0.jsonl; sleep 0.05; done"""
    nodes.start(command(seen, script), seen.run_dir, nodes.shell(0))
    during = set()

    def is_here() -> bool:
        if (run_folder.path / ".incoming").exists():
            during.add(run_folder.metric_log(0).stat().st_size if run_folder.metric_log(0).exists() else 0)
        return (run_folder.checkpoints / "large").exists()

    wait_until(is_here, "the checkpoint", 60)
    (seen.run_dir / "stop").touch()
    ended(nodes)
    # Check only that some lines arrive during the transfer: how many depends on the machine's speed.
    # tests/remote/agent/test_mirror.py tests how logs and checkpoints take turns.
    assert max(during) > 0
    assert (run_folder.checkpoints / "large").stat().st_size == (200 << 20) + 4
    with open(run_folder.checkpoints / "large", "rb") as file:
        file.seek(-4, os.SEEK_END)
        assert file.read() == b"end\n"


def test_worker_process_is_checked_and_signaled_only_on_the_node_where_it_runs(make_nodes, run_folder, library):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    script = "trap 'exit 7' TERM; sleep 600 & echo $! > pid; mv pid child; while :; do sleep 0.01; done"
    started = nodes.start(command(seen, script, rank=1), seen.run_dir, nodes.shell(1))
    wait_until((seen.run_dir / "child").exists, "the child")
    child = int((seen.run_dir / "child").read_text())
    assert nodes.is_alive(started.pid, 1)
    assert nodes.is_alive(child, 1)
    assert not nodes.are_ending({0: [os.getpid()], 1: [started.pid, child]})
    killed = subprocess.Popen(["sleep", "60"])
    killed.kill()
    assert nodes.are_ending({0: [os.getpid()], 1: [started.pid, killed.pid]})
    killed.wait()
    assert not nodes.signal(child, 0, signal.SIGTERM)
    assert nodes.signal(started.pid, 1, signal.SIGTERM)
    found = ended(nodes)
    assert [(end.pid, end.node_rank, end.exit_code) for end in found] == [(started.pid, 1, 7)]
    assert not nodes.is_alive(started.pid, 1)
    assert not nodes.signal(started.pid, 1, signal.SIGTERM)
    nodes.kill_all()
    wait_until(lambda: not nodes.is_alive(child, 1), "the end of the child")
    assert [*nodes.oom_kills()] == [0, 1]
    asked = {"folder": str(seen.run_dir), "ranks": {"1": os.getpid()}, "run_id": "r"}
    assert sorted(nodes.loads({})) == [0, 1]
    assert nodes.loads({1: asked})[1]["ranks"]["1"]["pid"] == os.getpid()


def test_signals_reach_all_processes_of_all_nodes(make_nodes, run_folder, library):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    pids = {
        rank: [nodes.start(command(seen, "exec sleep 600", rank=rank), seen.run_dir, nodes.shell(rank)).pid]
        for rank in (0, 1)
    }
    for number in (signal.SIGSTOP, signal.SIGTERM):
        nodes.signal_all(pids, [number])
    assert nodes.ended() == []
    nodes.signal_all(pids, [signal.SIGCONT])
    found = ended(nodes, 2)
    assert {(end.node_rank, end.pid, end.exit_code) for end in found} == {(0, pids[0][0], 143), (1, pids[1][0], 143)}


def test_only_processes_with_the_run_id_in_their_environment_are_signaled(make_nodes, run_folder, library):
    # Regression: workers in docker containers are children of docker's daemon, not of the agent. So the workers of
    # mpirun never got a signal.
    nodes = make_nodes()
    nodes.send(run_folder, library)
    for run_id, is_reached in ((f"{run_folder.run_id}0", False), (run_folder.run_id, True)):
        with subprocess.Popen(["sleep", "600"], env={**os.environ, "PACELINE_RUN_ID": run_id}) as process:
            try:
                # Popen returns a moment before the kernel has set the variables of the new program.
                wait_until(Path(f"/proc/{process.pid}/environ").read_bytes, "the variables")
                assert nodes.signal(process.pid, 0, signal.SIGTERM) is is_reached
                if is_reached:
                    process.wait(60)
            finally:
                process.kill()
        assert process.returncode == -(signal.SIGTERM if is_reached else signal.SIGKILL)


def test_unstartable_program_raises_file_not_found(make_nodes, run_folder, library):
    nodes = make_nodes()
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    wrong = dataclasses.replace(command(seen, ""), argv=("/no/program",))
    with pytest.raises(FileNotFoundError, match="/no/program"):
        nodes.start(wrong, seen.run_dir, {})


def test_lost_node_is_reported_and_other_nodes_are_fetched(make_nodes, open_link, own_disk, run_folder, library):
    nodes = make_nodes(links=[open_link(f"node-{rank}", own_disk) for rank in range(2)])
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    for rank in range(2):
        assert run(nodes, seen, f"echo {rank} > outputs/{rank}", rank=rank) == 0
    started = nodes.start(command(seen, "sleep 600", rank=1), seen.run_dir, nodes.shell(1))
    os.kill(nodes._links[1].hello.pid, signal.SIGKILL)
    wait_until(lambda: nodes.lost() == {1: "node-1: its agent is gone."}, "the loss")
    assert not nodes.is_alive(started.pid, 1)
    assert not nodes.signal(started.pid, 1, signal.SIGTERM)
    with pytest.raises(OSError, match="node-1: its agent is gone"):
        nodes.start(command(seen, "true", rank=1), seen.run_dir, {})
    with pytest.raises(
        TargetError, match=r"could not be fetched \(node-1: its agent is gone\)\. .*/node/runs/.* there"
    ):
        nodes.fetch()
    assert (run_folder.outputs / "0").read_text() == "0\n"
    assert run(nodes, seen, "true", rank=0) == 0


def test_lost_node_on_a_shared_folder_loses_no_files(make_nodes, run_folder, library):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    assert run(nodes, seen, "echo x > outputs/x") == 0
    os.kill(nodes._links[0].hello.pid, signal.SIGKILL)
    wait_until(nodes.lost, "the loss")
    nodes.fetch()
    assert (run_folder.outputs / "x").read_text() == "x\n"


def test_files_of_a_node_lost_during_fetch_come_from_a_node_with_the_same_folder(make_nodes, run_folder, library):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    assert run(nodes, seen, "echo x > outputs/x") == 0
    first = nodes._links[0]

    def lose(*, is_last: bool = False) -> None:
        os.kill(first.hello.pid, signal.SIGKILL)
        wait_until(lambda: first.lost, "the loss")
        raise LinkError("node-0: its agent is gone.")

    first.flush = lose  # type: ignore[method-assign]
    nodes.fetch()
    assert (run_folder.outputs / "x").read_text() == "x\n"


def test_sending_a_run_to_a_node_with_a_full_disk_raises_and_the_error_names_the_node(
    make_nodes, run_folder, library, small_disk
):
    (run_folder.snapshot.resolve() / "large").write_bytes(b"x" * (2 << 20))
    nodes = make_nodes(folder=str(small_disk / "node"))
    with pytest.raises(TargetError, match=r"node-0: the run could not be sent to .*: No space left"):
        nodes.send(run_folder, library)
    assert os.listdir(small_disk / "node/snapshots") == []


def test_disk_that_fills_up_on_a_node_is_detected(make_nodes, run_folder, library, small_disk):
    nodes = make_nodes(folder=str(small_disk / "node"))
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    assert not nodes.is_disk_full()
    fill_disk(small_disk)
    assert nodes.is_disk_full()
    assert run(nodes, seen, "exit 4") == 4


@pytest.mark.parametrize("file", ["attempts/1/rank_0.log", "outputs/large"])
def test_full_local_disk_does_not_stop_the_run_and_is_reported(make_nodes, run_folder, library, small_disk, file):
    moved = type(run_folder)(small_disk / run_folder.run_id)
    write_tree(
        moved.path,
        {"job.json": run_folder.job.read_bytes(), "state.json": run_folder.state.read_bytes(), "outputs/.k": ""},
    )
    nodes = make_nodes()
    seen = nodes.send(moved, library)
    nodes.begin(1)
    assert run(nodes, seen, f"head -c 3000000 /dev/zero > {file}; echo small > outputs/small; exit 4") == 4
    with pytest.raises(TargetError, match=rf"could not be fetched \(node-0: No space left on device: '.*{file}.*'\)"):
        nodes.fetch()
    assert file.startswith("attempts") or (moved.outputs / "small").read_text() == "small\n"
    os.truncate(seen.run_dir / file, 10)
    os.truncate(moved.path / file, 0) if file.startswith("attempts") else None
    nodes.fetch()
    assert (moved.path / file).stat().st_size == 10
    assert (moved.outputs / "small").read_text() == "small\n"


def test_output_files_not_yet_fetched_are_fetched_when_the_nodes_are_closed(make_nodes, run_folder, library):
    nodes = make_nodes()
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    assert run(nodes, seen, "echo x > outputs/x") == 0
    nodes.close()
    assert (run_folder.outputs / "x").read_text() == "x\n"
    assert not seen.run_dir.exists()


def test_files_that_cannot_be_fetched_because_the_local_disk_is_full_stay_on_the_node(
    make_nodes, run_folder, library, small_disk
):
    moved = type(run_folder)(small_disk / run_folder.run_id)
    write_tree(
        moved.path,
        {"job.json": run_folder.job.read_bytes(), "state.json": run_folder.state.read_bytes(), "outputs/.k": ""},
    )
    nodes = make_nodes()
    seen = nodes.send(moved, library)
    nodes.begin(1)
    assert run(nodes, seen, "head -c 3000000 /dev/zero > outputs/large") == 0
    nodes.close()
    assert (seen.run_dir / "outputs/large").stat().st_size == 3_000_000


def left_behind(nodes, folder, library, *, files=(("outputs/model", 3),)) -> Path:
    """The copy of a run on a node whose supervisor was killed: it has these files, and the run's record says Failed."""
    seen = nodes.send(folder, library)
    nodes.begin(1)
    for link in nodes._links:
        os.kill(link.hello.pid, signal.SIGKILL)
    wait_until(lambda: len(nodes.lost()) == len(nodes._links), "the agents are lost")
    for name, size in files:
        write_tree(seen.run_dir, {name: "x" * size})
    nodes.close()
    assert read.record(folder).status == states.FAILED  # because no process holds its lock
    return seen.run_dir


@pytest.fixture
def next_run(tmp_path):
    """Another run of the workspace, which lives."""
    folder, fd = make_run(tmp_path / "ws/runs", run_id="next_1")
    for path in (folder.outputs, folder.checkpoints, folder.metrics, folder.logs):
        path.mkdir(exist_ok=True)
    yield folder
    os.close(fd)


@pytest.mark.promise("killed-agent-supervisor-leaves-node")
def test_next_run_fetches_and_removes_leftovers_of_a_killed_agent(make_nodes, run_folder, library, next_run, capfd):
    files = [("outputs/model", 3), ("checkpoints/step_2/w.pt", 5), ("attempts/1/rank_0.log", 7), ("outputs/same", 2)]
    write_tree(
        run_folder.path, {"attempts/1/rank_0.log": "x" * 4, "outputs/mine": "of another node", "outputs/same": ""}
    )
    left = left_behind(make_nodes(), run_folder, library, files=files)
    os.utime(left / "outputs/same", (1, 1))  # so the local file is newer
    nodes = make_nodes()
    seen = nodes.send(next_run, library)

    assert not left.exists()
    assert (run_folder.outputs / "model").read_text() == "xxx"
    assert (run_folder.checkpoints / "step_2/w.pt").read_text() == "xxxxx"
    assert (run_folder.path / "attempts/1/rank_0.log").read_text() == "xxxxxxx"
    assert (run_folder.outputs / "mine").read_text() == "of another node"
    assert (run_folder.outputs / "same").read_text() == ""
    assert f"removed {left} of run {run_folder.run_id}, which has ended; brought home 3 files" in capfd.readouterr().out
    assert "was brought home" in tags_and_properties.read(run_folder.notes).properties["fetched_later_node-0"]
    nodes.begin(1)
    assert run(nodes, seen, "echo mine > outputs/x") == 0
    nodes.fetch()
    assert (next_run.outputs / "x").read_text() == "mine\n"
    assert not (run_folder.outputs / "x").exists()


@pytest.mark.promise("killed-agent-supervisor-leaves-node")
def test_large_leftovers_are_named_by_the_next_run_and_fetched_by_prune(
    make_nodes, open_link, run_folder, library, next_run, tmp_path, capfd, monkeypatch
):
    left = left_behind(make_nodes(), run_folder, library)
    monkeypatch.setattr(copies, "_IN_PASSING_BYTES", 2)
    make_nodes().send(next_run, library)
    assert f"node-0: {left} of run {run_folder.run_id} stays, with 1 file (3 B) that only" in capfd.readouterr().out
    assert (left / "outputs/model").exists()

    link, top = open_link(), str(tmp_path / "node")
    (would,) = clear_node(link, top, tmp_path / "ws/runs", but="next_1", dry_run=True)
    assert (would.missing, would.missing_bytes, would.stays) == (("outputs/model",), 3, "")
    assert left.exists()
    assert list(clear_node(link, top, tmp_path / "ws/runs", but="next_1")) == [would]
    assert not left.exists()
    assert (run_folder.outputs / "model").read_text() == "xxx"


def test_leftovers_of_removed_runs_are_deleted_but_leftovers_of_other_workspaces_are_kept(
    make_nodes, open_link, run_folder, library, tmp_path
):
    left = left_behind(make_nodes(), run_folder, library)
    shutil.rmtree(run_folder.path)
    foreign = tmp_path / "node/runs/theirs_1"
    write_tree(foreign, {"state.json": "{}", ".nodes/x-0": "elsewhere:/ws/runs"})

    found = list(clear_node(open_link(), str(tmp_path / "node"), tmp_path / "ws/runs"))

    assert {one.run_id: one.is_foreign for one in found} == {run_folder.run_id: False, "theirs_1": True}
    assert not left.exists()
    assert foreign.exists()


def test_unfetchable_leftovers_stay_on_the_node(make_nodes, open_link, run_folder, library, tmp_path):
    left = left_behind(make_nodes(), run_folder, library)
    shutil.rmtree(run_folder.outputs)
    run_folder.outputs.write_text("a file in the way")

    (found,) = clear_node(open_link(), str(tmp_path / "node"), tmp_path / "ws/runs")

    assert found.stays
    assert (left / "outputs/model").exists()


def test_processes_left_by_a_killed_agent_are_ended_before_their_files_are_fetched(
    make_nodes, open_link, run_folder, library, tmp_path
):
    left = left_behind(make_nodes(), run_folder, library)
    orphan = subprocess.Popen(["sleep", "600"], env={"PACELINE_RUN_ID": run_folder.run_id})
    list(clear_node(open_link(), str(tmp_path / "node"), tmp_path / "ws/runs"))
    assert orphan.wait(120) == -signal.SIGKILL
    assert not left.exists()


def test_remote_shell_runs_a_command_on_another_node(make_nodes, run_folder, library):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    shell = shlex.join(seen.remote_shell)
    words = shlex.quote('echo "it\'s $PACELINE_RUN_ID"; exit 3')
    assert (
        run(nodes, seen, f"{shell} node-1 {words} && exit 9; test $? = 3 || exit 8; {shell} me@127.0.0.2 'exit 5'") == 5
    )
    wait_until(lambda: f"it's {run_folder.run_id}" in run_folder.driver_log.read_text(), "its output")
    assert run(nodes, seen, f"{shell} node-7 true") == 255
    assert "'node-7' is not a node of this run; its nodes are node-0, node-1." in run_folder.rank_log(1, 0).read_text()


def test_killed_remote_shell_ends_its_command(make_nodes, run_folder, library):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    text = f"exec {shlex.join(seen.remote_shell)} node-1 'echo $$ > pid; mv pid {seen.run_dir}/there; exec sleep 600'"
    started = nodes.start(command(seen, text), seen.run_dir, nodes.shell(0))
    wait_until((seen.run_dir / "there").exists, "the command")
    nodes.signal(started.pid, 0, signal.SIGKILL)
    pid = int((seen.run_dir / "there").read_text())
    wait_until(lambda: not processes.is_alive(pid), "its end")


def driver_log(folder) -> str:
    return folder.driver_log.read_text() if folder.driver_log.exists() else ""


def in_a_shell(seen, text: str, **environment: str) -> Command:
    """A script on the first node, which reaches the second by a shell that was made for it."""
    around = ("/usr/bin/env", "AROUND=yes", "/bin/sh", "-c")
    made = Command(argv=around, environment={"OWN": "its own"}, node_rank=1, log=seen.run_dir / "x")
    return dataclasses.replace(command(seen, text, **environment), shells=(made,))


def test_remote_shell_uses_the_nodes_own_interpreter(make_nodes, run_folder, library, tmp_path):
    # A container may lack the file of the node's own interpreter.
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    python = tmp_path / "the image's"
    python.write_text(f'#!/bin/sh\necho "$@" > {shlex.quote(str(tmp_path))}/ran\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shell = shlex.join(seen.remote_shell)
    text = f"{shell} node-1 'echo $AROUND, $OWN, $PACELINE_RUN_ID; exit 3'"
    nodes.start(in_a_shell(seen, text, **{REMOTE_SHELL_PYTHON: str(python)}), seen.run_dir, nodes.shell(0))
    assert ended(nodes)[0].exit_code == 3
    assert "paceline/remote/agent/rsh.py node-1 " in (tmp_path / "ran").read_text()
    wait_until(lambda: f"yes, its own, {run_folder.run_id}\n" in driver_log(run_folder), "its output")


def test_remote_command_that_ends_soon_after_its_killed_shell_gets_no_sighup(make_nodes, run_folder, library):
    # Regression: when mpirun ended, its remote podman commands got a SIGHUP. They sent signals to containers that were
    # being removed, and printed errors into the log.
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    hung_up = ""
    # Try five times: on a busy machine, the command may still run after 1 s, when the shell's end sends it a signal.
    for number in range(5):
        there = seen.run_dir / f"there_{number}"
        asked = f"trap 'echo hung up {number}' HUP; touch {there}; sleep 0.2; echo done {number}"
        text = f"exec {shlex.join(seen.remote_shell)} node-1 {shlex.quote(asked)}"
        started = nodes.start(in_a_shell(seen, text), seen.run_dir, nodes.shell(0))
        wait_until(there.exists, "the command")
        nodes.signal(started.pid, 0, signal.SIGKILL)
        wait_until(lambda end=f"done {number}": end in driver_log(run_folder), "its end")
        if (hung_up := f"hung up {number}") not in driver_log(run_folder):
            break
    assert hung_up not in driver_log(run_folder)


def test_nodes_are_released_even_if_one_is_lost(make_nodes, run_folder, library):
    given_back = []
    nodes = make_nodes(2, on_close=lambda: given_back.append(True))
    nodes.send(run_folder, library)
    os.kill(nodes._links[0].hello.pid, signal.SIGKILL)
    nodes.close()
    nodes.close()
    assert given_back == [True]


def test_damaged_snapshot_copy_is_sent_again(make_nodes, run_folder, library):
    first = make_nodes()
    seen = first.send(run_folder, library)
    (seen.run_dir / "snapshot/train.py").unlink()
    first.close()
    seen = make_nodes(links=None).send(run_folder, library)
    assert (Path(seen.run_dir) / "snapshot/train.py").exists()


def test_unresponsive_node_delays_only_the_first_of_many_process_checks(make_nodes, open_link, run_folder, library):
    nodes = make_nodes(links=[open_link(silence_s=30.0)])
    nodes.send(run_folder, library)
    link = nodes._links[0]
    os.kill(link.hello.pid, signal.SIGSTOP)
    try:
        assert nodes.is_alive(1, 0)
        assert link.is_stuck
        link.is_alive = None  # type: ignore[method-assign,assignment]
        assert all(nodes.is_alive(pid, 0) for pid in range(2, 50))
        assert nodes.signal(1, 0, signal.SIGTERM)
        assert nodes.lost() == {}
    finally:
        os.kill(link.hello.pid, signal.SIGCONT)
    wait_until(lambda: not link.is_stuck, "a sign of life")


def test_nodes_that_do_not_answer_are_missing_among_the_oom_kill_counts(make_nodes, monkeypatch):
    nodes = make_nodes(2)
    for link, counts in zip(nodes._links, ([7, 8, 8], [5, LinkError("no answer"), 5]), strict=True):
        monkeypatch.setattr(link, "answer", partial(_answered, _each(counts)))
    assert [nodes.oom_kills() for _ in range(3)] == [{0: 7, 1: 5}, {0: 8}, {0: 8, 1: 5}]
    monkeypatch.undo()


def _answered(give: Callable[[], int], pending: Pending, op: str, timeout_s: float) -> dict[str, int]:
    return {"found": give()}


def _each(values: list):
    left = iter(values)

    def give():
        value = next(left)
        if isinstance(value, Exception):
            raise value
        return value

    return give


def test_renewed_ports_of_a_run_differ_from_the_previous_ones(make_nodes):
    nodes = make_nodes(ports=3)
    before = nodes.ports
    nodes.renew_ports()
    assert (len(before), len(nodes.ports)) == (3, 3)
    assert before != nodes.ports


def test_files_written_outside_the_outputs_folder_are_fetched_when_the_nodes_are_closed(
    make_nodes, run_folder, library
):
    """They went with the node's copy of the run's folder."""
    nodes = make_nodes()
    seen = nodes.send(run_folder, library)
    nodes.begin(1)
    copied = sorted(path.name for path in run_folder.snapshot.resolve().iterdir())
    assert copied
    script = "mkdir work; cp -rp snapshot/. work; mkdir work/out; echo m > work/out/model.pt; echo o > outputs/o"
    assert run(nodes, seen, script) == 0
    nodes.fetch()
    assert not run_folder.work.exists()
    nodes.close()
    assert [str(path.relative_to(run_folder.work)) for path in sorted(run_folder.work.rglob("*"))] == [
        "out",
        "out/model.pt",
    ]
    assert (run_folder.outputs / "o").read_text() == "o\n"
    assert not seen.run_dir.exists()


@pytest.mark.promise("machines-do-see-project-data")
def test_data_outside_the_snapshot_is_sent_to_a_node_again_only_if_changed(make_nodes, run_folder, library, tmp_path):
    source = write_tree(tmp_path / "code", {"data/x.txt": "one", "data/deep/y.txt": "two"})
    told = json.loads(run_folder.job.read_text())
    write_json(run_folder.job, told | {"source_directory": str(source), "job": make_job().to_json()})
    data = NotCopied(path="data", why="ignored", is_linked=True, is_folder=True, is_sent=True)
    linked.write(run_folder.linked, [data])
    seen = []
    for text in ("one", "one", "changed"):
        (source / "data/x.txt").write_text(text)
        nodes = make_nodes()
        nodes.send(run_folder, library)
        nodes.close()
        seen.append({path.name: path.stat().st_ino for path in (tmp_path / "node/carried").iterdir()})
    first, second, third = seen
    assert len(first) == 1
    assert first == second
    assert second.items() < third.items()
    assert len(third) == 2


def test_start_all_starts_commands_on_all_nodes_and_returns_an_error_for_each_missing_program(
    make_nodes, run_folder, library, tmp_path
):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    log = seen.run_dir / "logs/rank_0.log"
    commands = [
        Command(
            argv=argv, environment={"ONLY": str(number), "SAME": "x"}, node_rank=number % 2, ranks=(number,), log=log
        )
        for number, argv in enumerate([("sh", "-c", "echo $SAME $ONLY >> out"), ("none-such",)] * 2)
    ]
    found = nodes.start_all(commands, tmp_path, {0: {"PATH": "/bin:/usr/bin"}, 1: {"PATH": "/bin"}})
    assert [getattr(one, "command", None) for one in found] == [commands[0], None, commands[2], None]
    assert all(isinstance(one, FileNotFoundError) for one in found[1::2])
    ended: list[int] = []
    while len(ended) < 2:
        ended += [one.exit_code for one in nodes.ended()]
    assert ended == [0, 0]
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["x 0", "x 2"]
