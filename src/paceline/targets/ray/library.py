"""Paceline itself on the cluster, as a package of Ray's, where no folder is shared."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

from paceline.remote.link.bootstrap import library_digest
from paceline.targets.ray.client import PACKAGE_BYTES, RayClient


def send_library(client: RayClient, library_dir: Path) -> str:
    """The URI of the package that holds `library_dir`'s Paceline, which the cluster has from now on."""
    # By its content, so that a cluster keeps one for each version, and that it is packed for the first run alone.
    name = f"_ray_pkg_{library_digest(library_dir / 'paceline')[:16]}.zip"
    if not client.has_package(name):
        data = packed(library_dir)
        assert len(data) < PACKAGE_BYTES
        client.upload_package(name, data)
    return f"gcs://{name}"


def packed(library_dir: Path) -> bytes:
    """A zip archive of `<library_dir>/paceline`: the same bytes for the same files."""
    top = Path(os.path.realpath(library_dir / "paceline"))
    files = sorted(path for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            info = zipfile.ZipInfo(f"paceline/{path.relative_to(top).as_posix()}", (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return archived.getvalue()
