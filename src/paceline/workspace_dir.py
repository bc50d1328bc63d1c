"""Where the workspace lies that is configured for the working directory, and whether it is this user's own.

Whoever can write to a workspace decides which programs its commands start. So a workspace counts only if this user has made it
on this machine, or has named it: by a path, by `PACELINE_WORKSPACE`, or once by `paceline trust`. A `paceline.toml`
counts if it belongs to this user or to root, or is trusted; so does the `config.json` by which drivers of the Azure SDK find
theirs. Git has such a rule since CVE-2022-24765 (`safe.directory` in git-config(1)).

Files of an archive or a clone belong to the user who unpacks it. So a workspace that this user makes gets a mark: an
HMAC of its folder's inode with a key of the user's. A move within a file system keeps the inode, and no copy has the same.

    <workspace>/.made-here                the mark
    ~/.local/state/paceline/made.key      the key, for this user alone
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import WorkspaceError

#: Names the workspace's folder, above everything else.
WORKSPACE_VARIABLE = "PACELINE_WORKSPACE"
CONFIG_FILE = "paceline.toml"
DEFAULT_FOLDER = ".paceline"
#: Where the Azure SDK looks for the names of its workspace, in each folder upwards.
_SDK_FOLDERS = (".azureml", "aml_config", "")
_SDK_FILES = ("config.json", "project.json")
MARK = ".made-here"

#: Whether this process only shows what a workspace holds. Then it may be one from elsewhere: nothing of it is started.
only_shows = False


def configured(start: Path | None = None) -> Path:
    """The workspace's folder, as `Workspace.from_config` says. start: a configuration, or the folder in which to look.

    Raises:
        WorkspaceError: a configuration that can't be read, or a workspace that this user has neither made nor named.
    """
    named = os.environ.get(WORKSPACE_VARIABLE)
    # Whoever names a configuration means that one, whatever variable the shell still has.
    if start is None and named:
        return Path(named)
    here = start if start is not None else Path.cwd()
    if not here.exists():
        raise WorkspaceError(
            f"there is no {str(here)!r}. Name a {CONFIG_FILE}, or a folder that holds one or shall hold a workspace."
        )
    config = here if here.is_file() else _nearest_config(here)
    # Joined to another path, an absolute one stands alone, so the file may give either kind.
    if config is not None:
        found = config.parent / os.path.expanduser(_path_in(config))
    else:
        sdk_config = nearest_sdk_config(here)
        found = (here if sdk_config is None else project_of(sdk_config)) / DEFAULT_FOLDER
    # A file that the caller names is the caller's word for what stands in it.
    if not here.is_file() and not is_own(found):
        raise WorkspaceError(
            f"the workspace {str(found)!r} belongs to {_owner(found)}, who could start programs as you by what lies in it. "
            f"If you trust everybody who can write there: paceline trust {shlex.quote(str(found))}. Else work in another folder."
        )
    if not only_shows and not is_known(found):
        raise WorkspaceError(
            f"you have not made the workspace {str(found)!r} on this machine. Did it come with an archive, a clone or a copy? "
            f"What lies in it can start programs as you. If you trust it: paceline trust {shlex.quote(str(found))}. Else work "
            f"in another folder, or name another workspace with {WORKSPACE_VARIABLE}."
        )
    return found


def is_known(path: Path) -> bool:
    """Return whether this user has made this workspace on this machine, or has named it. True where nothing is in it yet."""
    path = path.expanduser()
    # A new workspace has its mark before anything else.
    if all(name.startswith(".") for name in _names(path)):
        return True
    named = os.environ.get(WORKSPACE_VARIABLE)
    if named and os.path.realpath(os.path.expanduser(named)) == os.path.realpath(path):
        return True
    with contextlib.suppress(OSError, ValueError):
        if _is_mark(path, (path / MARK).read_text(encoding="ascii")):
            return True
    return os.path.realpath(path) in trusted()


def note_made(path: Path) -> None:
    """Mark a workspace that this user is making. Without effect where the key can't be kept, and the user has to name it then."""
    if (key := _key(create=True)) is not None:
        with contextlib.suppress(OSError):
            (path / MARK).write_text(_mark(path, key), encoding="ascii")


def _is_mark(path: Path, text: str) -> bool:
    import hmac

    key = _key(create=False)
    return key is not None and hmac.compare_digest(text, _mark(path, key))


def _mark(path: Path, key: bytes) -> str:
    import hmac

    return hmac.new(key, b"paceline workspace %d" % path.stat().st_ino, "sha256").hexdigest()


