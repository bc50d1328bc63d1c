"""Prepare a release, check that tag, version and changelog agree, and build what is uploaded.

    python .ci/release.py prepare 1.2.0   write the version, and move the fragments in changes/ to CHANGELOG.md
    python .ci/release.py check v1.2.0    fail unless the tag, the version everywhere and the changelog's newest part agree
    python .ci/release.py build           build the archives into dist/, check and try them, and print what is left to do

`prepare` needs towncrier, `build` hatchling, twine and check-wheel-contents. `check` is what the release workflow runs.
Nothing here uploads anything or changes git.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: Each file that names the version, and how.
VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/paceline/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}
#: The newest part of the changelog: its version, and its date.
_NEWEST = re.compile(r"^## (\S+), (.+)$", re.MULTILINE)
#: Pages with a paragraph between this mark and `<!-- end -->` that the first release makes false.
_UNPUBLISHED = "<!-- until the first release -->"

STEPS = """\
dist/ has the archives of {version}. Nothing was uploaded. What a person has to do:

0. Before anything else:
{problems}
1. `.ci/run`, or wait for CI on the commit that is to be released.
2. `git tag v{version}` and `git push origin v{version}`: the release workflow checks, builds and uploads.
   It needs the environment `release` of the repository, and this workflow as a trusted publisher at the package index.
   By hand instead: `python -m twine upload dist/*`.
"""


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """Return why this tag must not be released from the files below `root`; empty if it may be."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        return [f"the tag {tag!r} is not of the form v1.2.3 or v1.2.3rc1"]
    version = tag.removeprefix("v")
    found = []
    for name, pattern in VERSIONS.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None or match[1] != version:
            found.append(f"{name} has version {match[1] if match else 'none'}, the tag {version}")
    newest = _NEWEST.search((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if newest is None or newest[1] != version:
        found.append(f"CHANGELOG.md begins with {newest[1] if newest else 'no version'}, the tag is {version}")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2]):
        found.append(f"CHANGELOG.md gives {version} no date, but {newest[2]!r}")
    left = [path.name for path in sorted((root / "changes").glob("*.md")) if path.name != "README.md"]
    if left:
        found.append(f"changes/ still has {', '.join(left)}: run `python .ci/release.py prepare {version}`")
    if "https://example.org/" in (root / "pyproject.toml").read_text(encoding="utf-8"):
        found.append("[project.urls] in pyproject.toml has example.org: write the repository's address there")
    for page in sorted((*root.glob("README*.md"), *root.glob("docs/install.md"))):
        if _UNPUBLISHED in page.read_text(encoding="utf-8"):
            found.append(
                f"{page.relative_to(root)} says that nothing is published: remove the part below {_UNPUBLISHED!r}"
            )
    return found


def pack(kind: str, tree: Path, folder: Path) -> Path:
    """Build an archive of a tree. kind: `wheel` or `sdist`."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder],
        cwd=tree,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (archive,) = folder.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind])
    return archive


def archives(folder: Path, root: Path = ROOT) -> tuple[Path, Path]:
    """Build the source archive, and the wheel from it, as somebody does who has that alone. Return both, the wheel first."""
    source = pack("sdist", root, folder)
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(source) as archive:
            # Python 3.11.2, Debian 12's own, has no filters yet, and later releases warn of a call without.
            filters: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(unpacked, **filters)
        (tree,) = Path(unpacked).iterdir()
        return pack("wheel", tree, folder), source


def build(root: Path = ROOT) -> None:
    """Build into dist/, check, install and try the archives, and print what is left to do."""
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    wheel, source = archives(dist, root)
    scripts = Path(sys.executable).parent
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, source], check=True)
    subprocess.run([scripts / "check-wheel-contents", wheel], cwd=root, check=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "venv")
        subprocess.run(
            [scripts / "uv", "venv", "--quiet", "--no-project", "--python", sys.executable, place], check=True
        )
        subprocess.run(
            [scripts / "uv", "pip", "install", "--quiet", "--python", place / "bin/python", wheel], check=True
        )
        subprocess.run(
            [place / "bin/paceline", "run", "--quiet", "python", "--", "-c", "import paceline"], cwd=folder, check=True
        )
    version = wheel.name.split("-")[1]
    print(
        STEPS.format(
            version=version,
            problems="\n".join(f"   - {text}" for text in problems(f"v{version}", root)) or "   - nothing",
        )
    )


def prepare(version: str, root: Path = ROOT) -> None:
    """Write the version into every file that names it, and the fragments into the changelog."""
    for name, pattern in VERSIONS.items():
        text = (root / name).read_text(encoding="utf-8")
        line = re.search(pattern, text, re.MULTILINE)
        assert line is not None, f"{name} names a version"
        (root / name).write_text(text[: line.start(1)] + version + text[line.end(1) :], encoding="utf-8")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    words = ["build", "--yes", "--version", version, "--date", f"{today}"]
    subprocess.run([sys.executable, "-m", "towncrier", *words], cwd=root, check=True)


def main(words: list[str]) -> int:
    if words == ["build"]:
        build()
        return 0
    if len(words) != 2 or words[0] not in ("prepare", "check"):
        print(__doc__, file=sys.stderr)
        return 2
    if words[0] == "prepare":
        prepare(words[1])
        return 0
    found = problems(words[1])
    for text in found:
        print(text, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
