from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest

from paceline import checkpoint
from paceline.checkpoint import files, saving
from paceline.errors import CheckpointError, UserError
from tests.helpers import free_port
from tests.late import late
from tests.warm import program

np = late("numpy")


def steps(folder):
    return sorted(files.whole(files.parts_in(folder)))


def test_checkpoint_save_with_every_10_and_keep_2_saves_each_tenth_step_and_keeps_two_newest_files(tmp_path):
    asked = []

    def state():
        asked.append(1)
        return {"n": len(asked)}

    done = [checkpoint.save(state, step, every=10, keep=2, folder=tmp_path) for step in range(51)]
    assert [step for step, is_saved in enumerate(done) if is_saved] == [0, 10, 20, 30, 40, 50]
    checkpoint.wait()
    assert steps(tmp_path) == [40, 50]
    assert checkpoint.latest(tmp_path).state == {"n": 6}
    assert len(asked) == 6, "it is called when something is written, and not otherwise"


def test_saving_a_step_again_replaces_its_state(tmp_path):
    for value in (1, 2):
        assert checkpoint.save({"value": value}, 0, folder=tmp_path)
    assert checkpoint.latest(tmp_path).state == {"value": 2}


def test_saving_lower_steps_than_existing_checkpoints_warns_once(tmp_path, caplog):
    for step in (100, 200):
        checkpoint.save(1, step, keep=2, folder=tmp_path)
    assert caplog.text == ""
    for step in (1, 2, 3):
        checkpoint.save(1, step, keep=2, folder=tmp_path)
    checkpoint.wait()
    assert steps(tmp_path) == [3, 100, 200]
    (said,) = (record.message for record in caplog.records)
    assert said.startswith(
        f"the checkpoint of step 1 is older than that of step 200, which {str(tmp_path)!r} has already"
    )


def test_checkpoint_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for call in (lambda folder: checkpoint.save(1, 1, folder=folder), checkpoint.latest):
        with pytest.raises(UserError, match=r"file' is a file. Name a folder"):
            call(tmp_path / "file")


def test_checkpoint_save_outside_a_run_writes_to_the_folder_named_checkpoints_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(1, 1)
    assert checkpoint.latest().state == 1
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_1.safetensors"]
    monkeypatch.setenv("PACELINE_CHECKPOINT_DIR", str(tmp_path / "run"))
    assert checkpoint.latest() is None


