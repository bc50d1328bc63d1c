"""Paceline itself, as it is sent to machines that do not have it: one list of its files, one hash of them, one archive."""

from __future__ import annotations

import functools
import io
import os
import threading
import zipfile
from pathlib import Path

from paceline.remote.agent import boot

_one_at_a_time = threading.Lock()


def library_files(library_dir: Path) -> dict[str, Path]:
    """Name in an archive, "paceline/errors.py" -> file, in order of name; without what Python makes of them."""
    top = Path(os.path.realpath(library_dir / "paceline"))
    files = (path for path in sorted(top.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {f"paceline/{path.relative_to(top).as_posix()}": path for path in files}


def library_digest(library_dir: Path) -> str:
    """The hash of the library as it was when this process first asked: all nodes of a run have the same, though another
    version may be installed here while it runs.
    """
    with _one_at_a_time:  # the nodes' threads ask at the same time
        return _digest(library_dir)


@functools.cache
def _digest(library_dir: Path) -> str:
    found = boot.digest_in(str(library_dir))
    assert found, f"no library in {library_dir}"
    return found


def packed_library(library_dir: Path) -> bytes:
    """A zip archive of `<library_dir>/paceline`: the same bytes for the same files.

    Ray takes nothing else, and a node unpacks it in a fifth of the time of a tar.gz, which is a quarter smaller.
    """
    with _one_at_a_time:
        return _packed(library_dir, _digest(library_dir))


@functools.lru_cache(maxsize=1)
def _packed(library_dir: Path, digest: str) -> bytes:
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in library_files(library_dir).items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return archived.getvalue()
