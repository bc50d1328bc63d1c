"""What the processes of a run on one machine listen on: nothing that another machine could reach."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from paceline.system import processes
from tests.engines.conftest import require_engine
from tests.engines.lab import Lab
from tests.helpers import wait_until

_LISTEN = "0A"
_MAPPED = ipaddress.ip_address("::ffff:127.0.0.1")

#: This script uses Horovod and a torch process group, for which torch creates the store.
SCRIPT = """
import os, sys, time
import horovod.torch as hvd, torch
import torch.distributed as dist
dist.init_process_group({backend!r})
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
dist.barrier()
with open(f"{{sys.argv[1]}}/told{{hvd.rank()}}", "w") as told: told.write(str(os.getpid()))
os.rename(told.name, f"{{sys.argv[1]}}/ready{{hvd.rank()}}")
while not os.path.exists(f"{{sys.argv[1]}}/go"): time.sleep(0.02)
dist.destroy_process_group()
"""


def listening(pids: list[int]) -> dict[str, set[str]]:
    """Address -> the programs among these processes that listen there, from the kernel's own tables."""
    found: dict[str, set[str]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            sockets = _sockets(pid)
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # the file was closed meanwhile
                    link = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if link in sockets:
                        found.setdefault(sockets[link], set()).add(name)
    return found


def _sockets(pid: int) -> dict[str, str]:
    """Those that listen in the network of a process -> their addresses."""
    sockets = {}
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                # The kernel prints the address as 32-bit words in the machine's byte order.
                raw = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(
                    raw[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, size, 4)
                )
                sockets[f"socket:[{fields[9]}]"] = str(ipaddress.ip_address(packed))
    return sockets


def open_to_others(pids: list[int]) -> dict[str, set[str]]:
    return {
        address: names
        for address, names in listening(pids).items()
        if not ipaddress.ip_address(address).is_loopback and ipaddress.ip_address(address) != _MAPPED
    }


def test_function_open_to_others_omits_loopback_addresses_that_function_listening_returns() -> None:
    with socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0)):
        assert listening([os.getpid()]).keys() >= {"0.0.0.0", "127.0.0.1"}
        assert open_to_others([os.getpid()]).keys() == {"0.0.0.0"}


@pytest.fixture(autouse=True)
def engines(any_mpirun: str) -> None:
    require_engine("torch", importlib.util.find_spec("torch"))


@pytest.mark.promise("run-machine-listens-loopback-alone")
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_run_on_this_machine_listens_on_loopback_alone(
    lab: Lab, tmp_path: Path, backend: str, torch_at_hand: None
) -> None:
    # Regression: torch's store and the ranks of Open MPI listened on every address of the machine.
    run = lab.submit(
        SCRIPT.format(backend=backend),
        distributed_backend=backend,
        process_count_per_node=2,
        script_params={str(tmp_path): ""},
    )
    seen = _looked_at(tmp_path, lambda: processes.belonging("PACELINE_RUN_ID", run.id), lambda: run.status == "Failed")
    run.wait_for_completion()
    # Only mpirun's own port listens on all addresses, because that can't be restricted (docs/security.md).
    assert {name for names in seen.values() for name in names} <= {"mpirun", "prterun"}, seen
    assert seen == {} or backend == "mpi"


@pytest.mark.promise("run-machine-listens-loopback-alone")
@pytest.mark.parametrize("transport", ["--gloo", "--mpi"])
def test_horovodrun_on_this_machine_listens_on_loopback_alone(
    tmp_path: Path, transport: str, python_with_torch: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(backend="gloo"))
    program = Path(sysconfig.get_path("scripts")) / "horovodrun"
    python = python_with_torch
    command = [python, program, "-np", "2", transport, python, script, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            seen = _looked_at(
                tmp_path, lambda: [process.pid, *processes.descendants(process.pid)], lambda: process.poll() is not None
            )
        finally:
            (tmp_path / "go").touch()
            output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert {name for names in seen.values() for name in names} <= {"mpirun", "prterun"}, seen


def _looked_at(folder: Path, pids: Any, is_over: Any) -> dict[str, set[str]]:
    def are_ready() -> bool:
        return all((folder / f"ready{rank}").exists() for rank in range(2))

    wait_until(lambda: are_ready() or is_over(), "the ranks to be ready", 240)
    try:
        if not are_ready():
            return {}  # the run has failed, which the caller checks
        # The ranks report their pids themselves, because some ranks are not descendants of the launcher.
        ranks = [int((folder / f"ready{rank}").read_text()) for rank in range(2)]
        return open_to_others([*pids(), *ranks])
    finally:
        (folder / "go").touch()
