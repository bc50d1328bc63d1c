"""Pages in other languages say what the English ones say: the same code, headings, pictures, tables and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, LINK, ROOT, blocks, code_words, prose, tables

LANGUAGES = ("es", "pt", "ru")
TRANSLATIONS = sorted(
    page for language in LANGUAGES for page in (*DOCS.rglob(f"*.{language}.md"), *ROOT.glob(f"README.{language}.md"))
)

by_translation = pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: str(page.relative_to(ROOT)))


def english(page: Path) -> Path:
    """The page that this one is a translation of."""
    return page.with_name(f"{page.name.split('.')[0]}.md")


def test_translated_pages_exist_in_each_language() -> None:
    names = {english(page) for page in TRANSLATIONS}
    assert {page.name[:3] for page in names} == {"REA", "con", "01-", "02-"}
    assert len(TRANSLATIONS) == len(names) * len(LANGUAGES)


@pytest.mark.promise("front-page-two-tutorials-page")
@by_translation
def test_translated_page_has_the_same_code_blocks_as_the_english_page(page: Path) -> None:
    assert blocks(page) == blocks(english(page))


@pytest.mark.promise("front-page-two-tutorials-page")
@by_translation
def test_translated_page_has_the_same_structure_as_the_english_page(page: Path) -> None:
    assert shape(page) == shape(english(page))


def shape(page: Path) -> dict[str, object]:
    """What of a page does not depend on its language."""
    text = prose(page)
    # Pictures exist in each language, and each page links to its translations. So remove the language from links.
    neutral = [re.sub(r"\.(es|pt|ru)\.", ".", link) for link in LINK.findall(text)]
    return {
        "levels of headings": re.findall(r"^#+", text, re.MULTILINE),
        "links": neutral,
        "words in backticks": code_words(text),
        "rows of tables": [len(table) for table in tables(text)],
        "items of lists": len(re.findall(r"^- ", text, re.MULTILINE)),
    }
