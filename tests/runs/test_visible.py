from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runs.visible import TerminalLines, visible, visible_line

RED, RESET = "\x1b[31m", "\x1b[0m"

# (text, its form in a table, its form as a log line on a terminal)
NASTY = [
    ("plain, größe, 漢字, 🙂", "plain, größe, 漢字, 🙂", "plain, größe, 漢字, 🙂"),
    (
        "👩\u200d💻 soft\u00adhyphen nb\u00a0sp",
        "👩\u200d💻 soft\u00adhyphen nb\u00a0sp",
        "👩\u200d💻 soft\u00adhyphen nb\u00a0sp",
    ),
    ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m", "\x1b[31mred\x1b[0m"),
    ("\x1b[2J\x1b[Hgone", "\\x1b[2J\\x1b[Hgone", "gone"),
    ("\x1b]0;title\x07x", "\\x1b]0;title\\x07x", "x"),
    ("\x1b]0;title\x1b\\x", "\\x1b]0;title\\x1b\\x", "x"),
    ("\x1b]52;c;cm0gLXJm\x07x", "\\x1b]52;c;cm0gLXJm\\x07x", "x"),
    ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "\\x1b]8;;http://a\\x1b\\link\\x1b]8;;\\x1b\\", "link"),
    ("\x1b]0;no end", "\\x1b]0;no end", "\\x1b]0;no end"),
    ("\x1bP1;2q#0\x1b\\x", "\\x1bP1;2q#0\\x1b\\x", "x"),
    ("\x1bcreset", "\\x1bcreset", "reset"),
    ("\x1b(0lqk\x1b(B", "\\x1b(0lqk\\x1b(B", "lqk"),
    ("\x1b7\x1b8\x1b", "\\x1b7\\x1b8\\x1b", "\\x1b"),
    ("\x1b[?1049h\x1b[?25lx\x1b[K\x1b[1A", "\\x1b[?1049h\\x1b[?25lx\\x1b[K\\x1b[1A", "x"),
    ("\x9b2Jx\x9dtitle\x9cy", "\\x9b2Jx\\x9dtitle\\x9cy", "xy"),
    (
        "bell\x07 nul\x00 form\x0c del\x7f nel\x85",
        "bell\\x07 nul\\x00 form\\x0c del\\x7f nel\\x85",
        "bell\\x07 nul\\x00 form\\x0c del\\x7f nel\\x85",
    ),
    ("12\b\b34", "12\\x08\\x0834", "1234"),
    ("a\tb", "a\\tb", "a\tb"),
    ("a\nb", "a\\nb", "a\\nb"),
    ("50%\r", "50%\\r", "50%\\r"),
    ("user\u202enimda\u2066x\u2029y", "user\\u202enimda\\u2066x\\u2029y", "user\\u202enimda\\u2066x\\u2029y"),
    ("byte \udcff, half \ud800", "byte \\xff, half \\ud800", "byte \\xff, half \\ud800"),
]


@pytest.mark.parametrize(("text", "in_a_table", "in_a_log"), NASTY, ids=[ascii(text) for text, _, _ in NASTY])
def test_control_characters_are_escaped_and_cursor_moves_removed(text, in_a_table, in_a_log):
    assert visible(text) == in_a_table
    assert visible_line(text) == in_a_log


def test_a_text_of_several_lines_keeps_its_lines_and_tabs():
    assert visible("a\r\n\tb\x1b[2J\rc\n", lines=True) == "a\n\tb\\x1b[2J\\rc\n"


@pytest.mark.promise("nothing-terminal-obeys-gets-through")
@given(
    st.text(alphabet=st.characters(blacklist_categories=()), max_size=40)
    | st.text("\x1b[]0;m\x07\x9b\\P(Kx", max_size=30)
)
def test_escaped_text_has_no_control_characters(text):
    assert not set(visible(text)) & {chr(code) for code in (*range(32), *range(0x7F, 0xA0))}
    rest = visible_line(text)
    for piece in rest.split("\x1b")[1:]:
        head, end, _ = piece.partition("m")
        assert end, rest
        assert set(head) <= set("[0123456789;:"), rest
    visible(text).encode()  # encoding fails if a lone surrogate is left
    rest.encode()
    json.dumps(rest)


def test_colors_of_one_rank_do_not_leak_to_other_lines():
    lines = TerminalLines()
    assert lines.line(0, f"{RED}first") == f"{RED}first{RESET}"
    assert lines.line(1, "other") == "other"
    assert lines.line(0, "second") == f"{RED}second{RESET}"
    assert lines.line(0, f"third{RESET}, plain") == f"{RED}third{RESET}, plain"
    assert lines.line(0, "fourth") == "fourth"
    assert lines.line(0, "\x1b[1m\x1b[31mboth") == f"\x1b[1m{RED}both{RESET}"
    assert lines.line(0, "\x1b[0;32mgreen") == f"\x1b[1m{RED}\x1b[0;32mgreen{RESET}"
    assert lines.line(0, "x") == f"\x1b[0;32mx{RESET}"


def test_repeated_color_codes_do_not_make_a_terminal_line_longer_than_1000_characters():
    lines = TerminalLines()
    for _ in range(1000):
        found = lines.line(0, "\x1b[38;2;1;2;3mx")
    assert len(found) < 1000
