"""Containers without a registry: images made of this machine's own `/usr`, in a store that the tests remove.

The images are empty but for links and, in one, a false interpreter; `/usr` and this Python's folders come in by the
engine's own configuration, as an administrator may add folders to every container.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.containers import Mount
from paceline.job.plan import Command, Launch, Node, NodeSetup, port_count
from paceline.launchers import environment, get_launcher
from paceline.system import processes
from paceline.system.detached_process import library_dir
from tests.helpers import free_port, make_job, write_tree

IMAGE, WITH_MPI, ANOTHER_ENTRY, WITHOUT_PYTHON, OLD_PYTHON = (
    f"localhost/paceline-test-{name}:1" for name in ("plain", "mpi", "entry", "bare", "old")
)
_CHANGES = {
    IMAGE: ["ENV IMAGES_OWN=kept"],
    # In this image, PATH begins with the folder of the Python that runs the tests, so the tests' packages are found.
    WITH_MPI: ["ENV IMAGES_OWN=kept", f"ENV PATH={sysconfig.get_path('scripts')}:/usr/bin:/bin"],
    ANOTHER_ENTRY: ['ENTRYPOINT ["/usr/bin/false"]'],
    WITHOUT_PYTHON: ["ENV PATH=/nowhere"],
    OLD_PYTHON: ["ENV PATH=/old"],
}
_OLD = """\
#!/usr/bin/python3
import runpy, sys
sys.version_info = (3, 8, 18, "final", 0)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
#: Podman's configuration for a machine with cgroups v1 where users may not raise their limits.
_NARROW = {
    "containers": ['default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]'],
    "engine": ['runtime = "runc"', 'cgroup_manager = "cgroupfs"'],
}


class Podman:
    """A podman with its own store below `folder`. environment: variables by which its client uses that store.

    images: those that it is given; `of` another, by the same ids, else new ones.
    """

    kind = "podman"
    #: Empty, because podman's configuration already mounts the folders of this machine.
    mounts: tuple[Mount, ...] = ()

    def __init__(self, folder: Path, images: Collection[str] = tuple(_CHANGES), of: Podman | None = None) -> None:
        self._folder, self._images, self._of = folder, images, of
        # podman needs a path of at most 50 characters. With a longer path, the end of a container takes 20 s without any message.
        self._run = Path(tempfile.gettempdir()) / f"pl-podman-{secrets.token_hex(4)}"
        self.environment = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }

    def start(self) -> str | None:
        """Make the images; None, or why it can't be used."""
        if shutil.which("podman") is None:
            return "there is none on PATH"
        store = {"driver": "vfs", "graphroot": str(self._folder / "root"), "runroot": str(self._run)}
        lines = ["[storage]", *(f"{name} = {json.dumps(value)}" for name, value in store.items())]
        (self._folder / "storage.conf").write_text("\n".join(lines))
        why: str | None = None
        for settings in ({}, _NARROW):
            self._configure(settings)
            why = self._copy_images() if self._of else import_images(self, self._folder, self._images)
            if why is None:
                image = next(iter(self._images))
                done = self("run", "--rm", "--pull=never", "--network=host", "--pid=host", image, "true")
                if done.returncode == 0:
                    return None
                why = done.stderr.strip()
            self.stop()
        return why

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return call("podman", words, self.environment)

    def containers(self) -> list[str]:
        """Return the names of all containers, in any state."""
        return self("ps", "--all", "--external", "--format", "{{.Names}}").stdout.split()

    def left_by_runtime(self) -> list[str]:
        """Containers of this store of which runc or crun still has a state."""
        places = (Path("/run"), Path(os.environ.get("XDG_RUNTIME_DIR", "/run")))
        states = [path for place in places for name in ("runc", "crun") for path in (place / name).glob("*/*")]
        return [
            str(path) for path in states if path.is_file() and str(self._folder) in path.read_text(errors="replace")
        ]

    def stop(self) -> None:
        if shutil.which("podman"):
            self("rm", "--all", "--force", "--time=0")
            self("rmi", "--all", "--force")
        shutil.rmtree(self._run, ignore_errors=True)

    def _copy_images(self) -> str | None:
        assert self._of is not None
        archive = str(self._folder / "image.tar")
        for image in self._images:
            # This format preserves an image's description byte for byte, and therefore its id.
            for done in (
                self._of("save", "--quiet", "--format=oci-archive", f"--output={archive}", image),
                self("load", "--quiet", f"--input={archive}"),
            ):
                if done.returncode != 0:
                    return done.stderr.strip()
            os.unlink(archive)
        return None

    def _configure(self, settings: Mapping[str, list[str]]) -> None:
        volumes = json.dumps([f"{path}:{path}:ro" for path in host_folders()])
        lines = ["[containers]", f"volumes = {volumes}", *settings.get("containers", ())]
        # This podman has its own locks and temporary files, separate from the podman of the tests' user.
        lines += ["[engine]", 'events_logger = "none"', 'lock_type = "file"']
        lines += [f"tmp_dir = {json.dumps(str(self._folder / 'tmp'))}", *settings.get("engine", ())]
        (self._folder / "containers.conf").write_text("\n".join(lines) + "\n")


