"""Checks of blocks that can't be run here: options of commands, names and calls of Python."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import shlex
import sys
import textwrap
import typing
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any
from unittest import mock

import click

from paceline.cli.parser import app
from tests.docs.pages import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Programs of other projects. This check does not know their options.
FOREIGN = frozenset(
    {"podman", "docker", "curl", "pip", "ssh", "scp", "sbatch", "squeue", "sinfo", "ray", "torchrun", "export"}
)


def parse_command(command: str) -> list[str]:
    """Parse a command as its program would, up to the last option, without running it. Return its words without redirections.

    Raises:
        AssertionError: the program, verb or option does not exist.
    """
    words = shlex.split(re.sub(r"\s>>?\s*\S+", "", command), comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "python" and rest[:1] == ["-m"]:
        assert find_spec(rest[1]), f"{command}: there is no module {rest[1]}"
        return words
    if program == "horovodrun":
        from paceline.compat.horovod.runner.options import parse

        parse(rest)
        return words
    for names in re.findall(r"paceline\[([\w,]+)\]", command) if program == "pip" else ():
        unknown = set(names.split(",")) - extras()
        assert not unknown, f"{command}: there is no extra {', '.join(sorted(unknown))}"
    if program != "paceline":
        assert program in FOREIGN, f"{command}: nobody knows how to check {program!r}; FOREIGN has {sorted(FOREIGN)}"
        return words
    with mock.patch.object(click.Command, "invoke", return_value=None):
        try:
            app.main(rest, prog_name="paceline", standalone_mode=False)
        except Exception as error:
            raise AssertionError(f"{command}: {error}") from error
    return words


def extras() -> set[str]:
    """Return the names that the brackets of `pip install 'paceline[...]'` may have."""
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


# --- checks of Python blocks


class _Instance:
    """An object of a known class and unknown state."""

    def __init__(self, cls: type) -> None:
        self.cls = cls


_UNKNOWN = object()


def check_python(text: str, names: dict[str, Any]) -> None:
    """Look up each name, each attribute of Paceline's objects, and bind each call of those to its signature.

    names: what the page has above; a value that is no module, class or function counts as an object of its class. The
        names of this text are added.

    Raises:
        AssertionError: something that is not there, or is called otherwise; with the line.
    """
    tree = ast.parse(text)
    _Looking(names).visit(tree)


class _Looking(ast.NodeVisitor):
    """Visits the statements in order, and records what is known of each name."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = _module(alias.name, node.lineno)
            self._names[alias.asname or alias.name.partition(".")[0]] = (
                module if alias.asname or module is _UNKNOWN else _module(alias.name.partition(".")[0], node.lineno)
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        name = node.module or ""
        module = _module(name, node.lineno)
        for alias in node.names:
            found = _UNKNOWN
            if module is not _UNKNOWN:
                found = getattr(module, alias.name, _UNKNOWN)
            if found is _UNKNOWN:
                found = _module(f"{name}.{alias.name}", node.lineno, part_of=name)
            self._names[alias.asname or alias.name] = found

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._of(node.value)
        for target in node.targets:
            self._keep(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._of(node.annotation)
        self._keep(node.target, self._of(node.value) if node.value is not None else _UNKNOWN)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            value = self._of(item.context_expr)
            if item.optional_vars is not None:
                self._keep(item.optional_vars, value)
        for statement in node.body:
            self.visit(statement)

    def visit_For(self, node: ast.For) -> None:
        self._of(node.iter)
        self._keep(node.target, _UNKNOWN)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._names[node.name] = _UNKNOWN
        arguments = node.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        inside = dict(self._names) | {argument.arg: _UNKNOWN for argument in given if argument is not None}
        body = _Looking(inside)
        for statement in node.body:
            body.visit(statement)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names[node.name] = _UNKNOWN
        body = _Looking(dict(self._names))
        for statement in node.body:
            body.visit(statement)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._names[node.name] = _UNKNOWN
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self._of(node)
        else:
            super().generic_visit(node)

    def _keep(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._keep(one, _UNKNOWN)
        elif isinstance(target, ast.Starred):
            self._keep(target.value, _UNKNOWN)
        else:
            self._of(target)

    def _of(self, node: ast.expr) -> Any:
        """Return what is known of an expression's value, after checking the expression."""
        if isinstance(node, ast.Name):
            assert node.id in self._names or hasattr(builtins, node.id), (
                f"line {node.lineno}: {node.id!r} is not there; the page has {sorted(self._names)}"
            )
            return self._names.get(node.id, _UNKNOWN)
        if isinstance(node, ast.NamedExpr):
            self._names[node.target.id] = found = self._of(node.value)
            return found
        if isinstance(node, ast.Attribute):
            return _attribute(self._of(node.value), node)
        if isinstance(node, ast.Call):
            called = self._of(node.func)
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                self._of(value)
            return _called(called, node)
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            inside = dict(self._names)
            inside |= dict.fromkeys(_bound_in(node), _UNKNOWN)
            for child in ast.iter_child_nodes(node):
                _Looking(inside).visit(child)
            return _UNKNOWN
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        return _UNKNOWN


def _bound_in(node: ast.expr) -> Iterable[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.arg):
            yield child.arg
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id


def _module(name: str, line: int, *, part_of: str = "") -> Any:
    """Paceline's modules; those of others are not loaded for this. part_of: where a name is that may be a module."""
    if name.partition(".")[0] != "paceline":
        return _UNKNOWN
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f"{part_of} has no {name.rpartition('.')[2]!r}" if part_of else str(error)
        raise AssertionError(f"line {line}: {what}") from error


def _attribute(owner: Any, node: ast.Attribute) -> Any:
    if owner is _UNKNOWN:
        return _UNKNOWN
    if inspect.ismodule(owner) or inspect.isclass(owner) or inspect.isroutine(owner):
        if inspect.ismodule(owner) and not hasattr(owner, node.attr):
            return _module(f"{owner.__name__}.{node.attr}", node.lineno, part_of=owner.__name__)
        assert hasattr(owner, node.attr), f"line {node.lineno}: {owner.__name__} has no {node.attr!r}"
        return getattr(owner, node.attr)
    cls = owner.cls if isinstance(owner, _Instance) else type(owner)
    if not cls.__module__.startswith("paceline") or hasattr(cls, "__getattr__"):
        return _UNKNOWN
    if not hasattr(cls, node.attr):
        fields = {name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())}
        assert node.attr in fields | _set_on_self(cls), f"line {node.lineno}: {cls.__name__} has no {node.attr!r}"
        return _UNKNOWN
    found = inspect.getattr_static(cls, node.attr)
    if isinstance(found, property) and found.fget is not None:
        return _returned(found.fget)
    return _Method(getattr(cls, node.attr), is_bound=not isinstance(found, (classmethod, staticmethod)))


class _Method:
    """A method of an object, called without the object."""

    def __init__(self, function: Any, *, is_bound: bool) -> None:
        self.function = function
        self.is_bound = is_bound


def _set_on_self(cls: type) -> set[str]:
    found: set[str] = set()
    for base in cls.__mro__[:-1]:
        if base.__module__.startswith("paceline"):
            found |= set(re.findall(r"self\.(\w+)\b[^=\n]*=[^=]", textwrap.dedent(inspect.getsource(base))))
    return found


def _called(called: Any, node: ast.Call) -> Any:
    """Check the arguments of the call if its signature is known, and return the type of its result if that is known."""
    function = called.function if isinstance(called, _Method) else called
    if not (inspect.isclass(function) or inspect.isroutine(function)):
        return _UNKNOWN
    if not (function.__module__ or "").startswith("paceline"):
        return _UNKNOWN
    has_stars = any(isinstance(value, ast.Starred) for value in node.args) or any(not one.arg for one in node.keywords)
    if not has_stars:
        given: list[Any] = [None] * (len(node.args) + int(isinstance(called, _Method) and called.is_bound))
        try:
            inspect.signature(function).bind(*given, **{one.arg: None for one in node.keywords if one.arg})
        except TypeError as error:
            raise AssertionError(f"line {node.lineno}: {function.__qualname__}: {error}") from error
    return _Instance(function) if inspect.isclass(function) else _returned(function)


def _returned(function: Any) -> Any:
    try:
        found = typing.get_type_hints(function).get("return")
    except Exception:  # the annotation names a type that is imported only for type checkers
        return _UNKNOWN
    return _Instance(found) if inspect.isclass(found) and found is not type(None) else _UNKNOWN
