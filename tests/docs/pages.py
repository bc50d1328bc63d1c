"""The documentation as data: pages, their headings, tables, links and blocks of code."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = (README, *sorted(ROOT.glob("README.*.md")), ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))

#: Pattern of an optional HTML comment and the fenced block below it, which may be indented in a list.
_FENCE = re.compile(
    r"(?:^[ ]*<!-- (?P<note>[^\n]*?) -->\n\s*?)?^(?P<indent>[ ]*)```(?P<info>[^`\n]*)\n(?P<text>.*?)^[ ]*```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
#: Pattern of a Markdown link. Its group is the target.
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    note: text of the comment above it, such as `<!-- not run: it needs a cluster -->`.
    line: the number of its first line in its page.
    """

    language: str
    text: str
    note: str = ""
    line: int = field(default=0, compare=False)


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The page's blocks of code, of one language or of all."""
    text = page.read_text()
    found = [
        Block(
            match["info"].strip(),
            textwrap.dedent(match["text"]),
            match["note"] or "",
            text.count("\n", 0, match.start("info")) + 1,
        )
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Where the page's links lead, as written."""
    return LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may have behind its `#`."""
    return {re.sub(r"[^\w\- ]", "", match[2].lower()).replace(" ", "-") for match in _HEADING.finditer(prose(page))}


def section(page: Path, heading: str) -> str:
    """The text under a heading, up to the next heading of any level.

    Raises:
        LookupError: the page has no such heading.
    """
    text = prose(page)
    headings = [*_HEADING.finditer(text), None]
    for match, after in pairwise(headings):
        if match is not None and match[2] == heading:
            return text[match.end() : after.start() if after is not None else len(text)]
    raise LookupError(f"{page.name} has no heading {heading!r}")


def tables(text: str) -> list[list[tuple[str, ...]]]:
    """The tables in a text, each as its rows without the header; a cell is its text."""
    found: list[list[tuple[str, ...]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
        elif not inside:
            inside = True
            found.append([])
        elif not re.fullmatch(r"\|[-| ]+\|", line):
            found[-1].append(tuple(cell.strip() for cell in line.strip("|").split(" |")))
    return found


def code_words(text: str) -> list[str]:
    """Return the texts in backticks."""
    return _CODE.findall(text)


def first_column(text: str) -> list[str]:
    """Return the texts in backticks in the first column of all tables."""
    return [word for table in tables(text) for row in table for word in code_words(row[0])]
