"""A Slurm cluster for tests: its controller on this machine, and a slurmd on each of a few `Hosts`.

    this machine    munged, slurmctld, and with accounting: mariadbd, slurmdbd
    pb0, pb1, ...   slurmd

Everything runs in the foreground as a child of the test, dies with it, and has its files in the hosts' folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.engines import hosts as hosts_module
from tests.engines.daemons import Daemons
from tests.engines.hosts import Hosts
from tests.helpers import free_port

_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
_NEEDED_FOR_ACCOUNTING = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb", "mariadb-install-db")
_WAIT_S = 120.0
#: Seconds without an answer after which Slurm marks a node as down. The default is 300.
_SLURMD_S = 6


def missing(*, accounting: bool = False) -> str | None:
    """Return what this machine lacks for a cluster, in words; None if nothing is missing."""
    needed = (*_NEEDED, *(_NEEDED_FOR_ACCOUNTING if accounting else ()))
    lacking = [name for name in needed if _find(name) is None]
    if lacking:
        return f"the program{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}"
    if not Path("/sys/fs/cgroup").is_mount():
        return "a mounted /sys/fs/cgroup, without which slurmd does not start"
    return hosts_module.missing()


class SlurmLab:
    """A cluster that is up. environment: variables for its programs."""

    def __init__(self, hosts: Hosts, *, accounting: bool = False, cores: int = 4, settings: str = "") -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "slurm"
        self.environment: dict[str, str] = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._accounting = accounting
        self._port, self._dbd_port = free_port(), free_port()
        for name in ("log", "state", "munge", "spool"):
            (self.folder / name).mkdir(parents=True)
        self._daemons = Daemons(self.folder / "log", limit_s=_WAIT_S, environment=self.environment)
        (self.folder / "munge").chmod(0o711)
        conf = self._conf(cores) + settings
        (self.folder / "slurm.conf").write_text(conf)
        # With this configuration, Slurm's programs wait only 2 s for a controller that does not answer.
        (self.folder / "impatient.conf").write_text(conf.replace("MessageTimeout=10", "MessageTimeout=2"))
        # Any two device files can stand for GPUs. Slurm counts them, assigns them and passes their numbers to jobs.
        names = ",".join(hosts.names)
        (self.folder / "gres.conf").write_text(
            f"NodeName={names} Name=gpu File=/dev/null\nNodeName={names} Name=gpu File=/dev/zero\n"
        )

    def __enter__(self) -> SlurmLab:
        try:
            self._start_munge()
            if self._accounting:
                self._start_accounting()
            self.start_controller(is_first=True)
            for name in self.hosts.names:
                self.start_node(name)
            self.wait_for_nodes("idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Cancel jobs first, because a slurmstepd process outlives its slurmd.
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self.run("scancel", "--user=root", check=False, timeout=60)
        self._daemons.stop_all()

    # Run Slurm's programs

    def run(self, *argv: str, check: bool = True, timeout: float = 60, cwd: str | None = None) -> str:
        """What one of Slurm's programs prints."""
        done = subprocess.run(
            argv,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            cwd=cwd,
        )
        assert done.returncode == 0 or not check, f"{argv}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Job number -> state, of all that squeue lists."""
        lines = self.run("squeue", "-h", "-t", "all", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def settle(self) -> None:
        """End all jobs and wait until their nodes are free."""
        self.run("scancel", "--user=root", check=False)
        self._daemons.until(lambda: not self.run("squeue", "-h").strip(), "all jobs have ended")
        self.wait_for_nodes("idle")

    def wait_for_nodes(self, state: str) -> None:
        self._daemons.until(
            lambda: (
                {line.strip() for line in self.run("sinfo", "-h", "-N", "-o", "%T", check=False).splitlines()}
                == {state}
            ),
            f"all nodes are {state}",
            lambda: self.run("sinfo", check=False),
        )

    @property
    def impatient(self) -> dict[str, str]:
        """What Slurm's programs need that are to notice at once that there is no controller."""
        return {"SLURM_CONF": str(self.folder / "impatient.conf")}

    def told(self) -> str:
        """Return the last output of its programs, and its list of nodes and jobs; short, as reports are cut off."""
        logs = [self._daemons.tail(name, 3000) for name in ("slurmctld.log", "slurmd*.log")]
        asked = (
            ["scontrol", "-o", "show", "node"],
            ["squeue", "-t", "all", "-o", "%i %T %r %R begins=%S nodes=%N"],
        )
        answers = [self.run(*argv, check=False, timeout=60) for argv in asked]
        return "\n".join([*logs, *answers])

    # Simulate faults

    def stop_controller(self) -> None:
        self._daemons.stop("slurmctld")

    def start_controller(self, *, is_first: bool = False) -> None:
        self._daemons.start("slurmctld", [_find("slurmctld") or "", "-D", *(["-c"] if is_first else [])])
        if is_first:
            return
        self._daemons.until(lambda: "UP" in self.run("scontrol", "ping", check=False), "the controller answers")

    def start_node(self, name: str) -> None:
        for part in ("spool", "tmp"):
            (self.folder / part / name).mkdir(parents=True, exist_ok=True)
        self._daemons.start(
            f"slurmd-{name}", self.hosts.words(name, ["env", *self._words(), _find("slurmd") or "", "-D", "-N", name])
        )

    def kill_node(self, name: str) -> None:
        """Let the host crash, all that runs on it at once."""
        self.hosts.kill(name)
        self._daemons.stop(f"slurmd-{name}")

    def boot_node(self, name: str) -> None:
        self.hosts.boot(name)
        # A job that has ended while the node was off is COMPLETING until Slurm marks the node as down. If the node
        # returned before that, Slurm would repeat its request to end the job only after a minute.
        self._daemons.until(lambda: self._is_down(name), f"Slurm has noticed that {name} is lost")
        # Slurm repeats undelivered messages for some seconds, for example a message to end a job's step. Wait until no
        # message is left: if the job has started again, the message would end the new step.
        self._daemons.until(
            lambda: re.search(r"Agent count:\s+0\n", self.run("sdiag", check=False)), "Slurm waits for no node"
        )
        # With ReturnToService=2, Slurm uses the node again as soon as its slurmd registers.
        self.start_node(name)

    def _is_down(self, name: str) -> bool:
        return self.run("sinfo", "-h", "-N", "-n", name, "-o", "%t", check=False).startswith("down")

    def _words(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.environment.items()]

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o400)
        names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        self._daemons.start("munged", [_find("munged") or "", "--force", "--foreground", *options])
        self._daemons.until((folder / "sock").exists, "munged is there")

    def _start_accounting(self) -> None:
        data, run = self.folder / "db", self.folder / "dbrun"
        for path in (data, run):
            path.mkdir()
            shutil.chown(path, "mysql")
        # The MySQL user may not have access to the tests' TMPDIR.
        environment = {**os.environ, "TMPDIR": str(run)}
        with (self.folder / "log" / "install-db").open("wb") as log:
            subprocess.run(
                ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}", "--skip-test-db"],
                env=environment,
                stdout=log,
                stderr=log,
                check=True,
            )
        port = free_port()
        self._daemons.start(
            "mariadbd",
            [
                *(_find("mariadbd") or "", "--no-defaults", "--user=mysql", f"--datadir={data}", f"--socket={run}/s"),
                *(f"--pid-file={run}/pid", "--bind-address=127.0.0.1", f"--port={port}"),
                *(f"--tmpdir={run}", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"),
            ],
        )
        client = ["mariadb", "--no-defaults", "-S", f"{run}/s", "-e"]
        self._daemons.until(lambda: _succeeds([*client, "select 1"]), "the database answers")
        grants = "".join(
            f"create user slurm@'{host}' identified by 'x'; grant all on slurm_acct.* to slurm@'{host}';"
            for host in ("127.0.0.1", "localhost")
        )
        subprocess.run([*client, f"create database slurm_acct; {grants}"], check=True)
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={self.folder}/munge/sock\nDbdHost={socket.gethostname()}\n"
            f"DbdAddr=127.0.0.1\nDbdPort={self._dbd_port}\nSlurmUser=root\nStorageType=accounting_storage/mysql\n"
            f"StorageHost=127.0.0.1\nStoragePort={port}\nStorageUser=slurm\nStoragePass=x\nStorageLoc=slurm_acct\n"
            f"LogFile={self.folder}/log/slurmdbd.log\nPidFile={self.folder}/log/slurmdbd.pid\n"
        )
        conf.chmod(0o600)
        self._daemons.start("slurmdbd", [_find("slurmdbd") or "", "-D"])
        # slurmctld does not start unless slurmdbd answers.
        command = ["sacctmgr", "-n", "list", "cluster"]
        self._daemons.until(lambda: _succeeds(command, {**os.environ, **self.environment}), "slurmdbd answers")

    def _conf(self, cores: int) -> str:
        folder, hosts = self.folder, self.hosts
        nodes = "".join(
            f"NodeName={name} NodeAddr={hosts.addresses[name]} CPUs={cores} RealMemory=4000 Gres=gpu:2 State=UNKNOWN\n"
            for name in hosts.names
        )
        accounting = (
            f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
            f"AccountingStoragePort={self._dbd_port}\nAccountingStoragePass={folder}/munge/sock\n"
            if self._accounting
            else "AccountingStorageType=accounting_storage/none\n"
        )
        return (
            f"ClusterName=lab\nSlurmctldHost={socket.gethostname()}({hosts.own_address})\nSlurmctldPort={self._port}\n"
            "SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nCredType=cred/munge\n"
            # A requeued job waits until its credential expires, which takes two minutes by default.
            f"AuthInfo=socket={folder}/munge/sock,cred_expire=5\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n\n"
            # All nodes share /tmp, where each node would create PMIx's sockets under the same names.
            f"TmpFS={folder}/tmp/%n\n"
            f"SlurmctldPidFile={folder}/log/slurmctld.pid\nSlurmdPidFile={folder}/log/slurmd-%n.pid\n"
            f"SlurmctldLogFile={folder}/log/slurmctld.log\nSlurmdLogFile={folder}/log/slurmd-%n.log\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU_Memory\nDefMemPerCPU=500\nMpiDefault=none\nGresTypes=gpu\n"
            f"SwitchType=switch/none\nReturnToService=2\nSlurmdTimeout={_SLURMD_S}\nSlurmctldTimeout=30\nKillWait=15\n"
            "InactiveLimit=0\nJobRequeue=1\nSchedulerType=sched/backfill\n"
            "SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=0\n"
            "SlurmdParameters=config_overrides\nMessageTimeout=10\nOverTimeLimit=0\n"
            "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
            f"{accounting}{nodes}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
            "PartitionName=short Nodes=ALL MaxTime=60 State=UP\n"
            # Jobs of this partition preempt jobs of the other partitions.
            "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP\n"
        )


@contextlib.contextmanager
def cluster(prefix: str, count: int = 2, **options: object) -> Iterator[SlurmLab]:
    """A cluster of `count` nodes that see this machine's files, and its end."""
    with Hosts(prefix, private=()).up(count) as hosts, SlurmLab(hosts, **options) as lab:  # type: ignore[arg-type]
        yield lab


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _succeeds(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    done = subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0
