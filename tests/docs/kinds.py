"""The kind of a block of a page, by its language, its first line and the comment above it."""

from __future__ import annotations

import re
import shlex
from enum import Enum

from paceline.cli.verbs import VERBS
from tests.docs.pages import Block


class Kind(Enum):
    """What a test does with a block."""

    FILE = "written into the reader's folder under the name in its first line"
    PYTHON = "executed, after those above it, with their names"
    CONSOLE = "typed into a shell, and what it prints compared with what is shown"
    CHECKED = "not run: its commands are parsed, its names and calls looked up"
    SH = "commands of make and pip, whose targets and extras are looked up"
    DATA = "read by the parser of its format"
    OUTPUT = "not touched"


_NAMED = re.compile(r"# (?P<name>[\w./-]+\.(?:py|yaml|toml|txt))\n")
_NOT_RUN = re.compile(r"not run: \S.*")
_CODE = re.compile(r"exits with (\d+)")
_STAYS = "ends with Ctrl-C"
_COMMAND = re.compile(r"(?:\$ .*|(?:paceline|python|pip|torchrun|horovodrun|curl|podman|docker|ssh|sbatch) .*)")
_PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\.\.\.|-> ")

HOW = """\
A block is one of these:
  ```python    executed, in the page's order, all of a page in one namespace; what stands in a comment behind a `print(...)` of a
               line of its own is what it has to print
  ```python, ```yaml, ```toml or ```text with `# NAME.py` (.yaml, .toml, .txt) as its first line: a file, which the page uses
  ```console   lines `$ command`, each with what it prints below it; `...` for what changes
  ```sh        `make` and `pip install` alone
  ```toml, ```yaml, ```json, which are read
  ```text      what is printed, drawn, or a form with PLACEHOLDERS
A comment on the line above may say `<!-- not run: WHY -->` (then names, calls and options are looked up),
`<!-- exits with 1 -->`, or `<!-- ends with Ctrl-C -->` for a command that stays in the foreground.
What a page supposes to be there is set up in tests/docs/scenes.py."""


def kind_of(block: Block) -> Kind:
    """Return what a test does with the block.

    Raises:
        AssertionError: no kind fits the block; the message says what to write.
    """
    assert block.note in ("", _STAYS) or _NOT_RUN.fullmatch(block.note) or _CODE.fullmatch(block.note), (
        f"the comment {block.note!r} above a block. {HOW}"
    )
    is_run = not _NOT_RUN.fullmatch(block.note)
    if block.language in ("python", "yaml", "toml", "text") and name_of(block) and is_run:
        return Kind.FILE
    if block.language == "python":
        return Kind.PYTHON if is_run else Kind.CHECKED
    if block.language == "console":
        assert block.text.startswith("$ "), f"a console block begins with `$ ` and a command. {HOW}"
        return Kind.CONSOLE if is_run else Kind.CHECKED
    if block.language == "text":
        for line in block.text.splitlines():
            assert not _is_command(line), f"{line!r} is a command, and nobody would see that it works. {HOW}"
        return Kind.OUTPUT
    if block.language == "sh":
        return Kind.SH
    assert block.language in ("toml", "yaml", "json"), f"a block of the language {block.language!r}. {HOW}"
    return Kind.DATA


def _is_command(line: str) -> bool:
    if not _COMMAND.fullmatch(line):
        return False
    if not _PLACEHOLDER.search(line):
        return True
    words = shlex.split(line)
    return words[0] == "paceline" and words[1] not in VERBS


def name_of(block: Block) -> str | None:
    """The file that the block is, if it says so."""
    match = _NAMED.match(block.text)
    return match["name"] if match else None


def exit_code(block: Block) -> int:
    """With what the block's commands end."""
    match = _CODE.fullmatch(block.note)
    return int(match[1]) if match else int("Failed in" in block.text)


def stays(block: Block) -> bool:
    """Return whether the block's command runs until Ctrl-C."""
    return block.note == _STAYS


def typed(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    continues = False
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif continues:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        else:
            found[-1][1].append(line)
        continues = line.endswith("\\") and not found[-1][1]
    return found
