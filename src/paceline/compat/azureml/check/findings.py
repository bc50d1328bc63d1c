"""Finds the SDK's names in a program's text, and says of each what becomes of it here."""

from __future__ import annotations

import ast
import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.compat.azureml import aliases
from paceline.compat.azureml.check.replaced import of_call, of_old_library

#: What becomes of a use: it works as written; it works with something else in its place; it does not work.
WORKS, REPLACED, MISSING = "works", "replaced", "missing"
_OURS = "paceline.compat.azureml"


@dataclass(frozen=True)
class Finding:
    """A use of a name. file, line: where. name: such as "azureml.core.Workspace.from_config". becomes: WORKS, REPLACED or
    MISSING; text: what is done instead, or what to write."""

    file: str
    line: int
    name: str
    becomes: str
    text: str = ""


def of_folder(top: Path) -> list[Finding]:
    """The uses in all Python files and notebooks below a folder, or in one of these, by file and line."""
    found: list[Finding] = []
    for file in [top] if top.is_file() else sorted(_written(top)):
        found += _of_text(str(file if top.is_file() else file.relative_to(top)), _program(file))
    return found


def _written(top: Path) -> Iterator[Path]:
    """The Python files and notebooks of a project: not hidden folders, nor virtual environments, which are installed."""
    for folder, below, files in os.walk(top):
        below[:] = [
            name for name in below if not name.startswith(".") and not Path(folder, name, "pyvenv.cfg").exists()
        ]
        yield from (Path(folder, name) for name in files if name.endswith((".py", ".ipynb")))


def _program(file: Path) -> str:
    """The program in the file: of a notebook, all its cells in one; of what can't be read, none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix == ".ipynb":
            cells = json.loads(text).get("cells", [])
            lines = [
                "" if line.lstrip().startswith(("%", "!", "?")) else line
                for cell in cells
                if isinstance(cell, dict) and cell.get("cell_type") == "code"
                for line in "".join(cell.get("source", [])).splitlines()
            ]
            text = "\n".join(lines)
    except (OSError, ValueError, AttributeError):
        return ""
    return text


def _of_text(file: str, text: str) -> list[Finding]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        # print statements of Python 2, and the like.
        return [Finding(file, error.lineno or 1, "(the file)", MISSING, f"it is no Python 3: {error.msg}.")]
    visitor = _Visitor(file)
    visitor.visit(tree)
    # Of a call the name was seen as well, which by itself works.
    replaced = {(one.line, one.name) for one in visitor.found if one.becomes == REPLACED}
    kept = [one for one in visitor.found if one.becomes != WORKS or (one.line, one.name) not in replaced]
    return sorted(kept, key=lambda one: one.line)


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Finding] = []
        #: Name in the program -> what it is: "azureml.core.Workspace".
        self._names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_sdk(alias.name):
                self._use(node, alias.name)
                self._names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else "azureml"
            elif (old := of_old_library(alias.name)) is not None:
                self.found.append(Finding(self.file, node.lineno, alias.name, MISSING, old))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level == 0 and _is_sdk(module):
            for alias in node.names:
                name = module if alias.name == "*" else f"{module}.{alias.name}"
                self._use(node, name)
                if alias.name == "*":
                    self._names |= {one: f"{module}.{one}" for one in _all_of(module)}
                else:
                    self._names[alias.asname or alias.name] = name
        elif node.level == 0 and (old := of_old_library(module)) is not None:
            self.found.append(Finding(self.file, node.lineno, module, MISSING, old))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = _dotted(node)
        if dotted is not None:
            first, _, rest = dotted.partition(".")
            if first in self._names:
                # `azureml.core.VERSION` and `Workspace.from_config`, but not `run.log`: what a variable is can't be read.
                self._use(node, f"{self._names[first]}.{rest}")
                return
            if (old := of_old_library(dotted)) is not None:
                self.found.append(Finding(self.file, node.lineno, dotted, MISSING, old))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        value = node.value
        if isinstance(value, ast.Attribute) and value.attr == "data" and isinstance(node.slice, ast.Constant):
            owner = value.value.id if isinstance(value.value, ast.Name) else ""
            if "loss" in owner and node.slice.value == 0:
                text = f"since PyTorch 0.5 a loss is a number: write {owner}.item()."
                self.found.append(Finding(self.file, node.lineno, f"{owner}.data[0]", MISSING, text))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        dotted = _dotted(node.func) or ""
        first, _, rest = dotted.partition(".")
        name = f"{self._names[first]}{'.' * bool(rest)}{rest}" if first in self._names else dotted
        values = {
            keyword.arg: keyword.value.value
            for keyword in node.keywords
            if keyword.arg and isinstance(keyword.value, ast.Constant)
        }
        for text in of_call(name, values, [arg.value for arg in node.args if isinstance(arg, ast.Constant)]):
            self.found.append(Finding(self.file, node.lineno, name, REPLACED, text))
        self.generic_visit(node)

    def _use(self, node: ast.AST, name: str) -> None:
        why = missing(name)
        line = getattr(node, "lineno", 1)
        self.found.append(Finding(self.file, line, name, WORKS if why is None else MISSING, why or ""))


def missing(name: str) -> str | None:
    """Why a name of the SDK's, such as "azureml.core.Run.get_context", is not here; None where it is."""
    parts = name.split(".")[1:]
    if parts[:2] == ["contrib", "services"]:
        return None  # a scoring script's, which finds it where it is served
    if (why := aliases.FINDER.absent(".".join(parts))) is not None:
        return why
    for other, ours in aliases.RENAMED.items():
        if ".".join(parts[: (count := other.count(".") + 1)]) == other:
            parts = [*ours.split("."), *parts[count:]]
    target: Any = importlib.import_module(_OURS)
    for number, part in enumerate(parts):
        try:
            target = getattr(target, part)
        except AttributeError:
            if not hasattr(target, "__path__"):
                return f"{'.'.join(('azureml', *parts[:number]))} has no {part} here."
            try:
                target = importlib.import_module(".".join((_OURS, *parts[: number + 1])))
            except ModuleNotFoundError:
                return f"there is no {'.'.join(('azureml', *parts[: number + 1]))} here."
        if callable(target) and (why := getattr(target, "refused", None)):
            return str(why)
        if not isinstance(target, (type, ModuleType)):
            return None  # a function or a value; what it gives can't be read from the text
    return None


def _all_of(module: str) -> list[str]:
    """What `from module import *` brings; nothing where it is not here."""
    if missing(module) is not None:
        return []
    rest = module.partition(".")[2]
    ours = importlib.import_module(".".join(filter(None, (_OURS, aliases.RENAMED.get(rest, rest)))))
    return [*getattr(ours, "__all__", ())]


def _is_sdk(module: str) -> bool:
    return module == "azureml" or module.startswith("azureml.")


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)) is not None:
        return f"{head}.{node.attr}"
    return None
