"""Hosts on one machine: network namespaces with a name, an address, processes and folders of their own, and sshd.

                 switch (a namespace that holds nothing but the bridge)
    10.79.x.1 ───┤  ├─── pa0  10.79.x.10      each: own processes, hostname, /etc/hosts, /dev/shm, and own /tmp
    this machine │  ├─── pa1  10.79.x.11      (or what `private` names); all else is this machine's
                    └─── pa2  10.79.x.12

No namespace has a name or a file: each lives as long as the processes in it, and those get a SIGKILL when the process
that called `up` dies. So tests that are killed leave nothing but a folder, which the next `up` removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.system import processes

#: Each simulated host has a /tmp of its own, so this folder must be outside of /tmp.
_PARENT = Path("/var/tmp")
_NEEDED = ("ip", "nsenter", "unshare", "setpriv", "mount", "ssh", "ssh-keygen", "/usr/sbin/sshd")
_WAIT_S = 90.0
#: Variables of each SSH session. The hosts share this machine's cores, so waiting OpenMP threads must not spin.
_FOR_ALL = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


def missing() -> str | None:
    """Return what this machine lacks for hosts, in words; None if nothing is missing."""
    lacking = [name for name in _NEEDED if shutil.which(name) is None]
    if lacking:
        return f"the program{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"the right to make namespaces ({done.stderr.strip()})"


def apart(tests: Path) -> tuple[str, ...]:
    """Folders for `private` with which hosts see nothing that tests make: /tmp, and the tests' own folder where TMPDIR has led
    that elsewhere."""
    return ("/tmp",) if tests.is_relative_to("/tmp") else ("/tmp", str(tests))


class Hosts:
    """A few hosts, and this machine in the same network.

    prefix: names are `<prefix>0`, `<prefix>1`, ...; letters and digits, 6 of them at most.
    private: folders that each host has separately; `/tmp` itself is not among them if nodes have to see files
        in `tmp_path`.
    tmp_mib: the size of each host's /tmp, in memory; None: as large as the disk.
    environment: what sshd gives to each login, such as imaginary GPUs: {"PACELINE_GPUS": "0,1"}.
    """

    def __init__(
        self,
        prefix: str = "pa",
        *,
        private: Sequence[str] = ("/tmp",),
        tmp_mib: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.prefix = prefix
        self.private = tuple(private)
        self.tmp_mib = tmp_mib
        self.environment = dict(environment or {})
        self.names: tuple[str, ...] = ()
        self.addresses: dict[str, str] = {}
        #: A folder that all hosts and this machine see under the same path.
        self.folder = Path()
        #: This machine's address in the hosts' network.
        self.own_address = ""
        self._switch = 0
        self._outer: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}

    # Start and stop hosts

    def up(self, count: int) -> Hosts:
        """Start this many hosts; when it returns, each answers on port 22."""
        self.folder = _new_folder(self.prefix)
        with _one_at_a_time():
            network = _free_network()
            self.own_address = f"{network}.1"
            self._start_switch(network)
        self.names = tuple(f"{self.prefix}{index}" for index in range(count))
        self.addresses = {name: f"{network}.{10 + index}" for index, name in enumerate(self.names)}
        lines = ["127.0.0.1 localhost", f"{self.own_address} {socket.gethostname()}"]
        (self.folder / "hosts").write_text(
            "".join(f"{line}\n" for line in [*lines, *(f"{ip} {name}" for name, ip in self.addresses.items())])
        )
        self._write_ssh()
        try:
            for name in self.names:
                self._start(name)
            for name in self.names:
                self._wait(name)
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End all hosts and remove their folder. Harmless the second time."""
        for name in self.names:
            self.kill(name)
        if self._switch:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._switch, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._switch, 0)
            self._switch = 0
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # Simulate faults of hosts

    def kill(self, name: str) -> None:
        """Let a host crash: every process of it is gone at once."""
        outer = self._outer.pop(name, None)
        pid = self._pids.pop(name, 0)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if outer is not None:
            outer.kill()
            outer.wait()

    def boot(self, name: str, *, tmp_mib: int | None = None) -> None:
        """Start a host that was killed, with empty /dev/shm and its private folders; or with this size of /tmp."""
        assert name not in self._outer, f"{name} is up"
        self._start(name, tmp_mib)
        self._wait(name)

    def cut(self, name: str) -> None:
        """Pull the cable: the host's processes live, its packets vanish."""
        self._set_port(name, "down")

    def heal(self, name: str) -> None:
        """Put the cable back, and wait until the host answers."""
        self._set_port(name, "up")
        self._wait(name)

    @property
    def up_now(self) -> tuple[str, ...]:
        """Those that were not killed."""
        return tuple(self._outer)

    # Run commands on a host

    def words(self, name: str, argv: Sequence[str], cwd: str = "/") -> list[str]:
        """The command line by which `argv` runs on a host, as root."""
        return ["nsenter", "-t", str(self._pids[name]), "-n", "-u", "-m", "-p", f"--wdns={cwd}", "--", *argv]

    def run(
        self, name: str, argv: Sequence[str], *, cwd: str = "/", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """What a command did on a host; its output is text. Fails the test where it fails, unless check=False."""
        options = {
            "check": True,
            "timeout": 60,
            "capture_output": True,
            "text": True,
            "stdin": subprocess.DEVNULL,
        } | options
        done: subprocess.CompletedProcess[str] = subprocess.run(self.words(name, argv, cwd), **options)  # noqa: PLW1510
        return done

    def popen(self, name: str, argv: Sequence[str], *, cwd: str = "/", **options: Any) -> subprocess.Popen[Any]:
        """A command that runs on a host. It dies with the host, or when its caller ends it."""
        return subprocess.Popen(self.words(name, argv, cwd), **({"stdin": subprocess.DEVNULL} | options))

    def processes(self, name: str) -> dict[int, str]:
        """pid on this machine -> command line, of all that runs on a host but its own init, sshd and sleep."""
        found, own = {}, os.readlink(f"/proc/{self._pids[name]}/ns/pid")
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == own:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if command and not command.startswith(("bash /", "sshd: ", "/usr/sbin/sshd ", "sleep 31")):
                        found[int(entry.name)] = command
        return found

    # ssh from this machine or from a host

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: user, key, addresses and host keys of the hosts."""
        return self.folder / "ssh" / "config"

    @property
    def identity(self) -> Path:
        return self.folder / "ssh" / "id"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "ssh" / "known_hosts"

    def ssh_environment(self) -> Mapping[str, str]:
        """Return variables whose PATH begins with an `ssh` that reads `ssh_config`, for programs without such an option."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {shlex.quote(str(self.ssh_config))} "$@"\n')
        program.chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}"}

    def change_key(self, name: str) -> None:
        """Give a host another host key, unknown to all others, from its next start on."""
        key = self.folder / "ssh" / f"host_{name}"
        for path in (key, key.with_suffix(".pub")):
            path.unlink()
        _make_key(key)

    def _write_ssh(self) -> None:
        folder = self.folder / "ssh"
        folder.mkdir(mode=0o700)
        _make_key(self.identity)
        shutil.copy(self.identity.with_suffix(".pub"), folder / "authorized_keys")
        known, config = [], []
        for name, address in self.addresses.items():
            key = folder / f"host_{name}"
            _make_key(key)
            known.append(f"{name},{address} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}\n")
            config.append(f"Host {name}\n  HostName {address}\n")
        self.known_hosts.write_text("".join(known))
        config.append(
            "Match all\n  User root\n"
            f"  IdentityFile {self.identity}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
            "  BatchMode yes\n  ConnectTimeout 5\n  LogLevel ERROR\n"
        )
        for index, name in enumerate(self.names):
            # Look up a host's key by its name, not by its address.
            config[index] += f"  HostKeyAlias {name}\n"
        self.ssh_config.write_text("".join(config))
        self.ssh_config.chmod(0o600)

    # Network namespaces

    def _start_switch(self, network: str) -> None:
        switch = _spawn(["unshare", "--net", "sleep", "3153600"], self.folder / "switch.log")
        self._switch = switch.pid
        # Mark the process as ended for Popen, because `down` waits for it by its pid.
        switch.returncode = 0
        own = os.readlink("/proc/self/ns/net")
        _until(lambda: os.readlink(f"/proc/{switch.pid}/ns/net") != own, "the switch has its namespace")
        self._in_switch("link", "add", "br0", "type", "bridge")
        self._in_switch("link", "set", "br0", "up")
        link = self._link = f"{self.prefix}{network.rsplit('.', 1)[1]}r"
        _ip("link", "add", link, "type", "veth", "peer", "name", "root", "netns", str(switch.pid))
        self._in_switch("link", "set", "root", "master", "br0", "up")
        _ip("addr", "add", f"{self.own_address}/24", "dev", link)
        _ip("link", "set", link, "up")

    def _seen_by_all(self) -> list[Path]:
        """Return folders inside private ones that all hosts share: this checkout and its environment, in a clone below /tmp."""
        tops = {Path(__file__).resolve().parents[2], Path(sys.prefix).resolve()}
        apart = [top for top in tops if not any(top != other and top.is_relative_to(other) for other in tops)]
        return [top for top in apart if any(top.is_relative_to(private) for private in self.private)]

    def _start(self, name: str, tmp_mib: int | None = None) -> None:
        tmp_mib = tmp_mib or self.tmp_mib
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        mounts, kept = [], self._seen_by_all()
        for number, path in enumerate(kept):
            (folder / f"kept_{number}").mkdir(exist_ok=True)
            mounts.append(f"mount --rbind {shlex.quote(str(path))} {folder}/kept_{number}")
        for private in self.private:
            own = folder / private.strip("/").replace("/", "_")
            own.mkdir(exist_ok=True)
            own.chmod(0o1777 if private == "/tmp" else 0o755)
            mounts.append(f"mount --rbind {shlex.quote(str(own))} {shlex.quote(private)}")
        if tmp_mib is not None:
            mounts.append(f"mount -t tmpfs -o size={tmp_mib}m,mode=1777 tmp /tmp")
        for number, path in enumerate(kept):
            quoted = shlex.quote(str(path))
            mounts.append(f"mkdir -p {quoted}; mount --rbind {folder}/kept_{number} {quoted}")
        config = self.folder / "ssh" / f"sshd_{name}"
        config.write_text(
            f"Port 22\nHostKey {self.folder}/ssh/host_{name}\nAuthorizedKeysFile {self.folder}/ssh/authorized_keys\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nStrictModes no\nPidFile none\nMaxStartups 200\n"
            "Subsystem sftp internal-sftp\n"
            # Put all variables into one line, because sshd ignores any further SetEnv line.
            f"SetEnv {' '.join(f'{name}={value}' for name, value in {**_FOR_ALL, **self.environment}.items())}\n"
        )
        init = folder / "init.sh"
        init.write_text(
            "\n".join(
                [
                    "set -e",
                    f"hostname {name}",
                    f"mount --bind {self.folder}/hosts /etc/hosts",
                    *mounts,
                    "mount -t tmpfs shm /dev/shm",
                    # bash reads this file for every command over SSH. A developer's file may take a second.
                    "[ ! -f ~root/.bashrc ] || mount --bind /dev/null ~root/.bashrc",
                    "ip link set lo up",
                    f"until ip addr add {self.addresses[name]}/24 dev eth0 2>/dev/null; do sleep 0.01; done",
                    "ip link set eth0 up",
                    "mkdir -p /run/sshd",
                    "set +e",
                    f"/usr/sbin/sshd -D -e -f {config} 2>>{folder}/sshd.log &",
                    # This shell is the init process of the host, so it reaps orphans.
                    "while :; do sleep 31536000 & wait $!; done",
                    "",
                ]
            )
        )
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        outer = _spawn(["unshare", *namespaces, "bash", str(init)], folder / "log")
        self._outer[name] = outer
        self._pids[name] = _until(lambda: _child(outer), f"{name} has an init")
        port = _port(name)
        # A previous host of this name may still be ending. Remove both ends of its virtual network cable, so that the
        # new cable can have the same name.
        self._cut_off(port)
        _until(lambda: _has_gone(self._switch, port), f"{port} is free")
        # A host keeps its MAC address after a restart, because other hosts have stored it.
        mac = "02:79:00:00:00:" + f"{int(self.addresses[name].rsplit('.', 1)[1]):02x}"
        eth0 = ("name", "eth0", "address", mac, "netns", str(outer.pid))
        _ip("link", "add", port, "netns", str(self._switch), "type", "veth", "peer", *eth0)
        self._in_switch("link", "set", port, "master", "br0", "up")

    def _wait(self, name: str) -> None:
        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((self.addresses[name], 22), timeout=1) as probe:
                return probe.recv(3) == b"SSH"
            outer = self._outer[name]
            assert outer.poll() is None, f"{name} ended: {(self.folder / name / 'log').read_text()}"
            return False

        _until(answers, f"{name} answers on port 22")

    def _set_port(self, name: str, state: str) -> None:
        self._in_switch("link", "set", _port(name), state)

    def _cut_off(self, port: str) -> None:
        words = ["nsenter", "-t", str(self._switch), "-n", "ip", "link", "del", port]
        subprocess.run(words, check=False, capture_output=True)

    def _in_switch(self, *words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._switch), "-n", "ip", *words], check=True)


