"""The statements of the package's own files, each parsed once for all tests that read all of them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent

#: The oldest Python on which the package runs; newer syntax is an error.
_OLDEST = (3, 10)


@dataclass(frozen=True)
class ClassHead:
    name: str
    #: The base classes, as the source text names them.
    bases: tuple[str, ...]
    #: Whether the class is outside of all other classes and functions.
    is_outer: bool


@dataclass(frozen=True)
class Source:
    """The few statements of a file that tests ask for: all trees together would take hundreds of MB."""

    #: All import statements of the file.
    imports: tuple[ast.Import | ast.ImportFrom, ...]
    #: Imports that do not stand under `if TYPE_CHECKING`, whose body never runs.
    at_run_time: tuple[ast.Import | ast.ImportFrom, ...]
    classes: tuple[ClassHead, ...]


@functools.cache
def read(code: bytes | str) -> Source:
    """
    Raises:
        SyntaxError: it is none of the oldest Python that the package runs on.
    """
    imports, at_run_time, classes = [], [], []
    tree = ast.parse(code, feature_version=_OLDEST)
    for statement, is_run in _statements(tree):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            imports.append(statement)
            if is_run:
                at_run_time.append(statement)
        elif isinstance(statement, ast.ClassDef):
            bases = tuple(ast.unparse(base) for base in statement.bases)
            classes.append(ClassHead(statement.name, bases, is_outer=statement in tree.body))
    return Source(tuple(imports), tuple(at_run_time), tuple(classes))


def _statements(node: ast.AST, is_run: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Each statement below `node`, and whether it may be run. Expressions, of which most of a tree is, hold none."""
    for part in ("body", "handlers", "cases", "orelse", "finalbody"):
        is_for_types = part == "body" and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in getattr(node, part, ()):
            # `except` and `case` are not statements, so yield the statements below them.
            if isinstance(child, ast.stmt):
                yield child, is_run and not is_for_types
            yield from _statements(child, is_run and not is_for_types)
