"""Pages for contributors name files that exist, and leave no folder of the source out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paceline"
PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
_NAME = re.compile(r"(?:src/paceline/)?((?:\w+/)+|(?:\w+/)*\w+\.py)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_named_on_a_contributor_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # Contributor pages name files in backticks. These paths are relative to src/paceline, or to a folder that the page
    # names as `src/paceline/FOLDER/`.
    houses = [SOURCE, *(SOURCE / name for name in re.findall(r"`src/paceline/([\w/]+)/`", text))]
    names = {match[1] for span in re.findall(r"`([^`\n]+)`", text) if (match := _NAME.fullmatch(span))}
    for name in sorted(names):
        if name.startswith("tests/") or (ROOT / name).exists():
            continue
        below = [house / name for house in houses] + [*SOURCE.rglob(name)]
        assert any(path.exists() for path in below), f"{page.name} names {name}, which is not in the source"


def test_architecture_page_has_a_table_row_for_each_folder_and_module_of_the_package() -> None:
    text = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([\w.]+)/?` \| .+ \|$", text, re.MULTILINE))
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    files = {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("_")}
    assert rows >= folders | files
