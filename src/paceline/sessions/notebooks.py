"""Copy a session's notebooks to the run's outputs, and to its checkpoints, from which the next session restores them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.system.files import copy_whole, gone_is_fine

#: Name of the folder with copies of the notebooks, in the run's checkpoints and in the run's outputs.
_FOLDER = "notebooks"
#: Don't search these folders for notebooks: the run keeps `outputs` anyway, and users write none into the others.
_OTHERS = frozenset((".ipynb_checkpoints", ".git", "outputs", "node_modules", "__pycache__"))


class Notebooks:
    """The notebooks below the folder of a session.

    Args:
        work: Folder of the session.
        checkpoints, outputs: Folders of the run, to which notebooks are copied.
    """

    def __init__(self, work: Path, checkpoints: Path, outputs: Path) -> None:
        self._work = work
        self._kept = (checkpoints / _FOLDER, outputs / _FOLDER)
        self._seen: dict[str, tuple[int, int]] = dict(self._stamps())

    def restore(self) -> None:
        """Copy the notebooks of an earlier attempt or session into the session's folder."""
        kept = self._kept[0]
        if kept.is_dir():
            shutil.copytree(kept, self._work, dirs_exist_ok=True)
            print(
                f"paceline: {sum(1 for _ in kept.rglob('*.ipynb'))} notebooks of the earlier session are back",
                flush=True,
            )

    def keep(self) -> bool:
        """Copy new and changed notebooks to checkpoints and outputs. Return whether any changed."""
        changed = [(name, stamp) for name, stamp in self._stamps() if self._seen.get(name) != stamp]
        for name, stamp in changed:
            with gone_is_fine():
                for folder in self._kept:
                    copy_whole(self._work / name, folder / name)
                self._seen[name] = stamp
        return bool(changed)

    def _stamps(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for folder, names, files in os.walk(self._work):
            names[:] = [name for name in names if name not in _OTHERS]
            for file in files:
                if file.endswith(".ipynb"):
                    with gone_is_fine():
                        stat = os.lstat(path := os.path.join(folder, file))
                        yield os.path.relpath(path, self._work), (stat.st_mtime_ns, stat.st_size)
