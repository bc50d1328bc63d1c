"""Find the working directory's configured workspace, and check that it is the user's.

Anyone who can write to a workspace decides which programs its commands start. So Paceline uses a workspace only if this
user has made it on this machine, or has named it: by a path, by `PACELINE_WORKSPACE`, or once by `paceline trust`. A
`paceline.toml`, or a `config.json` of Azure ML's old SDK, is used if it belongs to this user or to root, or is trusted.
Git has had such a rule since CVE-2022-24765 (`safe.directory` in git-config(1)).

Files of an archive or a clone belong to the user who unpacks it. So a workspace that this user makes gets a mark: an HMAC of its
folder's inode with a key of the user. A move within a file system keeps the inode; a copy has another inode.

    <workspace>/.made-here                the mark
    ~/.local/state/paceline/made.key      the key, readable by this user only
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import WorkspaceError
from paceline.system.files import state_folder

#: Environment variable with the workspace's folder, which overrides all other settings.
WORKSPACE_VARIABLE = "PACELINE_WORKSPACE"
CONFIG_FILE = "paceline.toml"
DEFAULT_FOLDER = ".paceline"
#: Names of folders and files in which the Azure SDK looks for its workspace: in a folder and in each of its parent folders.
_SDK_FOLDERS = (".azureml", "aml_config", "")
_SDK_FILES = ("config.json", "project.json")
MARK = ".made-here"

#: Whether this process only displays a workspace. Then it starts no programs from the workspace, and need not trust it.
only_shows = False


def configured(start: Path | None = None) -> Path:
    """Return the folder of the workspace that `Workspace.from_config` describes.

    `start` is a configuration file, or the folder in which to search.

    Raises:
        WorkspaceError: The configuration can't be read, or this user has neither created nor trusted the workspace.
    """
    named = os.environ.get(WORKSPACE_VARIABLE)
    # If the caller names a configuration file or a folder, ignore the variable.
    if start is None and named:
        return Path(named)
    here = start if start is not None else Path.cwd()
    if not here.exists():
        raise WorkspaceError(
            f"there is no {str(here)!r}. Name a {CONFIG_FILE}, or a folder that holds one or shall hold a workspace."
        )
    config = here if here.is_file() else _nearest(here, [Path(CONFIG_FILE)])
    # The path in the configuration file may be absolute, or relative to the configuration file.
    if config is not None:
        found = config.parent / os.path.expanduser(_path_in(config))
    else:
        sdk_config = nearest_sdk_config(here)
        found = (here if sdk_config is None else project_of(sdk_config)) / DEFAULT_FOLDER
    # If the caller has named a configuration file, trust the workspace in it.
    if not here.is_file() and not is_own(found):
        raise WorkspaceError(
            f"the workspace {str(found)!r} belongs to {_owner(found)}, who could start programs as you with files in it. "
            f"If you trust everybody who can write there: paceline trust {shlex.quote(str(found))}. Else work in another folder."
        )
    if not only_shows and not is_known(found):
        raise WorkspaceError(
            f"you have not made the workspace {str(found)!r} on this machine. Did it come with an archive, a clone or a copy? "
            f"Its files can start programs as you. If you trust it: paceline trust {shlex.quote(str(found))}. Else work "
            f"in another folder, or name another workspace with {WORKSPACE_VARIABLE}."
        )
    return found


def is_known(path: Path) -> bool:
    """Return whether the workspace is empty, or created or named by this user."""
    path = path.expanduser()
    # A folder with only hidden files counts as empty. Paceline writes its mark, a hidden file, into a new workspace first.
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
    """Mark a workspace as made by this user, unless this user has no key."""
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
    """Return this user's private key for workspace marks; None if missing or unsafe."""
    file = state_folder() / "made.key"
    with contextlib.suppress(OSError):
        if create and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".made.{os.urandom(4).hex()}")
            try:
                with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                    opened.write(os.urandom(32))
                # If several processes create the key at the same time, all use the key of the first one.
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
    """Return whether a file belongs to this user or root, is trusted, or is missing."""
    try:
        return path.stat().st_uid in (os.geteuid(), 0) or os.path.realpath(path) in trusted()
    except OSError:
        return True


def trusted() -> list[str]:
    """Return the folders that this user has trusted."""
    file = _trust_file()
    # Check the file's owner, because a user who can write this file could make any workspace trusted.
    try:
        return file.read_text().splitlines() if file.stat().st_uid in (os.geteuid(), 0) else []
    except (OSError, ValueError):
        return []


def trust(path: Path) -> str:
    """Trust another user's folder as a workspace. Return its path without links.

    Raises:
        WorkspaceError: There is no such folder, or the list of trusted folders can't be written.
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
            raise WorkspaceError(f"{str(file)!r} can't be written: {error.strerror}. It keeps your trust.") from error
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
    """Return the nearest configuration file of the Azure SDK, or None.

    `file_name` replaces `config.json` and `project.json`.
    """
    names = (file_name,) if file_name else _SDK_FILES
    return _nearest(folder, [Path(below, name) for below in _SDK_FOLDERS for name in names])


def project_of(sdk_config: Path) -> Path:
    """Return the project folder to which an Azure SDK configuration file belongs."""
    return sdk_config.parent.parent if sdk_config.parent.name in _SDK_FOLDERS else sdk_config.parent


def _nearest(folder: Path, names: Sequence[Path]) -> Path | None:
    """Return the nearest usable file of these names in `folder` or above."""
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
    """Return whether a `config.json` describes an Azure workspace."""
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
        raise WorkspaceError(f"{str(config)!r} can't be read: {error}. Fix it or remove it.") from error
    section = tables.get("workspace", {})
    if not isinstance(section, dict):
        raise WorkspaceError(f'{str(config)!r}: workspace={section!r} is not a table. Write [workspace] path = "dir".')
    if unknown := sorted(set(section) - {"path"}):
        raise WorkspaceError(f"{str(config)!r}: [workspace] has one key, path; found {', '.join(unknown)}. Remove it.")
    # Refuse the file. If Paceline ignored this `path`, runs would go to a folder that the user has not named.
    if "workspace" not in tables and "path" in tables:
        raise WorkspaceError(f"{str(config)!r}: path stands outside of [workspace]. Write [workspace] above it.")
    path = section.get("path", DEFAULT_FOLDER)
    if not isinstance(path, str) or not path:
        raise WorkspaceError(f'{str(config)!r}: workspace.path={path!r} is not a path. Write path = "folder".')
    return path
