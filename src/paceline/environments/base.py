"""The base interpreter from which an environment is made, and its installed packages."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from paceline.errors import EnvironmentSpecError
from paceline.system import processes
from paceline.system.files import read_json, stamp_of, write_json

_TIMEOUT_S = 60

# Program by which another interpreter reports its packages. It ignores modules in the working directory.
_ASK = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; exec(sys.argv[1]); print(__import__('json').dumps(facts()))"
)
_FACTS = """
def facts():
    import os, platform, site, sys, sysconfig
    folders = list(site.getsitepackages())
    config = os.path.join(sys.prefix, "pyvenv.cfg")
    isolated = False
    if sys.prefix != sys.base_prefix and os.path.isfile(config):
        with open(config, encoding="utf-8") as file:
            words = [line.partition("=") for line in file.read().lower().splitlines()]
        isolated = ("false" in [value.strip() for key, _, value in words if key.strip() == "include-system-site-packages"])
    user = site.getusersitepackages()
    return {
        "python": sys.executable,
        "prefix": sys.prefix,
        "version": platform.python_version(),
        "implementation": sys.implementation.name,
        "platform": sysconfig.get_platform(),
        "site_folders": folders,
        "user_folder": None if isolated else user,
    }
"""


@dataclass(frozen=True, kw_only=True)
class Base:
    """An interpreter from which environments are made, and its package folders.

    Attributes:
        site_folders: Folders of the interpreter's packages, in search order.
        user_folder: The user's own package folder, which is searched first. None if it is not used.
    """

    python: str
    prefix: str
    version: str
    implementation: str
    platform: str
    site_folders: tuple[str, ...]
    user_folder: str | None

    @property
    def folders(self) -> tuple[Path, ...]:
        """The existing folders with packages of the interpreter, in search order."""
        user = () if self.user_folder is None or os.environ.get("PYTHONNOUSERSITE") else (self.user_folder,)
        return tuple(Path(folder) for folder in dict.fromkeys((*user, *self.site_folders)) if os.path.isdir(folder))

    def identity(self) -> dict[str, str]:
        """Return the interpreter's properties that are part of an environment's cache key."""
        return {
            "python": self.python,
            "version": self.version,
            "implementation": self.implementation,
            "platform": self.platform,
            "machine": platform.machine(),
        }

    def installed(self) -> list[str]:
        """List the installed distributions by the names of their metadata folders.

        The list also has each .pth file with its size, because such a file may add editable packages.
        """
        distributions = []
        for folder in self.folders:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith((".dist-info", ".egg-info", ".egg-link")):
                        distributions.append(entry.name)
                    # A .pth file adds editable packages and other folders. The file's size shows most of its changes.
                    elif entry.name.endswith(".pth"):
                        distributions.append(f"{entry.name} {entry.stat().st_size}")
        return sorted(set(distributions))


def base(python: str, cache_dir: Path) -> Base:
    """Inspect an interpreter, or read its properties from the cache in `cache_dir`.

    Raises:
        EnvironmentSpecError: The interpreter does not exist, or does not run.
    """
    if python == sys.executable:
        return _here()
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        raise EnvironmentSpecError(
            f"there is no interpreter {python!r}, the base of the environment. Give an interpreter's path, such as "
            f"{sys.executable!r}."
        )
    path = os.path.abspath(path)
    # Take the interpreter's stamp before running it: if it changes meanwhile, the cached facts are then invalid.
    stamp = _stamp(path)
    if (path, stamp) not in _known:
        _known[path, stamp] = _from_cache(path, stamp, cache_dir) or _ask(path, stamp, cache_dir)
    return _known[path, stamp]


_known: dict[tuple[str, str], Base] = {}


@cache
def _here() -> Base:
    names: dict[str, object] = {}
    # Run the same text in this interpreter that other interpreters get (see `_ASK`).
    exec(_FACTS, names)
    facts = names["facts"]
    assert callable(facts)
    return _made(facts())


def _made(values: dict[str, object]) -> Base:
    folders = values["site_folders"]
    assert isinstance(folders, list)
    return Base(**(values | {"site_folders": tuple(folders)}))  # type: ignore[arg-type]


def _stamp(path: str) -> str:
    # These two variables determine the folder of the user's packages.
    stamps = [os.environ.get("PYTHONUSERBASE", ""), os.path.expanduser("~")]
    for each in (path, os.path.join(os.path.dirname(os.path.dirname(path)), "pyvenv.cfg")):
        stamps.append("-".join(map(str, stamp_of(each) or ("-",))))
    return " ".join(stamps)


def _cache_file(path: str, cache_dir: Path) -> Path:
    import hashlib

    return cache_dir / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:24]}.json"


def _from_cache(path: str, stamp: str, cache_dir: Path) -> Base | None:
    kept = read_json(_cache_file(path, cache_dir))
    if not isinstance(kept, dict) or kept.get("asked") != path or kept.get("stamp") != stamp:
        return None
    try:
        return _made(kept["base"])
    except (KeyError, TypeError, AssertionError):
        return None


def _ask(path: str, stamp: str, cache_dir: Path) -> Base:
    # Remove PYTHONPATH and PYTHONHOME: they would add Paceline's packages to those of the other interpreter.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if user_base := os.environ.get("PYTHONUSERBASE"):
        environment["PYTHONUSERBASE"] = user_base
    try:
        words = [path, "-c", _ASK, _FACTS]
        done = processes.said_by(words, timeout_s=_TIMEOUT_S, environment=environment, cwd="/")
        # Read the last line, because a `sitecustomize` may print lines before it.
        base_found = _made(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError, KeyError) as error:
        raise EnvironmentSpecError(f"{path!r} does not run as a Python interpreter: {error}.") from error
    if base_found is None:
        output = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # A traceback has the error in its last line, other messages in their first line.
        reason = output[-1 if output[0].startswith("Traceback") else 0].strip().rstrip(".")
        raise EnvironmentSpecError(f"{path!r} does not run as a Python interpreter: {reason}.")
    if base_found.python != path:
        return base_found  # a wrapper script, which may start another interpreter next time: don't cache
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        write_json(_cache_file(path, cache_dir), {"asked": path, "stamp": stamp, "base": asdict(base_found)})
    except OSError:
        pass  # continue without the cache: the next process runs the interpreter again
    return base_found
