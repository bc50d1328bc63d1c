"""The scripts and styles of the web page as texts, to put into HTML that then needs no other file."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.sweeps.pictures import draw as pictures

STATIC = Path(__file__).parent / "static"
#: Name of a file that both pages and exported pictures use -> the file's path.
SHARED = {path.name: path for path in (pictures.SCRIPT, pictures.STYLE)}
_STATIC_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";', re.MULTILINE)
_LATE_IMPORT = re.compile(r'await import\("\./(\w+\.js)"\)')
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Inlined:
    """An inline script or style. allowed: its hash for a Content-Security-Policy."""

    text: str

    @property
    def allowed(self) -> str:
        digest = hashlib.sha256(self.text.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def styles(*names: str) -> Inlined:
    """Return the page's style sheets with these names as one text."""
    return Inlined(_closed("\n".join(_source(name) for name in names)))


@cache
def classic(*names: str) -> Inlined:
    """Return scripts of the page that are not JavaScript modules, as one text."""
    return Inlined(_closed("\n".join(_source(name) for name in names)))


@cache
def modules(first: str) -> Inlined:
    """Return a JavaScript module and all its imports as one script.

    In the script, each module is a function that its first import calls.
    """
    waiting, made = [first], dict[str, str]()
    while waiting:
        name = waiting.pop()
        if name not in made:
            source = _source(name)
            waiting += [found for _, found in _STATIC_IMPORT.findall(source)] + _LATE_IMPORT.findall(source)
            made[name] = _function(source)
    table = "".join(f'"{name}": () => {{\n{text}}},\n' for name, text in made.items())
    return Inlined(
        _closed(
            f"const sources = {{\n{table}}}, loaded = {{}};\nfunction load(name) {{ return loaded[name] ||= sources[name](); }}\n"
            f'load("{first}");\n'
        )
    )


def _function(source: str) -> str:
    """Convert a JavaScript module to a function's body that returns the exports."""
    names = [name for _, name in _EXPORT.findall(source)]
    body = _STATIC_IMPORT.sub(
        lambda found: f'const {found[1].replace(" as ", ": ")} = load("{found[2]}");', _EXPORT.sub(r"\1 \2", source)
    )
    body = _LATE_IMPORT.sub(r'load("\1")', body)
    return f"{body}\nreturn {{ {', '.join(names)} }};\n"


def _source(name: str) -> str:
    return SHARED.get(name, STATIC / name).read_text("utf-8")


def _closed(text: str) -> str:
    if re.search(r"</(script|style)|<!--", text, re.IGNORECASE):
        raise ValueError("a script or style of the page contains the end of its HTML element.")
    return text
