"""Wheels that the tests make, so that no index is needed."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    *,
    code: str = "",
    files: Mapping[str, str] | None = None,
    programs: Mapping[str, str] | None = None,
) -> Path:
    """A wheel of one module that knows its VERSION. programs: name -> "module:function"."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    extras = sorted({text.partition('extra == "')[2].partition('"')[0] for text in requires if "extra ==" in text})
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {text}" for text in requires]
    inside = {
        f"{module}.py": f"VERSION = {version!r}\n{code}",
        **(files or {}),
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if programs:
        lines = "".join(f"{program} = {target}\n" for program, target in programs.items())
        inside[f"{info}/entry_points.txt"] = f"[console_scripts]\n{lines}"
    record = [f"{path},sha256={_digest(content)},{len(content.encode())}" for path, content in inside.items()]
    inside[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in inside.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), content)
    return wheel


def unpack(wheel: Path, site_packages: Path) -> None:
    """Install a wheel of this kind by hand."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)


def _digest(content: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
