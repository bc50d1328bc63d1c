"""Layers: pip packages on top of a container image, stored on the host.

    <folder>/<key>.json      describes a complete layer, and is written last
    <folder>/<key>.lock      held during a build
    <folder>/<key>/layer/    the complete environment
    <folder>/<key>/<token>/  an environment being built, with a new token per attempt

Each attempt to build uses its own folder, because the container of a killed attempt may continue writing for a moment. In
the container, this folder has the path `layer`: the installed files contain the path, so it must be equal on all nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote

from paceline.containers import inside, layer_inside
from paceline.containers.client import call
from paceline.containers.command import INSIDE, Mount, for_client, run_argv
from paceline.containers.engine import ContainerEngine
from paceline.errors import EnvironmentBuildError
from paceline.system import locks
from paceline.system.files import changed_at, gone_is_fine, read_json, write_json

_SCRIPT = str(Path(layer_inside.__file__).resolve())
#: Prefix and names of the variables for pip in a container: pip's settings, network proxies and certificates.
_PREFIX = "PIP_"
_NAMES = (
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
# Never mount these folders as a whole: that would expose too much, and hide the image's content.
_TOPS = frozenset(map(Path, ("/", "/etc", "/home", "/opt", "/root", "/tmp", "/var")))
# Never mount these folders, because each container gets its own.
_KERNELS = ("/proc", "/sys", "/dev", "/run")
# Mount only single files from these folders, such as certificates: a folder would replace part of the image's system.
_IMAGES_OWN = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
# Number of bytes to read at once. If an archive is longer than this, only its last `_READ_BYTES` bytes are hashed.
_READ_BYTES = 4 << 20
_SETTINGS = (".config/pip/pip.conf", ".pip/pip.conf", ".netrc")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A pip environment on top of a container image.

    packages: The installed packages, as "name==version".
    """

    prefix: str
    python: str
    bin_dir: str
    packages: tuple[str, ...] = ()


