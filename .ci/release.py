"""Prepare a release, and check that tag, version and changelog agree.

    python .ci/release.py prepare 1.2.0   write the version, and move the fragments in changes/ to CHANGELOG.md
    python .ci/release.py check v1.2.0    fail unless the tag, the version everywhere and the changelog's newest part agree

`prepare` needs towncrier; `check` is what the release workflow runs. Commit what `prepare` wrote, tag the commit, push the tag.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Each file that names the version, and how.
VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/paceline/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}
#: The newest part of the changelog: its version, and its date.
_NEWEST = re.compile(r"^## (\S+), (.+)$", re.MULTILINE)


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
    return found


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
