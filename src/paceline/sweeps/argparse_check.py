"""Check a sweep's space against the options that the script declares."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import SweepError
from paceline.job.entry import entry_file
from paceline.job.job import Job
from paceline.sweeps.argparse_options import PARSERS, Declared, DeclaredOption, declared, imported, nodes_of
from paceline.sweeps.expressions import Expression
from paceline.sweeps.points import ADDITIONS, ASSIGNMENTS, EQUALS, WORDS, is_of_switch, text_of
from paceline.sweeps.space import Dimension, Space, argument

#: Maximum number of values of a choice or integer range to check.
_MOST_VALUES = 1000
_QUANTILES = (0.03, 0.31, 0.59, 0.87)  # the quantiles of a continuous range to check
_MOST_COMPLAINTS = 5

#: Parser library -> (way to pass values, see `points.WAYS`; pattern of the library's function in the script).
_WAYS = {
    "omegaconf": (ASSIGNMENTS, re.compile(r"OmegaConf\.from_cli")),
    "absl": (EQUALS, re.compile(r"(.*\.)?DEFINE_\w*")),
    "tyro": (WORDS, re.compile(r"(tyro\.)?cli")),
}
#: String methods by which scripts split a command-line word at `=`.
_APART = ("split", "partition", "rsplit", "rpartition")


def check_script(
    space: Space, job: Job, directory: Path, switches: Sequence[str] = (), others: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Raise an error if the script's parser is certain to reject the search space.

    Return `switches`, extended by options of the script without a value, such as `--amp`, that a hyperparameter controls.

    `directory`: The folder with the job's source.
    `switches`: Switches that the user has named (`SweepSpec.switches`).
    `others`: Arguments that the script gets besides the job's; None if unknown.

    Raises:
        SweepError: The script lacks an option or rejects values; the message names all of them.
        JobError: The script does not exist.
    """
    script = entry_file(job, directory) if job.is_python else None
    # An installed module can't be checked: it is in an environment that may not exist yet.
    if script is None:
        return tuple(switches)
    return check(space, directory / script, switches, None if others is None else (*job.arguments, *others))