def ensure_layer(
    folder: Path,
    engine: ContainerEngine,
    image: str,
    *,
    run_id: str,
    python: str,
    requirements: Sequence[str],
    is_exact: bool = False,
    mounts: Sequence[Mount] = (),
    say: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Layer:
    """Return the layer of these packages on an image, built if missing.

    pip runs in a container. There it sees the user's pip configuration, package indexes and cache, and the local files
    in `requirements`. Paceline passes credentials only in variables and files.

    Args:
        folder: `<workspace>/environments/images`, which is also mounted into the workers' containers.
        engine: The container engine.
        image: The image's id.
        run_id: The run's id, which labels the container.
        python: Path of the image's Python, as `probe` returns it.
        requirements: Lines of a requirements file.
        is_exact: Whether the lines name every package with its exact version, so that pip resolves nothing.
        mounts: Folders to mount in addition to the folders that pip needs.
        say: Called with each line of output.
        environment: Variables that have pip's settings. None: this process's variables.

    Raises:
        EnvironmentBuildError: pip failed, or no container could be started.
    """
    # The cache key leaves out pip's settings: equal requirements share one layer, even with different package indexes.
    content = json.dumps([image, python, list(requirements), is_exact, _states(requirements)])
    key = hashlib.sha256(content.encode()).hexdigest()[:20]
    folder = Path(os.path.abspath(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Look for a finished layer (folder of pip packages) without the lock first: a build holds the lock for minutes.
        if (found := read_layer(folder, key)) is not None:
            return found
        waits = "another process installs these packages on top of the image; waiting for it"
        with locks.locked(folder / f"{key}.lock", on_wait=lambda: say(waits)):
            if (found := read_layer(folder, key)) is not None:
                return found
            # This process holds the lock and there is no record, so an existing folder is left from a failed attempt.
            shutil.rmtree(folder / key, ignore_errors=True)
            prefix, made = folder / key / "layer", folder / key / secrets.token_hex(4)
            made.mkdir(parents=True)
            (made / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
            pip = _pip()
            options = ["install", "--disable-pip-version-check", "--no-warn-script-location", "--progress-bar=off"]
            # A lock file includes all dependencies. Without --no-deps pip would resolve them again, and might add packages.
            options += ["--no-deps"] if is_exact else []
            options += ["--requirement", str(made / "requirements.txt")]
            result = str(made / "installed.json")
            variables, files = _of_pip(os.environ if environment is None else environment, requirements)
            argv = run_argv(
                engine,
                image,
                _in_container(python, (python, _SCRIPT, str(prefix), str(pip), result, *options), str(made)),
                run_id=run_id,
                # Use a random name, because the container of a killed attempt may still exist.
                name=f"paceline-{run_id}-layer-{secrets.token_hex(2)}",
                mounts=[
                    Mount(path=Path(INSIDE).parent.parent, read_only=True),
                    Mount(path=pip, read_only=True),
                    # Mount the folder twice: at its own path for pip, and at `prefix`, its path in the layer
                    Mount(path=made),
                    Mount(path=made, at=prefix),
                    *files,
                    *mounts,
                ],
                variables=tuple(variables),
            )
            say(f"{engine.kind}: installing {', '.join(requirements)} on top of the image")
            # Pass the values in the client's environment, because its command line has only the variables' names.
            code, lines = call(argv, say=say, environment={**os.environ, **for_client(engine, variables)})
            if code != 0:
                raise EnvironmentBuildError(_reason(code, lines))
            layer = _layer(prefix, result)
            # Rename the folder first, because a record must never name a missing folder.
            os.rename(made, prefix)
            # Sync the record, so that a power failure leaves no half of it.
            write_json(folder / f"{key}.json", asdict(layer), sync=True)
            return layer
    except OSError as error:
        where = f": {error.filename!r}" if error.filename else ""
        raise EnvironmentBuildError(
            f"the packages could not be installed on top of the image: {error.strerror or error}{where}."
        ) from error


def _of_pip(environment: Mapping[str, str], requirements: Sequence[str]) -> tuple[dict[str, str], list[Mount]]:
    """Return the variables and mounts that pip in the container needs."""
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    cache = Path(environment.get("PIP_CACHE_DIR") or Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "pip")
    # Mount the cache only if it exists: a user who has never run pip has no cache.
    with gone_is_fine():
        cache.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in environment.items() if name.startswith(_PREFIX) or name in _NAMES}
    files = [*(home / name for name in _SETTINGS), Path("/etc/pip.conf"), Path(environment.get("PIP_CONFIG_FILE", ""))]
    files = [path.absolute() for path in files if path.is_file()]
    named = [*requirements, *values.values()]
    # Mount local indexes, certificates and folders that the configuration files name.
    for path in files:
        with gone_is_fine():
            named.append(path.read_text(encoding="utf-8", errors="replace"))
    mounts = [Mount(path=path, read_only=True) for path in files]
    mounts += [mount for text in named for mount in named_files(text)]
    mounts += [Mount(path=cache.absolute())] if cache.is_dir() else []
    # Use the host's HOME, because pip looks for its configuration there, and files are mounted under the host's paths.
    values |= {"HOME": str(home), "PIP_CACHE_DIR": str(cache)}
    return {inside.SET + name: value for name, value in values.items()}, mounts


def named_files(text: str) -> Iterator[Mount]:
    """Yield a mount for each existing path or `file://` URL in `text`.

    A Python project's folder is mounted writable, because building the project writes files into it.
    """
    for word in re.split(r"file://|[\s=@;\[\]\"']+", text):
        # Try the unchanged word first, because a file name may contain a "%" or "#".
        path = Path(word if os.path.exists(word) else unquote(word.partition("#")[0]))
        if path.is_absolute() and path.exists() and not _is_the_systems(path):
            if path.name == "simple" and not _is_the_systems(path.parent):
                path = path.parent  # mount the index's parent folder: the index's pages link to files beside it
            is_project = any((path / name).is_file() for name in ("pyproject.toml", "setup.py"))
            yield Mount(path=Path(os.path.normpath(path)), read_only=not is_project)


def _is_the_systems(path: Path) -> bool:
    path = Path(os.path.normpath(path))
    if path in _TOPS or any(path.is_relative_to(top) for top in _KERNELS):
        return True
    return path.is_dir() and any(path.is_relative_to(top) for top in _IMAGES_OWN)


def _states(requirements: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return (path, size, hash) of each local file in the requirement lines.

    These values are part of the layer's key, because changed files install different packages. Modification times are
    not, because copies on two nodes must give the same layer. Of an archive, only the end is hashed.
    """
    states = []
    for mount in (mount for line in requirements for mount in named_files(line)):
        paths = [mount.path]
        is_folder = mount.path.is_dir()
        if is_folder:
            paths = sorted(Path(top, name) for top, _, names in os.walk(mount.path) for name in names)
        for path in paths:
            with gone_is_fine(), open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                # Hash whole files of a folder. Of an archive hash only the end, because a wheel has its list of checksums there.
                file.seek(0 if is_folder else max(0, size - _READ_BYTES))
                digest = hashlib.sha256()
                while part := file.read(_READ_BYTES):
                    digest.update(part)
                states.append((str(path), size, digest.hexdigest()))
    return states


def _in_container(python: str, command: Sequence[str], scratch: str) -> tuple[str, ...]:
    return (python, "-I", "-S", INSIDE, "--home", scratch, "--", *command)


def _pip() -> Path:
    spec = importlib.util.find_spec("pip")
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentBuildError("pip is not installed beside Paceline. Install it: python -m ensurepip.")
    return Path(spec.submodule_search_locations[0]).resolve()


def _layer(prefix: Path, result: str) -> Layer:
    try:
        packages = tuple(json.loads(Path(result).read_text(encoding="utf-8"))["packages"])
    except (ValueError, KeyError) as error:
        raise EnvironmentBuildError(f"the packages' list {result!r} can't be read: {error}.") from error
    bin_dir = prefix / "bin"
    return Layer(prefix=str(prefix), python=str(bin_dir / "python"), bin_dir=str(bin_dir), packages=packages)


def _reason(code: int, lines: Sequence[str]) -> str:
    errors = [
        line.removeprefix("ERROR:").strip() for line in lines if line.startswith(("ERROR:", "Error:", "paceline:"))
    ]
    message = (errors or [line.strip() for line in lines[-1:]] or [f"exit code {code}"])[-1]
    # Add the next-to-last error, because pip's last error often only summarizes it.
    if len(errors) > 1 and message.startswith("No matching distribution"):
        message = f"{message.rstrip('.')}: {errors[-2]}"
    return f"the packages could not be installed on top of the image: {message.rstrip('.')}."


def read_layer(folder: Path, key: str) -> Layer | None:
    """Return the layer with this key if it is complete, else None."""
    data = read_json(folder / f"{key}.json")
    try:
        layer = Layer(**{**data, "packages": tuple(data["packages"])})
    except (KeyError, TypeError):
        return None
    # Ignore a layer after the workspace was moved, because the layer's files contain absolute paths.
    return layer if Path(layer.prefix).parent == folder / key and os.path.isdir(layer.prefix) else None


@dataclass(frozen=True, kw_only=True)
class KeptLayer:
    """A complete layer of pip packages on an image, with its last use."""

    key: str
    layer: Layer
    used_at: float


def key_of(layer: Layer) -> str:
    """Return a layer's cache key, the name of its folder."""
    return Path(layer.prefix).parent.name


def all_layers(folder: Path) -> list[KeptLayer]:
    """Return all complete layers (packages on images), most recently used first."""
    layers = []
    for path in folder.glob("*.json"):
        layer = read_layer(folder, path.stem)
        if layer is not None:
            layers.append(KeptLayer(key=path.stem, layer=layer, used_at=_used_at(folder, path.stem)))
    return sorted(layers, key=lambda kept: -kept.used_at)


@contextlib.contextmanager
def hold_layer(folder: Path, key: str) -> Iterator[None]:
    """Within the block, protect the layer from `prune_layers`.

    Raises:
        EnvironmentBuildError: The layer has been pruned. The next build makes it again.
    """
    # Any number of runs can hold this shared lock. `prune_layers` needs an exclusive lock, so it skips a layer in use.
    with locks.shared(_lock(folder, key)) as fd:
        if read_layer(folder, key) is None:
            raise EnvironmentBuildError(f"environment {key} has just been pruned. Submit the run again.")
        # Set the lock file's time, which `prune_layers` reads as the last use.
        os.utime(fd)
        yield


def prune_layers(
    folder: Path, *, unused_for_s: float = 0.0, only: Collection[str] | None = None, dry_run: bool = False
) -> list[KeptLayer]:
    """Remove unused layers (packages on images), and return them.

    Args:
        folder: `<workspace>/environments/images`.
        unused_for_s: Remove only layers whose last use is at least this many seconds ago.
        only: Remove only layers with these keys. None: layers with any key.
        dry_run: Return the layers that would be removed, but do not remove them.
    """
    removed = []
    for kept in all_layers(folder):
        if (only is not None and kept.key not in only) or time.time() - kept.used_at < unused_for_s:
            continue
        # Keep the lock file. Otherwise, a process could lock a new file while another process still locks the old file.
        fd = locks.take(_lock(folder, kept.key))
        if fd is None:
            continue  # a run uses the layer, or another process builds it
        # Check the time again with the lock held: a run may have used the layer since the layers were listed.
        if time.time() - _used_at(folder, kept.key) >= unused_for_s:
            removed.append(kept)
            if not dry_run:
                # Remove the record first, because a folder without a record is not valid.
                (folder / f"{kept.key}.json").unlink(missing_ok=True)
                shutil.rmtree(folder / kept.key, ignore_errors=True)
        os.close(fd)
    if not dry_run:
        _sweep(folder)
    return removed


def _sweep(folder: Path) -> None:
    for path in folder.glob("*/"):
        # In Python 3.10, the pattern "*/" also returns files.
        if (
            path.is_dir()
            and read_layer(folder, path.name) is None
            and (fd := locks.take(_lock(folder, path.name))) is not None
        ):
            # Check again with the lock held: a build may have finished and written its record.
            if read_layer(folder, path.name) is None:
                shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


def _lock(folder: Path, key: str) -> Path:
    return folder / f"{key}.lock"


def _used_at(folder: Path, key: str) -> float:
    return changed_at(_lock(folder, key))
