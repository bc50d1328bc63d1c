"""Paceline itself on the cluster, as a package of Ray's, where no folder is shared."""

from __future__ import annotations

from pathlib import Path

from paceline.remote.library import library_digest, packed_library
from paceline.targets.ray.client import PACKAGE_BYTES, RayClient


def send_library(client: RayClient, library_dir: Path) -> str:
    """The URI of the package that holds `library_dir`'s Paceline, which the cluster has from now on."""
    # The name follows from the content, so a cluster keeps one package for each version of the library, and only the
    # first run of a version packs and sends it.
    name = f"_ray_pkg_{library_digest(library_dir)[:16]}.zip"
    if not client.has_package(name):
        data = packed_library(library_dir)
        assert len(data) < PACKAGE_BYTES
        client.upload_package(name, data)
    return f"gcs://{name}"
