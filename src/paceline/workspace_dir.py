"""Where the workspace lies that is configured for the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.errors import WorkspaceError

#: Names the workspace's folder, above everything else.
WORKSPACE_VARIABLE = "PACELINE_WORKSPACE"
CONFIG_FILE = "paceline.toml"
DEFAULT_FOLDER = ".paceline"


def configured(start: Path | None = None) -> Path:
    """The workspace's folder, as `Workspace.from_config` says. start: a configuration, or the folder in which to look.

    Raises:
        WorkspaceError: a configuration that can't be read.
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
    if config is None:
        return here / DEFAULT_FOLDER
    # Joined to another path, an absolute one stands alone, so the file may give either kind.
    return config.parent / os.path.expanduser(_path_in(config))


def _nearest_config(folder: Path) -> Path | None:
    for parent in (folder.absolute(), *folder.absolute().parents):
        if (parent / CONFIG_FILE).is_file():
            return parent / CONFIG_FILE
    return None


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
