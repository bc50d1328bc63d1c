"""A conda channel that the tests make: small packages, one with its prefix embedded, noarch Python ones, a stand-in Python."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: A build prefix as long as those of conda, which pads them so that longer real prefixes fit in.
PLACEHOLDER = "/opt/placeholder" + "_placehold" * 20


class Channel:
    """A folder that is a channel; `add` puts a package into it, `write` its index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index: dict[str, dict[str, Any]] = {"noarch": {}, "linux-64": {}}
        for subdir in self._index:
            (folder / subdir).mkdir(parents=True)

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def path(self, name: str, version: str) -> Path:
        """Where the archive of a package lies."""
        return next(self.folder.glob(f"*/{name}-{version}-0.tar.bz2"))

    def add(
        self,
        name: str,
        version: str,
        files: Mapping[str, bytes],
        depends: Sequence[str] = (),
        *,
        links: Mapping[str, str] | None = None,
        noarch: str | None = "generic",
        entry_points: Sequence[str] = (),
    ) -> None:
        subdir = "noarch" if noarch else "linux-64"
        index: dict[str, Any] = {
            **{"name": name, "version": version, "build": "0", "build_number": 0, "depends": list(depends)},
            **{"subdir": subdir, "license": "MIT", "timestamp": 1},
            **({"noarch": noarch} if noarch else {}),
        }
        paths: list[dict[str, Any]] = []
        for path, content in files.items():
            digest = hashlib.sha256(content).hexdigest()
            entry = {"_path": path, "path_type": "hardlink", "sha256": digest, "size_in_bytes": len(content)}
            if PLACEHOLDER.encode() in content:
                entry |= {"prefix_placeholder": PLACEHOLDER, "file_mode": "binary" if b"\0" in content else "text"}
            paths.append(entry)
        paths += [{"_path": path, "path_type": "softlink", "size_in_bytes": 0} for path in links or {}]
        inside = {
            **files,
            "info/index.json": json.dumps(index).encode(),
            "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}).encode(),
            "info/about.json": b"{}",
            "info/files": "\n".join([*files, *(links or {})]).encode(),
        }
        if noarch == "python":
            link = {"noarch": {"type": "python", "entry_points": list(entry_points)}, "package_metadata_version": 1}
            inside["info/link.json"] = json.dumps(link).encode()
        archive = self.folder / subdir / f"{name}-{version}-0.tar.bz2"
        with tarfile.open(archive, "w:bz2") as tar:
            for path, content in inside.items():
                member = tarfile.TarInfo(path)
                member.size = len(content)
                member.mode = 0o755 if path.startswith("bin/") else 0o644
                tar.addfile(member, io.BytesIO(content))
            for path, target in (links or {}).items():
                member = tarfile.TarInfo(path)
                member.type, member.linkname = tarfile.SYMTYPE, target
                tar.addfile(member)
        data = archive.read_bytes()
        digests = {"md5": hashlib.md5(data).hexdigest(), "sha256": hashlib.sha256(data).hexdigest()}
        self._index[subdir][archive.name] = {**index, **digests, "size": len(data)}
        self.write()

    def write(self) -> None:
        for subdir, packages in self._index.items():
            index = {"info": {"subdir": subdir}, "packages": packages, "packages.conda": {}, "repodata_version": 1}
            (self.folder / subdir / "repodata.json").write_text(json.dumps(index))


def make_channel(folder: Path) -> Channel:
    """hello (its prefix embedded), app (needs hello), python (a stand-in: this interpreter below the environment's prefix),
    greet (noarch Python, with a program), broken (needs what there is not)."""
    channel = Channel(folder)
    script = f"#!/bin/sh\necho hello from {PLACEHOLDER}\n".encode()
    binary = b"\x7fELF\0" + f"{PLACEHOLDER}/share".encode() + b"\0" * 8
    channel.add("hello", "1.0", {"bin/hello": script, "lib/hello.bin": binary})
    channel.add("hello", "1.1", {"bin/hello": script.replace(b"hello from", b"hello again from")})
    channel.add("app", "2.0", {"share/app.txt": b"app"}, ["hello >=1"])
    channel.add("broken", "1.0", {"share/broken.txt": b""}, ["nowhere-to-be-found >=3"])
    real = os.path.realpath(sys.executable)
    version = ".".join(map(str, sys.version_info[:3]))
    minor = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    home = f"home = {os.path.dirname(real)}\ninclude-system-site-packages = false\nversion = {version}\n"
    channel.add(
        "python",
        version,
        {"pyvenv.cfg": home.encode(), f"lib/{minor}/site-packages/README.txt": b""},
        links={f"bin/{minor}": real, "bin/python": minor, "bin/python3": minor},
        noarch=None,
    )
    channel.add(
        "greet",
        "0.3",
        {
            "site-packages/greet.py": b"import sys\ndef main():\n    print('greetings from', sys.prefix)\n",
            "site-packages/greet-0.3.dist-info/METADATA": b"Metadata-Version: 2.1\nName: greet\nVersion: 0.3\n",
            "site-packages/greet-0.3.dist-info/INSTALLER": b"conda\n",
        },
        ["python"],
        noarch="python",
        entry_points=["greet = greet:main"],
    )
    return channel