def _key(*, create: bool) -> bytes | None:
    """Return this user's key for marks; None where it is not there, or not the user's alone."""
    file = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "paceline" / "made.key"
    with contextlib.suppress(OSError):
        if create and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".made.{os.urandom(4).hex()}")
            try:
                with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                    opened.write(os.urandom(32))
                # Of several processes the first one gives it the name.
                with contextlib.suppress(FileExistsError):
                    os.link(beside, file)
            finally:
                beside.unlink()
        found = file.stat()
        if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return file.read_bytes()
    return None


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def is_own(path: Path) -> bool:
    """Return whether a file or folder belongs to this user or to root, is one that `trust` names, or is not there."""
    try:
        return path.stat().st_uid in (os.geteuid(), 0) or os.path.realpath(path) in trusted()
    except OSError:
        return True


def trusted() -> list[str]:
    """Return the folders that this user has trusted."""
    file = _trust_file()
    # Whoever could write this file could trust anything.
    try:
        return file.read_text().splitlines() if file.stat().st_uid in (os.geteuid(), 0) else []
    except (OSError, ValueError):
        return []


def trust(path: Path) -> str:
    """Let a folder that came from elsewhere be a workspace of this user's from now on. Return its path without links.

    Raises:
        WorkspaceError: There is no such folder, or the list can't be written.
    """
    folder, file = os.path.realpath(path), _trust_file()
    if not os.path.isdir(folder):
        raise WorkspaceError(f"{str(path)!r} is not a folder. Name the workspace's folder, such as .paceline.")
    if folder not in trusted():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "a") as opened:
                opened.write(f"{folder}\n")
        except OSError as error:
            raise WorkspaceError(
                f"{str(file)!r} can't be written: {error.strerror}. It lists what you trust."
            ) from error
    return folder


def _trust_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "paceline" / "trusted"


def _owner(path: Path) -> str:
    import pwd

    uid = path.stat().st_uid
    try:
        return repr(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"user {uid}"


def nearest_sdk_config(folder: Path, file_name: str | None = None) -> Path | None:
    """Return the file by which the Azure SDK's drivers find their workspace from a folder.

    file_name: A name in place of `config.json` and `project.json`.
    """
    names = (file_name,) if file_name else _SDK_FILES
    return _nearest(folder, [Path(below, name) for below in _SDK_FOLDERS for name in names])


def project_of(sdk_config: Path) -> Path:
    """Return the folder of the project that a configuration of the Azure SDK's is of."""
    return sdk_config.parent.parent if sdk_config.parent.name in _SDK_FOLDERS else sdk_config.parent


def _nearest_config(folder: Path) -> Path | None:
    return _nearest(folder, [Path(CONFIG_FILE)])


def _nearest(folder: Path, names: Sequence[Path]) -> Path | None:
    """Return the nearest file of these, here or above, that is this user's or trusted."""
    for parent in (folder.absolute(), *folder.absolute().parents):
        for name in names:
            config = parent / name
            if not config.is_file() or (name.name in _SDK_FILES and name == Path(name.name) and not _is_sdk_s(config)):
                continue
            if is_own(config) or os.path.realpath(parent) in trusted():
                return config
            print(
                f"paceline: {config} belongs to {_owner(config)} and is passed over. If you trust it: "
                f"paceline trust {shlex.quote(str(parent))}",
                file=sys.stderr,
            )
    return None


def _is_sdk_s(file: Path) -> bool:
    """Return whether a `config.json` of no certain folder has an Azure workspace: other programs have files of that name."""
    import json

    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "workspace_name" in data


def _path_in(config: Path) -> str:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        tables = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkspaceError(f"{str(config)!r} can't be read: {error}. Mend it or remove it.") from error
    section = tables.get("workspace", {})
    if not isinstance(section, dict):
        raise WorkspaceError(f'{str(config)!r}: workspace={section!r} is no table. Write [workspace], path = "folder".')
    if unknown := sorted(set(section) - {"path"}):
        raise WorkspaceError(f"{str(config)!r}: [workspace] has one key, path; found {', '.join(unknown)}. Remove it.")
    # Such a file would else pass for one that says nothing, and runs would go to another folder than the one that is named.
    if "workspace" not in tables and "path" in tables:
        raise WorkspaceError(f"{str(config)!r}: path stands outside of [workspace]. Write [workspace] above it.")
    path = section.get("path", DEFAULT_FOLDER)
    if not isinstance(path, str) or not path:
        raise WorkspaceError(f'{str(config)!r}: workspace.path={path!r} is not a path. Write path = "folder".')
    return path