class Docker:
    """A docker daemon of its own, without a bridge; needs root."""

    kind = "docker"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Use a short path, because the path of a socket has a maximum length.
        self._short = Path(tempfile.mkdtemp(prefix="pl-docker-"))
        self._daemon: subprocess.Popen[bytes] | None = None
        self.environment = {"DOCKER_HOST": f"unix://{self._short}/s", "PACELINE_CONTAINER_ENGINE": "docker"}

    @property
    def mounts(self) -> tuple[Mount, ...]:
        return tuple(Mount(path=Path(path), read_only=True) for path in host_folders())

    def start(self) -> str | None:
        if shutil.which("dockerd") is None or shutil.which("docker") is None:
            return "there is no dockerd on PATH"
        if os.geteuid() != 0:
            return "its daemon needs root"
        words = ["--data-root", str(self._folder / "data"), "--exec-root", str(self._short / "x"), "-p"]
        words += [str(self._short / "pid"), "-H", self.environment["DOCKER_HOST"], "--bridge=none", "--iptables=false"]
        words += ["--ip6tables=false", "--ip-masq=false", "--storage-driver=vfs", "--default-ulimit=nofile=1024:1024"]
        with open(self._folder / "log", "wb") as log:
            self._daemon = subprocess.Popen(
                # The daemon ends with the tests, even if the tests are killed.
                ["setpriv", "--pdeathsig", "TERM", "dockerd", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # Set this variable, so that a test that kills its descendants does not kill the daemon.
                env={**os.environ, processes.SUPERVISOR_VARIABLE: "tests"},
            )
        deadline = time.monotonic() + 120
        while self("info", "--format", "{{.ServerVersion}}").returncode != 0:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                return (self._folder / "log").read_text().strip().splitlines()[-1]
            time.sleep(0.1)
        return import_images(self, self._folder)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return call("docker", words, self.environment)

    def containers(self) -> list[str]:
        return self("ps", "--all", "--format", "{{.Names}}").stdout.split()

    def left_by_runtime(self) -> list[str]:
        return [str(path) for path in (self._short / "x").glob("runtime-runc/moby/*")]

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(120)
        # The daemon leaves its network namespace mounted, so unmount it.
        for mount in (self._short / "x" / "netns").glob("*"):
            subprocess.run(["umount", "-l", str(mount)], check=False, capture_output=True)
        shutil.rmtree(self._short)


def call(program: str, words: tuple[str, ...], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *words],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def import_images(engine: Podman | Docker, folder: Path, images: Collection[str] = tuple(_CHANGES)) -> str | None:
    """Make the images; None, or why it can't be done."""
    tar = rootfs(folder / "rootfs.tar")
    for image in images:
        changes = _CHANGES[image]
        words = [word for change in changes for word in ("--change", change)]
        done = engine("import", *words, str(tar), image)
        if done.returncode != 0:
            return done.stderr.strip()
    return None


def host_folders() -> list[str]:
    """Folders of this machine that hold a Python with all it needs."""
    found = [
        "/usr",
        *(path for path in ("/lib", "/lib64", "/bin") if not Path(path).is_symlink() and Path(path).is_dir()),
    ]
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):
        if not any(Path(prefix).is_relative_to(folder) for folder in found):
            found.append(prefix)
    return [*found, "/etc/ld.so.cache", "/etc/alternatives"]


def rootfs(tar: Path) -> Path:
    """An archive of a root folder with links into /usr, a /tmp for everybody, and a Python that says it is old."""
    with tarfile.open(tar, "w") as archive:
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(Path("/", name))
                archive.addfile(entry)
        for name, mode in (("tmp", 0o1777), ("etc", 0o755), ("root", 0o700), ("old", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for name, text, mode in (("old/python3", _OLD, 0o755), ("etc/passwd", "root:x:0:0::/root:/bin/sh\n", 0o644)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), mode
            archive.addfile(entry, io.BytesIO(text.encode()))
    return tar


def make_launch(
    folder: Path, script: str, *, python: str = "python3", bin_dir: str | None = None, **values: Any
) -> Launch:
    """A launch of this script in folders that exist. values: the job's."""
    job = make_job(**values)
    run_id = f"lab_1700000000_{secrets.token_hex(4)}"
    run_dir = folder / "ws" / "runs" / run_id
    for path in ("work", "outputs", "logs", "attempts/1"):
        (run_dir / path).mkdir(parents=True)
    write_tree(run_dir / "work", {"train.py": script})
    (run_dir / "work" / "outputs").symlink_to("../outputs")
    scratch = (
        Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp") / f"paceline-test-{os.getpid()}-{run_id[-8:]}"
    )
    scratch.mkdir(mode=0o700)
    return Launch(
        job=job,
        run_id=run_id,
        experiment="lab",
        workspace_name="ws",
        run_dir=run_dir,
        work_dir=run_dir / "work",
        scratch_dir=scratch,
        library_dir=library_dir(folder / "ws"),
        nodes=(Node(node_rank=0, name="local", address="127.0.0.1", cores=2),),
        prepared=(NodeSetup(python=python, bin_dir=bin_dir, is_isolated=True),),
        ports=free_ports(port_count(job)),
    )


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports of this machine on which no process listens."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return tuple(found)


def commands(launch: Launch, shell: Mapping[str, str]) -> list[Command]:
    """What the job's launcher makes of the launch, as the supervisor would wrap it."""
    made = get_launcher(launch.job.launcher).commands(launch)
    return [environment.with_paths(command, launch, shell) for command in made]


def command_lines() -> Iterator[str]:
    """Of every process of this machine."""
    return (" ".join(words_of(int(entry.name))) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def words_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
