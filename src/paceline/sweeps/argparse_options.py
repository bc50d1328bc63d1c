"""Options that a script declares with argparse, click or absl.

The options are read from the script's source, without running the script. Only certain facts are returned. Nothing is
certain if the script uses another parser or two parsers, changes `sys.argv`, or has code that this module can't follow.
"""

from __future__ import annotations

import ast
import dataclasses
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.sweeps.points import COMMAS, REPEATED, WORDS

#: Libraries that parse the command line. A script that imports two of these libraries gives no result.
PARSERS = frozenset(
    {"absl", "argparse", "click", "configargparse", "cyclopts", "docopt", "fire", "hydra", "jsonargparse", "omegaconf"}
    | {"plac", "simple_parsing", "tap", "typer", "tyro"}
)
#: Parsers that a script with argparse must not import. OmegaConf is allowed: it may only read files.
_OTHERS = PARSERS - {"argparse", "omegaconf"}
_TYPES = ("int", "float", "str", "bool")
#: Known argparse action -> whether it makes the option a switch, which is an option without a value.
_ACTIONS = {
    **dict.fromkeys(("store", "append", "extend"), False),
    **dict.fromkeys(("store_true", "store_false", "store_const", "append_const", "count", "help", "version"), True),
}
#: Methods of a parser that return an object to which options are added, and methods that add no options.
_PARTS = ("add_argument_group", "add_mutually_exclusive_group", "add_subparsers", "add_parser")
_HARMLESS = ("set_defaults", "get_default", "error", "exit", "print_help", "print_usage", "format_help", "format_usage")
#: Types of syntax nodes whose parts always run when the node itself runs.
_PLAIN = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return, ast.Attribute, ast.Call)
_ALL, _REST = ("parse_args", "parse_intermixed_args"), ("parse_known_args", "parse_known_intermixed_args")


@dataclass(frozen=True, kw_only=True)
class DeclaredOption:
    """A command-line option that a script declares.

    Attributes:
        line: Line of the declaration.
        is_switch: Whether the option takes no value; None if unknown.
        is_pair: Whether the option is a switch with both `--x` and `--no-x`.
        off: The word that turns the switch off; None for `--no-x`, or for no such word.
        count: Number of values that the option needs; None for any number.
        takes_list: How the option takes a list, such as "words" (`--x 1 2`) or "repeated" (`--x=1 --x=2`), or None.
        type: "int", "float", "str", "bool", or None if unknown.
        choices: Allowed values after conversion, or None.
        is_required: Whether the script certainly fails without the option.
    """

    names: tuple[str, ...]
    line: int
    is_switch: bool | None = False
    is_pair: bool = False
    off: str | None = None
    count: int | None = 1
    takes_list: str | None = None
    type: str | None = "str"
    choices: Sequence[object] | None = None
    is_required: bool = False

    def opposite(self, name: str) -> str | None:
        """Return the word that turns the switch `name` off, such as `--no-amp`, or None."""
        if self.off or not self.is_pair:
            return self.off
        words = [other for other in self.names if other.startswith("--")]
        whole = name if name in words else words[0]
        return f"--{whole[5:]}" if f"--{whole[5:]}" in words else f"--no-{whole[2:]}"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The options that a script certainly declares.

    Attributes:
        is_closed: Whether the script rejects options that it does not declare.
        has_positionals: Whether the script has positional arguments.
    """

    options: tuple[DeclaredOption, ...]
    is_closed: bool = False
    has_positionals: bool = True


def declared(script: Path) -> Declared:
    """Return the facts about a script's options that its source proves."""
    nodes = nodes_of(script)
    try:
        return _of_decorators(nodes) or _Reader(nodes).read()
    except (_NotKnownError, RecursionError):
        return Declared(options=())


