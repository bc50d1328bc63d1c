"""pip packages on top of an image: an environment made in a container of it, kept outside of it.

<folder>/<key>.json      which of the folders below is complete, and what is in it
<folder>/<key>.lock      held by whoever builds
<folder>/<key>/layer/    the environment, once it is complete
<folder>/<key>/<token>/  until then; a token for each try

A try has a folder of its own because the container of one that was killed may write on for a moment: into a folder that
nobody else looks at. Its container sees it as `layer`, for an environment knows its own path, and that has to be the same
on all nodes of a run, each of which may have made its own.
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
from paceline.system.files import read_json, write_json

_SCRIPT = str(Path(layer_inside.__file__).resolve())
#: pip's own settings, the way to the network, and whom to trust there.
_PREFIX = "PIP_"
_NAMES = (
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
# Mounted whole, these would bring along far more than was named, and hide what the image has there.
_TOPS = frozenset(map(Path, ("/", "/etc", "/home", "/opt", "/root", "/tmp", "/var")))
# An engine gives each container its own of these.
_KERNELS = ("/proc", "/sys", "/dev", "/run")
# A file in these may be mounted, such as a certificate; a folder of the host's would replace the image's system.
_IMAGES_OWN = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
# How much is read at once, and how much of a long archive at all.
_READ_BYTES = 4 << 20
_SETTINGS = (".config/pip/pip.conf", ".pip/pip.conf", ".netrc")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """An environment on top of an image; its paths are the same inside and outside.

    packages: "name==version" of what was installed into it.
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
    """The environment with these packages, made if it is not there yet.

    folder: `<workspace>/environments/images`; mount it into the workers' containers. python: the image's, as `probe`
    found it. requirements: lines as in a requirements file. is_exact: they name all there is to install.
    environment: where pip's settings are taken from; None is this process's own. The user's pip configuration, indexes,
    cache and the local files that the lines name count inside too; credentials go in by variables and files alone.
    mounts: more that is needed.

    Raises:
        EnvironmentBuildError: pip failed, with its reason; or no container could be started.
    """
    # pip's settings are no part of it: the same lines from another index come to the same layer.
    asked = json.dumps([image, python, list(requirements), is_exact, _states(requirements)])
    key = hashlib.sha256(asked.encode()).hexdigest()[:20]
    folder = Path(os.path.abspath(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # First without the lock, which a build holds for minutes.
        if (found := read_layer(folder, key)) is not None:
            return found
        waits = "another process installs these packages on top of the image; waiting for it"
        with locks.locked(folder / f"{key}.lock", on_wait=lambda: say(waits)):
            if (found := read_layer(folder, key)) is not None:
                return found
            # Under the lock, and its record is not there: what lies there is of a try that did not end.
            shutil.rmtree(folder / key, ignore_errors=True)
            prefix, made = folder / key / "layer", folder / key / secrets.token_hex(4)
            made.mkdir(parents=True)
            (made / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
            pip = _pip()
            options = ["install", "--disable-pip-version-check", "--no-warn-script-location", "--progress-bar=off"]
            # The lines are a whole lock: pip would resolve them anew and might add other packages.
            options += ["--no-deps"] if is_exact else []
            options += ["--requirement", str(made / "requirements.txt")]
            result = str(made / "installed.json")
            variables, files = _of_pip(os.environ if environment is None else environment, requirements)
            argv = run_argv(
                engine,
                image,
                _in_container(python, (python, _SCRIPT, str(prefix), str(pip), result, *options), str(made)),
                run_id=run_id,
                # With a random end, since the container of a try that was killed may still have its name.
                name=f"paceline-{run_id}-layer-{secrets.token_hex(2)}",
                mounts=[
                    Mount(path=Path(INSIDE).parent.parent, read_only=True),
                    Mount(path=pip, read_only=True),
                    # The same folder twice: under its own path for pip's lines and the answer, and at `prefix`, the path that
                    # the environment's programs will have in them.
                    Mount(path=made),
                    Mount(path=made, at=prefix),
                    *files,
                    *mounts,
                ],
                variables=tuple(variables),
            )
            say(f"{engine.kind}: installing {', '.join(requirements)} on top of the image")
            # The client has the values in its environment; the command line has only their names.
            code, lines = call(argv, say=say, environment={**os.environ, **for_client(engine, variables)})
            if code != 0:
                raise EnvironmentBuildError(_reason(code, lines))
            layer = _layer(prefix, result)
            # First the rename: a record must never name a folder that is not there yet.
            os.rename(made, prefix)
            # The record counts as proof that the layer is whole, so it must not outlive a power cut alone.
            write_json(folder / f"{key}.json", asdict(layer), sync=True)
            return layer
    except OSError as error:
        where = f": {error.filename!r}" if error.filename else ""
        raise EnvironmentBuildError(
            f"the packages could not be installed on top of the image: {error.strerror or error}{where}."
        ) from error


def _of_pip(environment: Mapping[str, str], requirements: Sequence[str]) -> tuple[dict[str, str], list[Mount]]:
    """What pip goes by outside: its variables, under the names by which they cross into the container; its configuration files
    and cache, and the files that any of these name.
    """
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    cache = Path(environment.get("PIP_CACHE_DIR") or Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "pip")
    # It has to be there to be mounted, and a user who has never run pip has none.
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in environment.items() if name.startswith(_PREFIX) or name in _NAMES}
    files = [*(home / name for name in _SETTINGS), Path("/etc/pip.conf"), Path(environment.get("PIP_CONFIG_FILE", ""))]
    files = [path.absolute() for path in files if path.is_file()]
    named = [*requirements, *values.values()]
    # Configuration files name indexes, certificates and folders of this machine as well.
    for path in files:
        with contextlib.suppress(OSError):
            named.append(path.read_text(encoding="utf-8", errors="replace"))
    mounts = [Mount(path=path, read_only=True) for path in files]
    mounts += [mount for text in named for mount in named_files(text)]
    mounts += [Mount(path=cache.absolute())] if cache.is_dir() else []
    # pip looks for its configuration below HOME, and the files are mounted under the paths that they have here.
    values |= {"HOME": str(home), "PIP_CACHE_DIR": str(cache)}
    return {inside.SET + name: value for name, value in values.items()}, mounts


def named_files(text: str) -> Iterator[Mount]:
    """Every file and folder of this machine that the text names by an absolute path or a `file://` URL.

    A project's folder is mounted to be written to: building it leaves files there, as it does outside.
    """
    for word in re.split(r"file://|[\s=@;\[\]\"']+", text):
        # As it stands first: a file's name may have a "%" or a "#" of its own.
        path = Path(word if os.path.exists(word) else unquote(word.partition("#")[0]))
        if path.is_absolute() and path.exists() and not _is_the_systems(path):
            if path.name == "simple" and not _is_the_systems(path.parent):
                path = path.parent  # an index of packages whose pages lead to files beside it
            is_project = any((path / name).is_file() for name in ("pyproject.toml", "setup.py"))
            yield Mount(path=Path(os.path.normpath(path)), read_only=not is_project)


def _is_the_systems(path: Path) -> bool:
    """Return True where the host's folder would lie over what the image itself runs on."""
    path = Path(os.path.normpath(path))
    if path in _TOPS or any(path.is_relative_to(top) for top in _KERNELS):
        return True
    return path.is_dir() and any(path.is_relative_to(top) for top in _IMAGES_OWN)


def _states(requirements: Sequence[str]) -> list[tuple[str, int, str]]:
    """Of the local files that the lines name: changed ones are other packages. Not by their times: what was sent to two
    nodes has to come to the same environment on both.
    """
    found = []
    for mount in (mount for line in requirements for mount in named_files(line)):
        paths = [mount.path]
        is_folder = mount.path.is_dir()
        if is_folder:
            paths = sorted(Path(top, name) for top, _, names in os.walk(mount.path) for name in names)
        for path in paths:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                # Of a long archive the end: there a wheel has its list of files with their checksums. A folder's file has none.
                file.seek(0 if is_folder else max(0, size - _READ_BYTES))
                digest = hashlib.sha256()
                while part := file.read(_READ_BYTES):
                    digest.update(part)
                found.append((str(path), size, digest.hexdigest()))
    return found


def _in_container(python: str, command: Sequence[str], scratch: str) -> tuple[str, ...]:
    return (python, "-I", "-S", INSIDE, "--home", scratch, "--", *command)


def _pip() -> Path:
    """The folder of the pip that Paceline depends on."""
    found = importlib.util.find_spec("pip")
    if found is None or not found.submodule_search_locations:
        raise EnvironmentBuildError("pip is not installed beside Paceline. Install it: python -m ensurepip.")
    return Path(found.submodule_search_locations[0]).resolve()


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
    told = (errors or [line.strip() for line in lines[-1:]] or [f"exit code {code}"])[-1]
    # pip's last error often only sums up the one before it.
    if len(errors) > 1 and told.startswith("No matching distribution"):
        told = f"{told.rstrip('.')}: {errors[-2]}"
    return f"the packages could not be installed on top of the image: {told.rstrip('.')}."


def read_layer(folder: Path, key: str) -> Layer | None:
    """The layer of this key, if it is complete."""
    data = read_json(folder / f"{key}.json")
    try:
        found = Layer(**{**data, "packages": tuple(data["packages"])})
    except (KeyError, TypeError):
        return None
    # The workspace may have been moved, and its environments with it: they can't be.
    return found if Path(found.prefix).parent == folder / key and os.path.isdir(found.prefix) else None


@dataclass(frozen=True, kw_only=True)
class KeptLayer:
    """A complete one. used_at: seconds since 1970 when a run last held it."""

    key: str
    layer: Layer
    used_at: float


def key_of(layer: Layer) -> str:
    """The name of a layer's folder."""
    return Path(layer.prefix).parent.name


def all_layers(folder: Path) -> list[KeptLayer]:
    """Return the layers in `<workspace>/environments/images`, the last used first."""
    found = []
    for path in folder.glob("*.json"):
        layer = read_layer(folder, path.stem)
        if layer is not None:
            found.append(KeptLayer(key=path.stem, layer=layer, used_at=_used_at(folder, path.stem)))
    return sorted(found, key=lambda kept: -kept.used_at)


@contextlib.contextmanager
def hold_layer(folder: Path, key: str) -> Iterator[None]:
    """While it lasts, the layer is not pruned; the kernel ends it with the process.

    Raises:
        EnvironmentBuildError: it has been pruned meanwhile; the next build makes it again.
    """
    # Shared: any number of runs use a layer at once, and `prune_layers` needs the lock for itself.
    with locks.shared(_lock(folder, key)) as fd:
        if read_layer(folder, key) is None:
            raise EnvironmentBuildError(f"environment {key} has just been pruned. Ask for it once more.")
        # The time of the lock's file is that of the last use, by which `prune_layers` goes.
        os.utime(fd)
        yield


def prune_layers(
    folder: Path, *, unused_for_s: float = 0.0, only: Collection[str] | None = None, dry_run: bool = False
) -> list[KeptLayer]:
    """Remove those that nobody holds and nobody has used for so long; what is gone.

    only: those with these keys. dry_run: only say what would go.
    """
    removed = []
    for kept in all_layers(folder):
        if only is not None and kept.key not in only:
            continue
        if time.time() - kept.used_at < unused_for_s:
            continue
        # The lock's file stays when the layer goes: a new file of that name would be another lock.
        fd = locks.take(_lock(folder, kept.key))
        if fd is None:
            # Somebody has it: a run that uses it, or a build.
            continue
        # Looked at again under the lock: a run may have used it since it was listed.
        if time.time() - _used_at(folder, kept.key) >= unused_for_s:
            removed.append(kept)
            if not dry_run:
                # First the record: without it the folder counts for nothing.
                (folder / f"{kept.key}.json").unlink(missing_ok=True)
                shutil.rmtree(folder / kept.key, ignore_errors=True)
        os.close(fd)
    if not dry_run:
        _sweep(folder)
    return removed


def _sweep(folder: Path) -> None:
    """Remove what installations that failed or were killed have left."""
    for path in folder.glob("*/"):
        # Python 3.10 gives files for this pattern, too.
        if (
            path.is_dir()
            and read_layer(folder, path.name) is None
            and (fd := locks.take(_lock(folder, path.name))) is not None
        ):
            # Again under the lock, for a build may have come to its end between the look above and the lock.
            if read_layer(folder, path.name) is None:
                shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


def _lock(folder: Path, key: str) -> Path:
    return folder / f"{key}.lock"


def _used_at(folder: Path, key: str) -> float:
    try:
        return os.stat(_lock(folder, key)).st_mtime
    except OSError:
        return 0.0
