"""The form in which a script reads its values, found in its text where that is certain. The script is never run."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from pathlib import Path

from paceline.sweeps.points import ADDITIONS, ASSIGNMENTS, EQUALS, WORDS

#: Libraries that read the command line; a script that imports two says nothing certain.
_PARSERS = frozenset(
    {"absl", "argparse", "click", "configargparse", "cyclopts", "docopt", "fire", "hydra", "jsonargparse", "omegaconf"}
    | {"plac", "simple_parsing", "tap", "typer", "tyro"}
)
#: How a word that is taken apart at its `=` is taken apart.
_APART = ("split", "partition", "rsplit", "rpartition")


def certain_way(script: Path) -> str | None:
    """Return the way in which the script gets its values; None where `--name value` does, or where that is not certain."""
    try:
        with tokenize.open(script) as file:
            nodes = list(ast.walk(ast.parse(file.read())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    parsers = _PARSERS & set(_imported(nodes))
    if parsers <= {"hydra", "omegaconf"} and "hydra" in parsers:
        return _of_hydra(nodes)
    if parsers == {"omegaconf"}:
        return ASSIGNMENTS if any(_called(node) == "OmegaConf.from_cli" for node in nodes) else None
    if parsers == {"absl"}:
        return EQUALS if any(_called(node).rpartition(".")[2].startswith("DEFINE_") for node in nodes) else None
    if parsers == {"tyro"}:
        return WORDS if any(_called(node) in ("tyro.cli", "cli") for node in nodes) else None
    return None if parsers else _of_hand(nodes, script.parent)


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def _called(node: ast.AST) -> str:
    """Return the words before the parentheses of a call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _of_hydra(nodes: list[ast.AST]) -> str | None:
    mains = [
        made
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        for made in node.decorator_list
        if isinstance(made, ast.Call) and _called(made).endswith("main")
    ]
    if len(mains) != 1:
        return None
    given = {keyword.arg: keyword.value for keyword in mains[0].keywords}
    name = given.get("config_name", mains[0].args[1] if len(mains[0].args) > 1 else None)
    is_empty = name is None or (isinstance(name, ast.Constant) and name.value is None)
    # Without a configuration every value is new, which Hydra wants to be told.
    return ADDITIONS if is_empty and None not in given else ASSIGNMENTS


def _of_hand(nodes: list[ast.AST], folder: Path) -> str | None:
    """Return the way of a script that takes the words of `sys.argv` apart at their `=`, itself or in a file that it runs
    (`exec(open("configurator.py").read())`).
    """
    for node in nodes:
        if _called(node) == "exec" and isinstance(node, ast.Call) and node.args:
            opened = [one for one in ast.walk(node.args[0]) if _called(one) == "open" and isinstance(one, ast.Call)]
            for name in (one.args[0] for one in opened if one.args):
                if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.endswith(".py"):
                    return certain_way(folder / name.value)
    if not any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv" for node in nodes):
        return None
    is_apart = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _APART
        and any(isinstance(word, ast.Constant) and word.value == "=" for word in node.args)
        for node in nodes
    )
    has_dashes = any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--") for node in nodes
    )
    return (EQUALS if has_dashes else ASSIGNMENTS) if is_apart else None