def test_only_rank_0_writes_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert checkpoint.save(1, 1, folder=tmp_path) is False
    monkeypatch.setenv("RANK", "0")
    assert checkpoint.save(1, 1, folder=tmp_path) is True
    assert checkpoint.latest(tmp_path).state == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [({"step": -1}, "step=-1"), ({"step": 1.5}, "step=1.5"), ({"every": 0}, "every=0"), ({"keep": True}, "keep=True")],
)
def test_checkpoint_save_refuses_an_invalid_value_of_step_every_or_keep(tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        checkpoint.save(1, **({"step": 1, "folder": tmp_path} | given))
    assert os.listdir(tmp_path) == []


def test_checkpoint_wait_raises_the_error_of_a_failed_background_save_and_keeps_the_older_file(
    tmp_path, monkeypatch, caplog
):
    checkpoint.save(1, 1, folder=tmp_path)
    checkpoint.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        checkpoint.save(2, 2, folder=tmp_path)
        with pytest.raises(CheckpointError, match=r"checkpoint_2.*No space left on device"):
            checkpoint.wait()
    assert "checkpoint_2" in caplog.text
    assert os.listdir(tmp_path) == ["checkpoint_1.safetensors"]
    assert checkpoint.save(2, 2, folder=tmp_path)
    assert checkpoint.latest(tmp_path).state == 2


def test_training_continues_during_a_background_save(tmp_path, monkeypatch):
    go_on, write = threading.Event(), files.write_image
    monkeypatch.setattr(files, "write_image", lambda *given: (go_on.wait(60), write(*given)))
    state = {"x": np.zeros(3), "list": [1]}
    checkpoint.save(state, 1, folder=tmp_path)
    assert steps(tmp_path) == []
    state["x"] += 1
    state["list"].append(2)
    go_on.set()
    found = checkpoint.latest(tmp_path).state
    assert (found["x"].tolist(), found["list"]) == ([0, 0, 0], [1])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_checkpoint_save_on_a_full_disk_does_not_end_the_training(tmp_path, asynchronous, caplog):
    """A limit on the size of files stands for the disk."""
    state, before = {"x": np.zeros(100_000)}, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(step):
        return checkpoint.save(state, step, every=1, folder=tmp_path, asynchronous=asynchronous)

    assert save(1)
    checkpoint.latest(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        saved = [save(2), save(3)]
        assert checkpoint.latest(tmp_path).step == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    # A save in the background returns True, because it fails only later. A synchronous save returns False.
    assert saved == [asynchronous] * 2
    assert [name in caplog.text for name in ("checkpoint_2", "checkpoint_3")] == [True, True]
    assert "File too large" in caplog.text
    assert os.listdir(tmp_path) == ["checkpoint_1.safetensors"]
    assert save(4)
    assert checkpoint.latest(tmp_path).step == 4


def test_checkpoint_save_with_asynchronous_false_raises_checkpoint_error_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(1, 1, folder=tmp_path, asynchronous=False)


def test_saves_are_skipped_while_a_disk_hangs(tmp_path, monkeypatch, caplog):
    answers, begun, write = threading.Event(), threading.Event(), files.write_image

    def hangs(*given):
        begun.set()
        answers.wait(120)
        write(*given)

    monkeypatch.setattr(files, "write_image", hangs)
    monkeypatch.setattr(saving, "SAVE_S", 0.05)
    assert checkpoint.save(1, 1, folder=tmp_path)
    assert begun.wait(60)
    assert [checkpoint.save(step, step, folder=tmp_path) for step in (2, 3)] == [False, False]
    assert caplog.text.count("it hangs") == 1
    assert "'checkpoint_3.safetensors' is left out" in caplog.text
    answers.set()
    checkpoint.wait()
    assert checkpoint.save(4, 4, folder=tmp_path)
    checkpoint.wait()
    assert steps(tmp_path) == [1, 4]


#: Read this variable on import, because a fixture later removes it from the environment.
KILLS = int(os.environ.get("PACELINE_CHECKPOINT_KILLS", "4"))
KILLED = """
import sys
import numpy as np
from paceline import checkpoint
from paceline.checkpoint import image
image._LEAST_FORKED, image._MOST_TIMES = 0, 1 << 40
x = np.zeros(1 << 20)
for step in range(1, 1_000_000):
    x += 1
    checkpoint.save({"x": x}, step, folder=sys.argv[1], keep=2)
"""


@pytest.mark.promise("save-latest-let-script-go")
def test_kills_at_random_moments_leave_a_complete_checkpoint(tmp_path):
    """Of the training, or of the process that copies the state for it."""
    random = Random(7)
    for _ in range(KILLS):
        training = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stderr=subprocess.DEVNULL)
        try:
            while not steps(tmp_path):
                assert training.poll() is None
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.5))
            if random.random() < 0.3:
                # The child may end before the signal, which is as good as a kill.
                for child in Path(f"/proc/{training.pid}/task/{training.pid}/children").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(child), signal.SIGKILL)
                time.sleep(random.uniform(0, 0.3))
        finally:
            training.kill()
            training.wait()
        found = checkpoint.latest(tmp_path)
        assert set(found.state["x"].tolist()) == {float(found.step)}
        shutil.rmtree(tmp_path)


@pytest.mark.promise("save-latest-let-script-go")
@pytest.mark.parametrize("moment", ["fcntl.flock", "os.fsync", "os.rename"])
def test_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path, moment, monkeypatch):
    program = f"""
import fcntl, os, signal
from paceline import checkpoint
checkpoint.save({{"x": 1}}, 1, folder={str(tmp_path)!r}, keep=1)
checkpoint.wait()
{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save({{"x": 2}}, 2, folder={str(tmp_path)!r}, keep=1)
checkpoint.wait()
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=240).returncode == -signal.SIGKILL
    found = checkpoint.latest(tmp_path)
    assert (found.step, found.state) == (1, {"x": 1})
    assert len(os.listdir(tmp_path)) == 2
    monkeypatch.setattr(files, "LOCKED_WITHIN_S", 600)
    checkpoint.save({"x": 2}, 2, folder=tmp_path, keep=1, asynchronous=False)
    # The first program may be killed after it has created its file and before it has locked it. Other programs then
    # keep this file for LOCKED_WITHIN_S seconds, because it may belong to a living program.
    assert len(os.listdir(tmp_path)) == 1 + (moment == "fcntl.flock")


def test_save_at_program_exit_is_complete(tmp_path):
    program = f"""