def nodes_of(script: Path) -> list[ast.AST]:
    """Return a script's AST nodes; empty if it cannot be parsed."""
    try:
        with tokenize.open(script) as file:
            return list(ast.walk(ast.parse(file.read())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []


def imported(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the top-level names of the modules that a script imports."""
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in plain + parts}


def _of_decorators(nodes: Sequence[ast.AST]) -> Declared | None:
    """Return the options that a script declares with click or absl.

    Return None if the script uses neither, or if it uses another parser too. Other modules may declare more options.
    """
    take = {"click": _of_click, "absl": _of_absl}.get(" ".join(imported(nodes) & {*_OTHERS, "argparse"}))
    if take is None:
        return None
    options = [option for node in nodes if isinstance(node, ast.Call) and (option := take(node)) is not None]
    return Declared(options=tuple(options))


def _of_click(call: ast.Call) -> DeclaredOption | None:
    if ast.unparse(call.func) not in ("click.option", "option"):
        return None
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    words = [text for word in call.args if (text := _text(word)) is not None]
    # Keep the words with a dash. In `--shout/--no-shout` the slash separates a switch's two names.
    names = [word.partition("/")[0].strip() for word in words if word.startswith("-")]
    off = next((word.partition("/")[2].strip() for word in words if "/" in word), None)
    is_flag = _literal(keywords["is_flag"]) if "is_flag" in keywords else off is not None
    unsure = {None, "flag_value", "count", "cls"} & keywords.keys() or (
        off is None and is_flag and "default" in keywords
    )
    count = _literal(keywords["nargs"]) if "nargs" in keywords else 1
    is_multiple = "multiple" in keywords and _literal(keywords["multiple"]) is True
    return DeclaredOption(
        names=tuple(names),
        line=call.lineno,
        is_switch=None if unsure or not isinstance(is_flag, bool) else is_flag,
        off=off or None,
        count=None if is_multiple or not isinstance(count, int) else count,
        takes_list=REPEATED if is_multiple and count == 1 else WORDS if count != 1 and not is_multiple else None,
        type=None,
    )


def _of_absl(call: ast.Call) -> DeclaredOption | None:
    kind = ast.unparse(call.func).rpartition(".")[2]
    name = _text(call.args[0]) if call.args else None
    if not kind.startswith("DEFINE_") or name is None:
        return None
    lists = REPEATED if kind.startswith("DEFINE_multi_") else COMMAS if kind == "DEFINE_list" else None
    return DeclaredOption(names=(f"--{name}",), line=call.lineno, count=None, takes_list=lists, type=None)


class _NotKnownError(Exception):
    """An error that ends the analysis, since nothing is certain about the script."""


class _Reader:
    """An analyzer that follows a script's argparse parser through names, functions and groups."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        self._nodes = nodes
        self._parent = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._functions = {node.name: node for node in self._nodes if isinstance(node, ast.FunctionDef)}
        self._modules: set[str] = set()  # names that the script gives to the module argparse
        self._names: dict[str, str] = {}  # an imported name -> its name in argparse
        self._options: list[DeclaredOption] = []
        self._is_closed = True
        self._has_positionals = False
        self._is_parsed = False
        self._has_commands = False
        self._readings: list[ast.Call] = []
        self._made: ast.AST | None = None
        self._followed: set[ast.AST] = set()
        self._waiting: list[ast.expr] = []

    def read(self) -> Declared:
        self._imports()
        made = [node for node in self._nodes if isinstance(node, ast.Call) and self._of(node.func) == "ArgumentParser"]
        bases = [base for node in self._nodes if isinstance(node, ast.ClassDef) for base in node.bases]
        if len(made) != 1 or any(self._of(base) == "ArgumentParser" for base in bases):
            raise _NotKnownError
        for keyword in made[0].keywords:
            if keyword.arg in (None, "prefix_chars", "fromfile_prefix_chars"):
                raise _NotKnownError
            if keyword.arg == "parents":
                self._is_closed = False
        self._made = made[0]
        self._waiting.append(made[0])
        while self._waiting:
            node = self._waiting.pop()
            if node not in self._followed:
                self._followed.add(node)
                self._follow(node)
        if not self._is_parsed or any(self._is_argv(node) and not self._is_given(node) for node in self._nodes):
            raise _NotKnownError
        options = sorted(self._options, key=lambda option: option.line)
        # Options of a subcommand, or of a parser that does not always run, are not always required.
        if self._has_commands or not all(map(self._is_read_always, self._readings)):
            options = [dataclasses.replace(option, is_required=False) for option in options]
        return Declared(options=tuple(options), is_closed=self._is_closed, has_positionals=self._has_positionals)

    def _imports(self) -> None:
        if _OTHERS & imported(self._nodes):
            raise _NotKnownError
        for node in self._nodes:
            if isinstance(node, ast.Import):
                self._modules |= {alias.asname or alias.name for alias in node.names if alias.name == "argparse"}
            elif isinstance(node, ast.ImportFrom) and node.module == "argparse":
                self._names |= {alias.asname or alias.name: alias.name for alias in node.names}

    def _of(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self._modules:
            return node.attr
        return self._names.get(node.id) if isinstance(node, ast.Name) else None

    # --- follow the parser through the script

    def _follow(self, node: ast.expr) -> None:
        parent = self._parent[node]
        if isinstance(parent, ast.Attribute):
            self._used(parent)
        elif isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            for target in targets:
                self._bound(target)
            if isinstance(parent, ast.NamedExpr):
                self._waiting.append(parent)
        elif isinstance(parent, ast.Return):
            self._returned(parent)
        elif isinstance(parent, ast.Call):
            self._handed(node, parent, None)
        elif isinstance(parent, ast.keyword):
            self._handed(node, self._parent[parent], parent.arg)
        elif not isinstance(parent, ast.Expr):
            self._is_closed = False

    def _bound(self, target: ast.expr) -> None:
        self._is_closed = self._is_closed and isinstance(target, (ast.Name, ast.Attribute))
        # Ignore scopes: another variable with this name can make the result unknown, but never wrong.
        alike = [node for node in self._nodes if type(node) is type(target) and _name(node) == _name(target)]
        self._waiting += [
            node for node in alike if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)
        ]

    def _returned(self, node: ast.AST) -> None:
        function, _ = self._place(node)
        calls = self._calls(function.name) if isinstance(function, ast.FunctionDef) else None
        self._is_closed = self._is_closed and calls is not None
        self._waiting += calls or ()

    def _calls(self, function: str) -> list[ast.Call] | None:
        uses = [(node, self._parent[node]) for node in self._nodes if _name(node) == function]
        calls = [call for node, call in uses if isinstance(call, ast.Call) and call.func is node]
        return calls if len(calls) == len(uses) else None

    def _handed(self, node: ast.expr, call: ast.AST, keyword: str | None) -> None:
        name = None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self._functions:
            name = keyword or next(iter(_parameters(self._functions[call.func.id])[call.args.index(node) :]), None)
        if name is None:
            self._is_closed = False
        else:
            self._bound(ast.Name(id=name, ctx=ast.Store()))

    def _used(self, attribute: ast.Attribute) -> None:
        call, method = self._parent[attribute], attribute.attr
        if not isinstance(call, ast.Call) or call.func is not attribute:
            # Assigning an attribute, such as `parser.epilog`, is harmless. Reading an attribute may return a method.
            self._is_closed = self._is_closed and isinstance(attribute.ctx, ast.Store)
        elif method == "add_argument":
            self._take(call)
        elif method in _PARTS:
            self._is_closed = self._is_closed and not any(keyword.arg == "parents" for keyword in call.keywords)
            self._has_commands |= method == "add_subparsers"
            self._waiting.append(call)
        elif method in (*_ALL, *_REST):
            self._is_parsed = True
            self._readings.append(call)
            self._is_closed = self._is_closed and method in _ALL
            sources = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg in (None, "args"))]
            if not all(self._is_command_line(value) for value in sources):
                raise _NotKnownError
        elif method not in _HARMLESS:
            # Give up at any other method, such as `register`, which can redefine the type int.
            raise _NotKnownError

    # --- check that the parser gets the words of the command line

    def _is_argv(self, node: ast.AST) -> bool:
        return (
            isinstance(node, (ast.Attribute, ast.alias)) and getattr(node, "attr", getattr(node, "name", "")) == "argv"
        )

    def _is_given(self, node: ast.AST) -> bool:
        taken = self._parent.get(node)
        is_read = isinstance(taken, ast.Subscript) and isinstance(taken.ctx, ast.Load)
        return is_read and ast.unparse(taken.slice) in ("1:", "0")  # type: ignore[union-attr]

    def _is_command_line(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Constant):
            return value.value is None
        if isinstance(value, ast.Subscript):
            return self._is_argv(value.value) and ast.unparse(value.slice) == "1:"
        # Accept a parameter that is None by default: `def main(argv=None): ... parser.parse_args(argv)`.
        function, _ = self._place(value)
        if not isinstance(value, ast.Name) or not isinstance(function, ast.FunctionDef):
            return False
        calls = self._calls(function.name)
        if value.id not in _parameters(function) or calls is None:
            return False
        stores = [node for node in self._nodes if isinstance(node, ast.Name) and node.id == value.id]
        arguments = [
            argument for call in calls for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        ]
        return all(isinstance(node.ctx, ast.Load) for node in stores) and all(
            not isinstance(argument, ast.Name) and self._is_command_line(argument) for argument in arguments
        )

    # --- read the calls of add_argument

    def _take(self, call: ast.Call) -> None:
        names = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        if len(names) != len(call.args) or not names:
            self._is_closed = False  # the script computes the option's name at run time
            return
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        # With `nargs=argparse.REMAINDER` the parser accepts any words, so other options are possible.
        if "nargs" in keywords and (self._of(keywords["nargs"]) == "REMAINDER" or _text(keywords["nargs"]) == "..."):
            self._is_closed = False
        if not names[0].startswith("-"):
            self._has_positionals = True
            return
        # If the script keeps the action that add_argument returns, it may change the action later.
        if None in keywords or not isinstance(self._parent[call], ast.Expr):
            self._options.append(DeclaredOption(names=tuple(names), line=call.lineno, is_switch=None))
            return
        is_switch, names = self._action(keywords.get("action"), names)
        count, is_known = self._count(keywords.get("nargs"))
        self._options.append(
            DeclaredOption(
                names=tuple(names),
                line=call.lineno,
                is_switch=is_switch if is_known else None,
                is_pair=len(names) > len(call.args),
                count=count,
                takes_list=WORDS if count != 1 else REPEATED if _text(keywords.get("action")) == "append" else None,
                type=self._type(keywords.get("type")),
                choices=_choices(keywords["choices"]) if "choices" in keywords else None,
                is_required="required" in keywords and _literal(keywords["required"]) is True and self._is_always(call),
            )
        )

    def _is_always(self, call: ast.Call) -> bool:
        """Return whether a call runs whenever the script creates the parser.

        The call must be in the same function as the parser, under the same conditions, before any return.
        """
        assert self._made is not None, "options are taken of the parser that was found"
        function, above = self._place(call)
        returns = (node for node in self._nodes if isinstance(node, ast.Return) and node.lineno < call.lineno)
        return (function, above) == self._place(self._made) and not any(
            self._place(node)[0] is function for node in returns
        )

    def _is_read_always(self, call: ast.Call) -> bool:
        assert self._made is not None, "as above"
        function, above = self._place(call)
        mains = [node for node in above if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
        return (function, above) == self._place(self._made) or above == [*mains, function]

    def _place(self, node: ast.AST) -> tuple[ast.AST, list[ast.AST]]:
        above: list[ast.AST] = []
        while not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)):
            node = self._parent[node]
            if not isinstance(node, _PLAIN):
                above.append(node)
        return node, above

    def _action(self, node: ast.expr | None, names: list[str]) -> tuple[bool | None, list[str]]:
        action = "store" if node is None else _text(node)
        if action is not None:
            return _ACTIONS.get(action), names
        if node is not None and self._of(node) == "BooleanOptionalAction":
            return True, names + [f"--no-{name[2:]}" for name in names if name.startswith("--")]
        return None, names

    def _count(self, node: ast.expr | None) -> tuple[int | None, bool]:
        if node is None:
            return 1, True
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value, True
        return None, _text(node) in ("?", "*", "+") or self._of(node) in ("OPTIONAL", "ZERO_OR_MORE", "ONE_OR_MORE")

    def _type(self, node: ast.expr | None) -> str | None:
        if node is None:
            return "str"
        if not isinstance(node, ast.Name) or node.id not in _TYPES:
            return None
        for other in self._nodes:
            is_stored = isinstance(other, ast.Name) and isinstance(other.ctx, ast.Store)
            named = getattr(other, "name", None) or (getattr(other, "id", None) if is_stored else None)
            # Give up if the script redefines the type's name: `def float(text)`, `float = np.float32`.
            if named == node.id or (isinstance(other, ast.alias) and other.asname == node.id):
                return None
        return node.id


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _choices(node: ast.expr) -> Sequence[object] | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = [_literal(argument) for argument in node.args]
        if node.keywords or not bounds or not all(type(bound) is int for bound in bounds):
            return None
        return range(*bounds)  # type: ignore[call-overload, no-any-return]
    literal = _literal(node)
    return tuple(literal) if isinstance(literal, (list, tuple, set, frozenset, dict)) else None


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
