"""A folder that holds `paceline` and nothing else, for the PYTHONPATH of workers and supervisors.

The run's interpreter need not be the one that submits. Putting the whole site-packages on its path would let every
package of the submitting environment leak in; a folder with one link in it does not.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path


def library_dir(workspace_dir: Path, *, create: bool = True) -> Path:
    """The folder, made on first use: `<workspace>/lib/<which paceline>/`, with a link to this package in it.

    create: make it; with False it may not be there.
    """
    package = Path(__file__).resolve().parents[1]
    # Tells a few installations apart. A digest would load OpenSSL into each supervisor, for nothing else.
    key = f"{zlib.crc32(os.fsencode(package)):08x}"
    folder = workspace_dir / "lib" / key
    link = folder / "paceline"
    if create and not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(package, target_is_directory=True)
    return folder
