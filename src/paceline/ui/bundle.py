"""The page's scripts and styles as texts for a file that no server accompanies."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache

from paceline.ui.render import SHARED, STATIC

_STATIC_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";', re.MULTILINE)
_LATE_IMPORT = re.compile(r'await import\("\./(\w+\.js)"\)')
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Inlined:
    """A script or style of an HTML document, with its source expression in the content policy."""

    text: str

    @property
    def allowed(self) -> str:
        digest = hashlib.sha256(self.text.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def styles(*names: str) -> Inlined:
    """Return these style sheets of the page as one."""
    return Inlined(_closed("\n".join(_source(name) for name in names)))


@cache
def classic(*names: str) -> Inlined:
    """Return these scripts of the page, which are no modules, as one."""
    return Inlined(_closed("\n".join(_source(name) for name in names)))


@cache
def modules(first: str) -> Inlined:
    """Return a module of the page, and all modules that it imports, as one script.

    Each module becomes a function, which runs at its first import.
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
    """Return the body of a function that returns a module's exports."""
    names = [name for _, name in _EXPORT.findall(source)]
    body = _STATIC_IMPORT.sub(
        lambda found: f'const {found[1].replace(" as ", ": ")} = load("{found[2]}");', _EXPORT.sub(r"\1 \2", source)
    )
    body = _LATE_IMPORT.sub(r'load("\1")', body)
    return f"{body}\nreturn {{ {', '.join(names)} }};\n"


def _source(name: str) -> str:
    return SHARED.get(name, STATIC / name).read_text("utf-8")


def _closed(text: str) -> str:
    """Check that a script or style does not contain the end of its HTML element, and return it."""
    if re.search(r"</(script|style)|<!--", text, re.IGNORECASE):
        raise ValueError("a script or style of the page contains the end of its HTML element.")
    return text