def _port(name: str) -> str:
    return f"p-{name}"


def _spawn(argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A process that gets a SIGKILL when this one dies."""
    with log.open("ab") as file:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _child(outer: subprocess.Popen[bytes]) -> int:
    assert outer.poll() is None, "a host's init has ended"
    text = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
    return int(text[0]) if text else 0


def _has_gone(switch: int, port: str) -> bool:
    argv = ["nsenter", "-t", str(switch), "-n", "ip", "link", "show", port]
    return subprocess.run(argv, capture_output=True, check=False).returncode != 0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(path)], check=True)


def _free_network() -> str:
    """The first three numbers of a network that this machine has no address in."""
    links = json.loads(subprocess.run(["ip", "-j", "-4", "addr"], capture_output=True, check=True).stdout)
    used = {address["local"].rsplit(".", 1)[0] for link in links for address in link.get("addr_info", ())}
    return next(found for index in range(254) if (found := f"10.79.{index}") not in used)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """So that two sessions of tests don't take the same network."""
    with (_PARENT / "paceline-hosts.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _new_folder(prefix: str) -> Path:
    """A folder of this process's; those of processes that are dead are removed."""
    for old in _PARENT.glob("paceline-hosts-*-*"):
        pid = old.name.split("-")[2]
        if pid.isdigit() and not processes.is_alive(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"paceline-hosts-{os.getpid()}-{prefix}-", dir=_PARENT))
    folder.chmod(0o755)
    return folder


def _until(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + _WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {_WAIT_S} s"
        time.sleep(0.01)
    return found
