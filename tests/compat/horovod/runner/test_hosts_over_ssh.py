"""`horovodrun` on two machines: this one in a network of its own, and one more on the same kernel, reached by ssh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.system import processes
from tests.engines.conftest import require_engine
from tests.engines.lab import WHEEL, find_mpirun

TWO_HOSTS = Path(__file__).with_name("two_hosts.sh")
APART = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"]

SUM = """
import socket
import numpy
from paceline import collectives

engine = collectives.start()
total = engine.allreduce("x", numpy.full(3, engine.rank + 1.0)).wait()
print(socket.gethostname(), engine.rank, engine.local_rank, engine.cross_rank, total[0], flush=True)
collectives.stop()
"""

# This script fails without a collective. Over Gloo, a collective would load torch first.
FAIL = """
import os, time

if os.environ["HOROVOD_RANK"] == "1":
    raise ValueError("mine")
time.sleep(600)
"""


def has_hosts() -> bool:
    """Whether networks can be made here, and ssh be served."""
    programs = all(shutil.which(name) for name in ("unshare", "ip", "ssh", "ssh-keygen", "/usr/sbin/sshd"))
    return programs and subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


def on_two_hosts(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`horovodrun` with these words, on the first of two hosts; its exit code and output."""
    keys = folder / "keys"
    keys.mkdir()
    program = [
        sys.executable,
        "-m",
        "paceline.compat.horovod.runner.launch",
        "-p",
        "2222",
        "-i",
        str(keys / "id"),
        *words,
    ]
    found = find_mpirun(WHEEL)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PACELINE_MPIRUN": found} if found else {})}
    # Find processes by this variable and not by their parent, because other tests may start processes at any time.
    mark = ("TEST_ON_TWO_HOSTS", str(folder))
    done = subprocess.run(
        [*APART, "bash", str(TWO_HOSTS), str(keys), *program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict([*environment.items(), mark]),
    )
    assert processes.belonging(*mark) == []
    return done


@pytest.fixture(autouse=True)
def hosts() -> None:
    require_engine("namespaces of its own, ssh and sshd", has_hosts())


# Over Gloo each rank loads torch, so run one rank on each host. test_hosts.py covers the local rank of a second rank on a host.
@pytest.mark.parametrize(("transport", "here", "there"), [("--mpi", "localhost", 2), ("--gloo", "10.78.0.1", 1)])
def test_ranks_on_two_hosts_reduce_together(tmp_path, transport, here, there):
    require_engine(WHEEL, find_mpirun(WHEEL))
    (tmp_path / "train.py").write_text(SUM)
    hosts = f"{here}:1,10.78.0.2:{there}"
    done = on_two_hosts(tmp_path, transport, "-np", str(1 + there), "-H", hosts, sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    places = ["paceline-one 0 0 0", "paceline-two 1 0 1", "paceline-two 2 1 0"][: 1 + there]
    total = {1: "3.0", 2: "6.0"}[there]
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}]<stdout>:{place} {total}" for rank, place in enumerate(places)
    ]


def test_failed_rank_on_another_host_is_named_with_the_host(tmp_path):
    (tmp_path / "train.py").write_text(FAIL)
    words = ["-np", "2", "-H", "localhost:1,10.78.0.2:1", sys.executable, "train.py"]
    done = on_two_hosts(tmp_path, "--gloo", *words)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "horovodrun: rank 1 on paceline-two failed first: ValueError: mine"


ELASTIC = """
import os, signal, socket
import horovod.torch as hvd

hvd.init()
state = hvd.elastic.TorchState(batch=0, seen=[])

@hvd.elastic.run
def train(state):
    while state.batch < 4:
        if state.batch == 2 and socket.gethostname() == "paceline-two":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        state.seen = [*state.seen, hvd.allgather_object(hvd.rank())]
        state.batch += 1
        state.commit()

train(state)
print(socket.gethostname(), hvd.size(), state.seen, flush=True)
"""


@pytest.mark.promise("elastic-job-goes-last-commit")
def test_elastic_job_continues_without_a_lost_host(tmp_path):
    (tmp_path / "train.py").write_text(ELASTIC)
    words = ["-np", "2", "--min-np", "1", "-H", "10.78.0.2:1,localhost:1", sys.executable, "train.py"]
    done = on_two_hosts(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    # The lost host had rank 0. The remaining ranks have the training state too.
    assert done.stdout.splitlines() == ["[0]<stdout>:paceline-one 1 [[0, 1], [0, 1], [0], [0]]"]
    assert "is gone" in done.stderr


def test_host_that_refuses_the_ssh_connection_is_reported_with_the_ssh_error(tmp_path):
    done = on_two_hosts(tmp_path, "-p", "9", "--gloo", "-np", "2", "-H", "localhost:1,10.78.0.2:1", "true")
    assert done.returncode == 1
    assert "rank 1 on 10.78.0.2 could not be started: ssh ended with exit code 255" in done.stderr
    assert re.search("Connection refused", done.stderr)