from paceline import checkpoint
import sys
checkpoint.save({{"x": b"1" * 3_000_000}}, 1, folder={str(tmp_path)!r})
assert not {{"torch", "numpy"}} & set(sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=240).returncode == 0
    assert steps(tmp_path) == [1]


@pytest.mark.promise("sigterm-before-time-limit-more")
def test_only_the_first_save_shortly_before_the_time_limit_ignores_the_parameter_every(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_END_TIME", "10")
    done = [checkpoint.save(1, step, every=1000, folder=tmp_path) for step in (1, 2)]
    assert done == [True, False]
    assert steps(tmp_path) == [1]


RANKS = """
import os, signal, sys, time
import torch, torch.distributed as dist
from paceline import checkpoint
rank, parts = int(os.environ["RANK"]), sys.argv[2] == "parts"
dist.init_process_group("gloo")
for step in range(1, 100_000):
    dist.all_reduce(torch.ones(1))
    if step == 3 and rank == 0:
        print("ready", flush=True)
    if rank == 0:
        time.sleep(0.01)  # in which rank 1 waits for it
    checkpoint.save({"rank": rank, "step": step}, step, every=50_000, parts=parts, folder=sys.argv[1])
"""


@pytest.mark.promise("sigterm-before-time-limit-more")
def test_ranks_requested_to_end_leave_one_checkpoint_without_deadlock(tmp_path):
    """Rank 1 waits in a collective, where no handler runs, when rank 0 has saved and is gone."""
    (tmp_path / "program.py").write_text(RANKS)
    modes = ("whole", "parts")
    ranks = [rank for mode in modes for rank in start_ranks(tmp_path, mode)]
    try:
        for _, output in ranks[::2]:
            assert output.readline() == b"ready\n"
        # Stop all ranks before the signal, so that all get it at once. A rank that ends early would make the other rank fail.
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            for process, _ in ranks:
                process.send(number)
        assert [process.wait(120) for process, _ in ranks] == [-signal.SIGTERM] * 4
    finally:
        end(ranks)
    for mode, count in zip(modes, (1, 2), strict=True):
        [(step, members)] = files.whole(files.parts_in(tmp_path / mode)).items()
        found = checkpoint.Checkpoint(step, tuple(tmp_path / mode / part.name for part in members))
        assert list(found.parts) == [{"rank": rank, "step": step} for rank in range(count)]


WAITS = """
import os, signal, sys, time
import torch, torch.distributed as dist
from paceline import checkpoint
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
for step in range(1, 100_000):
    dist.all_reduce(torch.ones(1))
    print("ready", flush=True)
    if step == 3 and rank == 0:
        signal.pause()
    checkpoint.save({"step": step}, step, every=50_000, folder=sys.argv[1])
"""


def test_sigterm_ends_ranks_blocked_in_a_collective_with_one_complete_checkpoint(tmp_path):
    (tmp_path / "program.py").write_text(WAITS)
    ranks = start_ranks(tmp_path, "whole")
    try:
        for _, output in ranks:
            for _ in range(3):
                assert output.readline() == b"ready\n"
        # After 0.5 s rank 1 is usually inside the next collective. If it is not, the test still passes.
        time.sleep(0.5)
        for process, _ in reversed(ranks):
            process.send(signal.SIGTERM)
        assert [process.wait(120) for process, _ in ranks] == [-signal.SIGTERM] * 2
    finally:
        end(ranks)
    assert steps(tmp_path / "whole") == [3]


def start_ranks(folder, mode):
    """Start two ranks that have torch loaded. Return each with its output."""
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [
        start_rank(folder, mode, {**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"}) for rank in (0, 1)
    ]


def start_rank(folder, mode, environment):
    read, write = os.pipe()
    output = os.fdopen(read, "rb")
    process = program().start([str(folder / "program.py"), mode, mode], environment, write, folder, errors=2)
    os.close(write)
    return process, output


def end(ranks):
    for process, output in ranks:
        process.kill()
        output.close()
