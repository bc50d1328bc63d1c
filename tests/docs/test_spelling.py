"""The words of the pages are spelled right."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.docs.test_translations import TRANSLATIONS
from tests.engines.conftest import require_engine


def misspelled(pages: list[Path]) -> str:
    """What codespell says of them, a line for each word."""
    require_engine("codespell", find_spec("codespell_lib") is not None)
    # `aci` and `aks` are names of Azure services.
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", "aci,aks", *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout


@pytest.mark.promise("pages-words-spelled-right")
def test_no_page_has_a_misspelled_word() -> None:
    english = [*(set(PAGES) - set(TRANSLATIONS)), ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
    assert misspelled(sorted(english)) == ""


def test_misspelled_word_on_a_page_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A worker that is seperate.\n")
    assert "separate" in misspelled([page])
