"""Markdown of notes becomes HTML that can do nothing."""

from __future__ import annotations

import re

import pytest

from paceline.ui.markup import render_markdown
from tests.ui.conftest import HOSTILE


def html(text: str) -> str:
    return render_markdown(text, has_only_web_links=True)


def test_markdown_has_headings_lists_tables_and_links() -> None:
    made = html(
        "# A\n\n- one\n- ~~two~~\n\n|a|b|\n|-|-|\n|1|2|\n\n[docs](https://example.org/?a=1&b=2) <mailto:a@b.org>"
    )
    for words in ("<h1>A</h1>", "<li>one</li>", "<s>two</s>", "<td>2</td>", 'href="mailto:a@b.org"'):
        assert words in made
    assert '<a href="https://example.org/?a=1&amp;b=2" rel="noreferrer noopener nofollow">docs</a>' in made


@pytest.mark.parametrize(
    "text",
    [
        HOSTILE,
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt&colon;alert(1))",
        "[x](&#106;avascript:alert(1))",
        "[x](java\tscript:alert(1))",
        "[x](data:text/html;base64,PHNjcmlwdD4=)",
        "[x](vbscript:x)",
        "[x](file:///etc/passwd)",
        "[x](//evil.example)",
        "[x](../../runs/a/cancel)",
        "<javascript:alert(1)>",
        "<img src=x onerror=alert(1)>",
        "![x](http://evil.example/pixel.png)",
        "[x]: javascript:alert(1)\n\n[x]",
        '[x](https://a.example "\\"><script>alert(1)</script>")',
        "<a href='x' onclick='alert(1)'>x</a>",
        "<!-- --><svg/onload=alert(1)>",
    ],
)
def test_hostile_markdown_is_rendered_without_scripts(text: str) -> None:
    made = html(text)
    tags = re.findall(r"<(\w+)([^>]*)>", made)
    assert {name for name, _ in tags} <= {"p", "a", "code"}
    assert all(re.match(r' href="https?:', rest) for name, rest in tags if name == "a")
    assert "\x1b" not in made
