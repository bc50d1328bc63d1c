"""init, examples, docs: the documentation and its examples, which the package contains."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import print_json, print_table
from paceline.cli.options import JSON, VerbOption, takes
from paceline.cli.verb_help import installed, page_files
from paceline.errors import UserError
from paceline.system.names import counted, did_you_mean

if TYPE_CHECKING:
    from paceline.cli.outputs import ExampleRow, WrittenFolder

#: The example that `init` copies to a new folder.
_START = "start"


@takes(VerbOption("folder", "Folder to write to; default: the current one.", "[DIR]", Path, default=Path()), JSON)
def init(*, folder: Path, as_json: bool) -> None:
    """Write a folder with a first script that runs.

    The script needs no other package. Also writes a job file, a sweep file and an ignore file. Existing files stay.
    """
    names = _copy(installed("examples") / _START, folder)
    if as_json:
        written: WrittenFolder = {"folder": str(folder), "files": names}
        print_json(written)
        return
    print(f"{counted(len(names), 'file')} written to {folder}: {', '.join(names)}")
    enter = f"cd {folder} && " if folder != Path() else ""
    print(
        f"Run it:     {enter}paceline run train.py -- --rate 0.3\nSee it:     {enter}paceline ui\n"
        f"Tune it:    {enter}paceline sweep run sweep.yaml",
        file=sys.stderr,
    )


@takes(
    VerbOption("name", "The example to copy; default: list all.", "[NAME]", complete="examples"),
    VerbOption("--to", "Folder to copy to; default: ./NAME.", "DIR", Path),
    JSON,
)
def examples(*, name: str | None, to: Path | None, as_json: bool) -> None:
    """List the examples, or copy one to a folder."""
    top = installed("examples")
    known = _abouts(path.name for path in sorted(top.iterdir()) if path.is_dir())
    if name is None:
        if as_json:
            rows: list[ExampleRow] = [{"name": key, "about": text} for key, text in known.items()]
            print_json(rows)
        else:
            print_table(("EXAMPLE", "ABOUT"), list(known.items()))
        return
    if name not in known:
        raise UserError(
            f"there is no example {name!r}.{did_you_mean(name, known)} `paceline examples` lists them: {', '.join(known)}."
        )
    folder = to or Path(name)
    names = _copy(top / name, folder)
    if as_json:
        copied: WrittenFolder = {"folder": str(folder), "files": names}
        print_json(copied)
    else:
        print(f"{counted(len(names), 'file')} copied to {folder}.")
        if missing := _not_installed(folder, names):
            print(f"Install what it needs: pip install {' '.join(missing)}", file=sys.stderr)


@takes(VerbOption("topic", "Page, heading, or PAGE#HEADING; default: list the pages.", "[TOPIC]", complete="topics"))
def docs(*, topic: str | None) -> None:
    """Print a page of the documentation, or the list of pages.

    On a terminal the page opens in your pager. The pages are a part of Paceline, so no network is needed.
    """
    pages = {path.stem: path.read_text(encoding="utf-8") for path in page_files()}
    if topic is None:
        print_table(("TOPIC", "PAGE"), [(name, text.partition("\n")[0].lstrip("# ")) for name, text in pages.items()])
        return
    found = _lookup(topic, pages)
    if found is None:
        words = [*pages, *(section.slug for text in pages.values() for section in _sections(text))]
        hint = did_you_mean(_slug(topic), dict.fromkeys(words), most=3)
        raise UserError(f"there is no page or heading {topic!r}.{hint} `paceline docs` lists the pages.")
    _show(re.sub(r"<!--.*?-->\n?", "", found, flags=re.DOTALL).strip())


@dataclass(frozen=True)
class _Section:
    """A section of a page: its heading, and the text below it."""

    slug: str
    words: tuple[str, ...]
    text: str


def _sections(page: str) -> Iterator[_Section]:
    lines = page.splitlines()
    # Skip code blocks, in which a comment begins with # as a heading does.
    in_code, heads = False, []
    for number, line in enumerate(lines):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and (match := re.match(r"(#+) (.+)", line)):
            heads.append((number, len(match[1]), match[2]))
    for number, level, title in heads:
        end = next((at for at, other, _ in heads if at > number and other <= level), len(lines))
        yield _Section(_slug(title), tuple(map(_slug, title.split(", "))), "\n".join(lines[number:end]))


def _lookup(topic: str, pages: dict[str, str]) -> str | None:
    name, _, heading = topic.lower().removesuffix(".md").partition("#")
    if name in pages and not heading:
        return pages[name]
    chosen = {name: pages[name]} if name in pages else {} if heading else pages
    slug = _slug(heading or name)
    for matches in (lambda section: section.slug == slug, lambda section: slug in section.words):
        # Search the page "Command line" first, because most topics are names of commands.
        for text in sorted(chosen.values(), key=lambda text: not text.startswith("# Command line")):
            if found := next(filter(matches, _sections(text)), None):
                return found.text
    begin = [page for page in pages if page.startswith(name)]
    return pages[begin[0]] if len(begin) == 1 and not heading else None


def _slug(title: str) -> str:
    """Return the anchor of a heading, in the form that GitHub gives it."""
    return re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-")


def _show(text: str) -> None:
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    # LESS=FRX makes the pager `less` keep colours, and exit at once if the page fits the screen, as git does.
    os.environ.setdefault("LESS", "FRX")
    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text))


def _abouts(names: Iterable[str]) -> dict[str, str]:
    """Return each example's description in docs/examples.md, by name; "" if missing."""
    page = (installed("docs") / "examples.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|\n]*`[^|\n]*) \| (.*) \|$", page, re.MULTILINE)
    texts = {
        name: re.sub(r"\[(.*?)\]\(.*?\)|`", r"\1", text) for cell, text in rows for name in re.findall("`(.*?)`", cell)
    }
    return {name: texts.get(name, "")[:1].upper() + texts.get(name, "")[1:] for name in names}


def _not_installed(folder: Path, files: Sequence[str]) -> list[str]:
    """Return the packages that an example's programs import and this interpreter lacks."""
    from paceline.supervisor.diagnosis.hints import DISTRIBUTIONS

    shims = (Path(__file__).parents[1] / "compat" / "shim").glob("*/*")
    there = {*(Path(word).stem for name in files for word in Path(name).parts), *(path.stem for path in shims)}
    imported: set[str] = set()
    for name in files:
        for node in ast.walk(ast.parse((folder / name).read_bytes())) if name.endswith(".py") else ():
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    return sorted(DISTRIBUTIONS.get(name, name) for name in imported - there if find_spec(name) is None)


def _copy(example: Path, folder: Path) -> list[str]:
    found = (path.relative_to(example) for path in example.rglob("*") if path.is_file())
    names = sorted(path.as_posix() for path in found if "__pycache__" not in path.parts)
    if there := [name for name in names if os.path.lexists(folder / name)]:
        raise UserError(f"{str(folder / there[0])!r} exists already, and stays unchanged. Name an empty or new folder.")
    try:
        shutil.copytree(example, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    except OSError as error:
        raise UserError(f"{str(folder)!r} can't be written: {error.strerror or error}. Name another folder.") from error
    return names