def check(
    space: Space, script: Path, switches: Sequence[str] = (), given: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Raise SweepError if the script rejects the space. Return the space's switches, such as `--amp`."""
    known = declared(script)
    said_so = [switch.partition("/")[0] for switch in switches]
    wrong = (_complaint(dimension, known, said_so) for dimension in space.parameters)
    complaints = list(dict.fromkeys(complaint for complaint in wrong if complaint is not None))
    if given is not None:
        complaints += _of_others(space, known, given)
    if complaints:
        said = "; ".join(complaints[:_MOST_COMPLAINTS])
        raise SweepError(
            f"the space does not fit {script.name}, by the options that it declares: {said}. Change the space, the job's "
            "arguments or the script."
        )
    controlled = (_switch(dimension, known) for dimension in space.parameters)
    own = (switch for switch in controlled if switch is not None and switch.partition("/")[0] not in said_so)
    return tuple(dict.fromkeys((*switches, *own)))


def refusal(name: str, value: object, known: Declared) -> str | None:
    """Return why the script's parser certainly rejects a hyperparameter's value, or None."""
    options = _meant(name, known)
    if options is None or value is None or isinstance(value, bool):
        return None
    if not options:
        names = ", ".join(option.names[-1] for option in known.options[:20])
        return f"the script has no option {name}. It declares {names or 'none'}"
    wrong = [_wrong(option, value, known) for option in options]
    return wrong[0] if all(wrong) else None


def list_way(space: Space, script: Path) -> str | None:
    """Return how the script takes lists, such as "words" for `--x 1 2`, or None."""
    known = declared(script)
    lists = [
        dimension
        for dimension in space.parameters
        if any(isinstance(v, (list, tuple)) for v in _values(dimension.expression))
    ]
    options = [option for dimension in lists for option in _meant(argument(dimension.name), known) or (None,)]
    ways = {option.takes_list if option is not None and option.is_switch is False else None for option in options}
    return ways.pop() if len(ways) == 1 else None


def _switch(dimension: Dimension, known: Declared) -> str | None:
    name = argument(dimension.name)
    options = _meant(name, known)
    if not options or not all(option.is_switch for option in options) or not is_of_switch(dimension):
        return None
    off = options[0].opposite(name)
    return name if off is None else f"{name}/{off}"


def _complaint(dimension: Dimension, known: Declared, switches: Sequence[str]) -> str | None:
    name = argument(dimension.name)
    # The value None omits the argument, so the parser never sees it.
    values = [value for value in _values(dimension.expression) if value is not None]
    options = _meant(name, known)
    if not values or options is None:
        return None
    if not options:
        names = [option for found in known.options for option in found.names]
        close = difflib.get_close_matches(name.replace("_", "-"), [n.replace("_", "-") for n in names], n=1)
        hint = next((f" (did you mean {n}?)" for n in names if close and n.replace("_", "-") == close[0]), "")
        has = f"which are {', '.join(names[:20])}" if names else "for there are none"
        return f"{name} is not one of its options, {has}{hint}"
    if name in switches:
        taking = [option for option in options if option.is_switch is False]
        return f"{name} takes a value; it is not a switch (line {taking[0].line})" if taking else None
    if is_of_switch(dimension) and all(option.is_switch for option in options):
        return None
    for value in values:
        wrong = [_wrong(option, value, known) for option in options]
        # Accept the values if one of the declarations accepts them: two subcommands may declare the same option.
        if all(wrong):
            return f"{name}: {wrong[0]}"
    return None


def _of_others(space: Space, known: Declared, given: Sequence[str]) -> Iterator[str]:
    own = [argument(name) for name in space.names]
    # Skip positional words: all words after `--`, and words with a space, as in argparse.
    words = itertools.takewhile(lambda word: word != "--", given)
    names = [word.partition("=")[0] for word in words if word.startswith("-") and " " not in word]
    for name in dict.fromkeys(names):
        if name.startswith("--") and name not in own and _meant(name, known) == []:
            yield f"{name}, which the job gives it, is not one of its options"
    for option in known.options:
        if option.is_required and not any(_may_be(name, option) for name in (*own, *names)):
            yield f"{option.names[-1]} is required (line {option.line}), and neither the space nor the job gives it"


def _may_be(name: str, option: DeclaredOption) -> bool:
    return any(other.startswith(name if name.startswith("--") else name[:2]) for other in option.names)


def _meant(name: str, known: Declared) -> list[DeclaredOption] | None:
    exact = [option for option in known.options if name in option.names]
    if exact:
        return exact
    # Be unsure if the name may abbreviate an option, or may contain an option's value, as `-lr` for `-l r`.
    starts = name if name.startswith("--") else name[:2]
    if not known.is_closed or any(other.startswith(starts) for option in known.options for other in option.names):
        return None
    return []


def _wrong(option: DeclaredOption, given: object, known: Declared) -> str | None:
    text, at = text_of(given), f"line {option.line}"
    if option.is_switch is not False:
        # A switch takes no value. The value would become a positional argument if the script declares such arguments.
        is_taken = option.is_switch is None or known.has_positionals
        return None if is_taken else f"it is a switch, which takes no value but true and false ({at})"
    if option.takes_list and isinstance(given, (list, tuple)):
        if option.takes_list == WORDS and option.count not in (None, len(given)):
            return f"it takes {option.count} values, and {text} has {len(given)} ({at})"
        each = dataclasses.replace(option, count=1, takes_list=None)
        return next((wrong for value in given if (wrong := _wrong(each, value, known))), None)
    if option.count not in (None, 1):
        return f"it takes {option.count} values ({at})"
    if option.type is None:
        return None
    if option.type == "bool" and text and not given:
        # argparse accepts the value, but bool("False") is True: all trials would be equal.
        return f"its type is bool, to which every word is true, so {text} would be ({at}); make it a switch"
    try:
        value: object = {"int": int, "float": float, "str": str, "bool": bool}[option.type](text)
    except ValueError:
        hint = "; to try one at a time, give choice()" if isinstance(given, (list, tuple)) else ""
        return f"{text} must be of type {option.type} ({at}){hint}"
    if option.choices is not None and value not in option.choices:
        shown = ", ".join(str(choice) for choice in option.choices[:20])
        return f"{text} is not one of its choices {shown} ({at})"
    return None


def _values(expression: Expression) -> Iterator[object]:
    count = expression.count
    quantiles = [(n + 0.5) / count for n in range(count)] if count is not None and count <= _MOST_VALUES else _QUANTILES
    for quantile in quantiles:
        yield expression.value(expression.raw_at(quantile))


def certain_way(script: Path) -> str | None:
    """Return how the script reads arguments, such as "equals" for `--x=1`, or None."""
    nodes = nodes_of(script)
    parsers = PARSERS & imported(nodes)
    if not parsers:
        return _of_hand(nodes, script.parent)
    if "hydra" in parsers <= {"hydra", "omegaconf"}:
        return _of_hydra(nodes)
    way, function = _WAYS.get(" ".join(parsers), (None, re.compile("")))
    return way if any(function.fullmatch(_called(node)) for node in nodes) else None


def _called(node: ast.AST) -> str:
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
    keywords = {keyword.arg: keyword.value for keyword in mains[0].keywords}
    name = keywords.get("config_name", mains[0].args[1] if len(mains[0].args) > 1 else None)
    is_empty = name is None or (isinstance(name, ast.Constant) and name.value is None)
    # Hydra requires `+` before each name if the script has no configuration file.
    return ADDITIONS if is_empty and None not in keywords else ASSIGNMENTS


def _of_hand(nodes: list[ast.AST], folder: Path) -> str | None:
    """Return how a script that splits `sys.argv` itself takes arguments, such as "equals".

    "equals" means `--x=1`, "assignments" means `x=1`. Return None for other scripts. A file that the script runs by
    `exec(open("configurator.py").read())` may split `sys.argv` too.
    """
    for node in nodes:
        if _called(node) == "exec" and isinstance(node, ast.Call) and node.args:
            opened = [call for call in ast.walk(node.args[0]) if _called(call) == "open" and isinstance(call, ast.Call)]
            for name in (call.args[0] for call in opened if call.args):
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
