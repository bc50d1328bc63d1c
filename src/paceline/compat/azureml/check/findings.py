"""A search for uses of the SDK in source text, with Paceline's counterparts."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.compat.azureml import aliases
from paceline.compat.azureml.check import instances

#: Result of the check for a name of the SDK: it works as written, works after a replacement, or does not work.
WORKS, REPLACED, MISSING = "works", "replaced", "missing"
_OURS = "paceline.compat.azureml"

CLUSTER = "means this machine, or the target added under this name (paceline compute add)."
_OLD = (
    # np.bool and np.long are missing in this list, because NumPy 2 has these names again.
    (r"^(?:np|numpy)\.(float|int|object|str|complex)$", "np.{0} was removed in NumPy 1.24: write {0}."),
    (r"^sklearn\.externals", "it was removed in scikit-learn 0.23: import joblib directly."),
    (r"^(?:tf|tensorflow)\.contrib", "tf.contrib ended with TensorFlow 1."),
    (
        r"^tf\.(?:placeholder|Session|global_variables_initializer|app|flags|ConfigProto)\b",
        "it is TensorFlow 1: write `import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()`.",
    ),
    (r"^horovod\.spark", "horovod.spark is not supported: submit the training as a run with several ranks."),
    (r"^tensorflow\.examples", "tensorflow.examples ended with TensorFlow 1: use tf.keras.datasets."),
)
_COMPILED = tuple((re.compile(pattern), text) for pattern, text in _OLD)

#: Cell magics whose cells contain Python. `_WRITES` matches the magic that writes its cell to a Python file.
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3")
_WRITES = re.compile(r"%%(?:writefile|file)\b.*\.py\s*$")
#: Matches a line of IPython syntax. The groups are its indentation, and the variable to which it assigns a command's output.
_LINE = re.compile(r"(\s*)(?:(\w[\w, ]*=)\s*)?(?:[%!?].*|[\w.]+\?{1,2}\s*)$")


@dataclass(frozen=True)
class DriverFinding:
    """One use of an SDK name in a program.

    Args:
        file: File that holds the use.
        line: Line of the use.
        name: Full name, such as "azureml.core.Workspace.from_config".
        becomes: WORKS, REPLACED or MISSING: whether Paceline has the name, replaces it, or lacks it.
        text: Describes the replacement, or the edit that the program needs.
    """

    file: str
    line: int
    name: str
    becomes: str
    text: str = ""


def of_folder(top: Path) -> list[DriverFinding]:
    """Return the uses of SDK names in a file or in a folder's programs."""
    found: list[DriverFinding] = []
    for file in [top] if top.is_file() else sorted(_written(top)):
        found += _of_file(str(file if top.is_file() else file.relative_to(top)), programs(file))
    return found


def _written(top: Path) -> Iterator[Path]:
    """Yield Python files and notebooks outside hidden folders and virtual environments."""
    for folder, below, files in os.walk(top):
        below[:] = [
            name for name in below if not name.startswith(".") and not Path(folder, name, "pyvenv.cfg").exists()
        ]
        yield from (Path(folder, name) for name in files if name.endswith((".py", ".ipynb")))


def _of_file(file: str, parts: Iterable[tuple[int, str]]) -> list[DriverFinding]:
    visitor = _Visitor(file)
    for before, text in parts:
        try:
            tree = parsed(text)
        except (SyntaxError, ValueError) as error:
            # Report the line that Python 3 can't parse, for example a print statement of Python 2.
            line = before + (getattr(error, "lineno", None) or 1)
            what = "(the cell)" if file.endswith(".ipynb") else "(the file)"
            visitor.found.append(
                DriverFinding(file, line, what, MISSING, f"it is not Python 3: {getattr(error, 'msg', error)}.")
            )
            continue
        ast.increment_lineno(tree, before)
        if not writes_script(text):
            visitor.visit(tree)
            continue
        script = _Visitor(file)
        script.visit(tree)
        visitor.found += script.found
    # A name that needs a change has two findings, because one of them says that the name works. Drop the finding "works".
    judged = {(one.line, one.name) for one in visitor.found if one.becomes != WORKS}
    kept = [one for one in visitor.found if one.becomes != WORKS or (one.line, one.name) not in judged]
    return sorted(dict.fromkeys(kept), key=lambda one: one.line)


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[DriverFinding] = []
        #: Name in the program -> the full name in the SDK, such as "azureml.core.Workspace".
        self._names: dict[str, str] = {}
        #: Variable in the program -> classes of the SDK. The variable may hold an instance of one of these classes.
        self._held: dict[str, tuple[type, ...]] = {}
        #: Number of `try` blocks around the present code. In such a block, the program itself handles a refused call's exception.
        self._tries = 0

    def visit_Try(self, node: ast.Try) -> None:
        self._tries += 1
        for one in node.body:
            self.visit(one)
        self._tries -= 1
        for other in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(other)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside, names = self._held, self._names
        self._held, self._names = dict(outside), dict(names)
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self._hold(arg.arg, self._classes(arg.annotation) if arg.annotation else ())
        self.generic_visit(node)
        self._held, self._names = outside, names
        for one in ast.walk(node):
            for name in one.names if isinstance(one, ast.Global) else ():
                self._held.pop(name, None)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # the name is ast's

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)
            if isinstance(target, ast.Name):
                self._hold(target.id, self._made(node.value))

    def visit_withitem(self, node: ast.withitem) -> None:
        self.generic_visit(node)
        if isinstance(node.optional_vars, ast.Name):
            self._hold(node.optional_vars.id, self._made(node.context_expr))

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._hold(node.id, ())

    def _hold(self, name: str, classes: tuple[type, ...]) -> None:
        self._held.pop(name, None)
        self._names.pop(name, None)
        if classes:
            self._held[name] = classes

    def _classes(self, node: ast.AST) -> tuple[type, ...]:
        """Return the SDK class that an expression names as (class,), otherwise ()."""
        first, _, rest = (_dotted(node) or "").partition(".")
        if first not in self._names:
            return ()
        found = found_at(f"{self._names[first]}{'.' * bool(rest)}{rest}")
        return (found,) if isinstance(found, type) else ()

    def _made(self, node: ast.AST) -> tuple[type, ...]:
        """Return the possible SDK classes of an expression's value; () if unknown."""
        if isinstance(node, ast.Name):
            return self._held.get(node.id, ())
        if not isinstance(node, ast.Call):
            return ()
        if classes := self._classes(node.func):
            return instances.given_by_call(classes[0])
        if not isinstance(node.func, ast.Attribute):
            return ()
        owners = self._classes(node.func.value) or self._made(node.func.value)
        return tuple(dict.fromkeys(one for owner in owners for one in instances.given_by(owner, node.func.attr)))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_sdk(alias.name):
                self._use(node, alias.name)
                self._names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else "azureml"
            elif (old := of_old_library(alias.name)) is not None:
                self.found.append(DriverFinding(self.file, node.lineno, alias.name, MISSING, old))

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
            self.found.append(DriverFinding(self.file, node.lineno, module, MISSING, old))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = _dotted(node)
        if dotted is not None:
            first, _, rest = dotted.partition(".")
            if first in self._names:
                # Resolve `azureml.core.VERSION` and `Workspace.from_config`. `run.log` can't be resolved here, because the type
                # of the variable `run` is unknown.
                self._use(node, f"{self._names[first]}.{rest}")
                return
            if (old := of_old_library(dotted)) is not None:
                self.found.append(DriverFinding(self.file, node.lineno, dotted, MISSING, old))
        classes = self._made(node.value)
        if classes and isinstance(node.ctx, ast.Load):
            name = f"{instances.sdk_name(classes[0])}.{node.attr}"
            if (why := instances.missing(classes, node.attr)) is not None:
                self.found.append(DriverFinding(self.file, node.lineno, name, MISSING, why))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        value = node.value
        if isinstance(value, ast.Attribute) and value.attr == "data" and isinstance(node.slice, ast.Constant):
            owner = value.value.id if isinstance(value.value, ast.Name) else ""
            if "loss" in owner and node.slice.value == 0:
                text = f"since PyTorch 0.5 a loss is a number: write {owner}.item()."
                self.found.append(DriverFinding(self.file, node.lineno, f"{owner}.data[0]", MISSING, text))
        place = value if isinstance(value, ast.Attribute) and value.attr == "compute_targets" else None
        if place is not None and isinstance(node.slice, ast.Constant) and (owners := self._made(place.value)):
            name = f"{instances.sdk_name(owners[0])}.compute_targets"
            self.found.append(DriverFinding(self.file, node.lineno, name, REPLACED, f"{node.slice.value!r} {CLUSTER}"))
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
            self.found.append(DriverFinding(self.file, node.lineno, name, REPLACED, text))
        made = self._classes(node.func)
        if made and instances.is_target(made[0]) and not self._tries and missing(name) is None:
            words = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            self.found.append(
                DriverFinding(
                    self.file,
                    node.lineno,
                    name,
                    MISSING,
                    instances.unknown_target(values.get("name", words[0] if words else None)),
                )
            )
        self.generic_visit(node)

    def _use(self, node: ast.AST, name: str) -> None:
        why = missing(name)
        line = getattr(node, "lineno", 1)
        self.found.append(DriverFinding(self.file, line, name, WORKS if why is None else MISSING, why or ""))


def missing(name: str) -> str | None:
    """Return why an SDK name such as "azureml.core.Run.get_context" is missing, None if present."""
    return _looked_up(name)[1]


def found_at(name: str) -> Any:
    """Return Paceline's object for an SDK name, or None if missing or unknown."""
    return _looked_up(name)[0]


def _looked_up(name: str) -> tuple[Any, str | None]:
    """Return (object, None) for an SDK name, or (None, reason) if Paceline lacks it."""
    parts = name.split(".")[1:]
    if parts[:2] == ["contrib", "services"]:
        return None, None  # no finding: Paceline's server provides this module to scoring scripts
    if (why := aliases.FINDER.absent(".".join(parts))) is not None:
        return None, why
    parts = _here(parts)
    target: Any = importlib.import_module(_OURS)
    for number, part in enumerate(parts):
        try:
            target = getattr(target, part)
        except AttributeError:
            if not hasattr(target, "__path__"):
                return None, f"{'.'.join(('azureml', *parts[:number]))} has no {part} here."
            try:
                target = importlib.import_module(".".join((_OURS, *parts[: number + 1])))
            except ModuleNotFoundError:
                return None, f"there is no {'.'.join(('azureml', *parts[: number + 1]))} here."
        if (why := instances.refusal(target)) is not None:
            return None, why
        if not isinstance(target, (type, ModuleType)):
            return None, None  # no finding: the type of a function's result, or of a value, is unknown
    return target, None


def _here(parts: list[str]) -> list[str]:
    """Return a name's parts, with Paceline's module in place of the SDK's."""
    for other, ours in aliases.RENAMED.items():
        if ".".join(parts[: (count := other.count(".") + 1)]) == other:
            return [*ours.split("."), *parts[count:]]
    return parts


def _all_of(module: str) -> list[str]:
    """Return the names that `from module import *` imports; [] if Paceline lacks the module."""
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


def of_old_library(name: str) -> str | None:
    """Return how to replace a name of an outdated library, or None."""
    for pattern, text in _COMPILED:
        if (match := pattern.search(name)) is not None:
            return text.format(*match.groups())
    return None


def of_call(name: str, values: Mapping[str, object], words: Sequence[object]) -> Iterator[str]:
    """Yield sentences on how Paceline replaces or ignores a call's arguments.

    `values` has the keyword arguments of the call, and `words` the positional arguments that are constants.
    """
    last = name.rpartition(".")[2]
    if last == "provisioning_configuration":
        yield f"vm_size={values['vm_size']!r} {CLUSTER}" if values.get("vm_size") else f"a cluster {CLUSTER}"
    target = values.get("compute_target")
    if name.startswith("azureml.") and isinstance(target, str) and target.lower() not in ("local", "amlcompute", ""):
        yield f"compute_target={target!r} {CLUSTER}"
    if name in ("azureml.core.Workspace", "azureml.core.workspace.Workspace") or name.endswith(".Workspace.get"):
        yield "under any name, this is this machine's workspace (docs/from-azureml.md)."
    if last in ("register_azure_file_share", "register_azure_data_lake", "register_hdfs", "register_dbfs"):
        yield "add a folder under the store's name: paceline data add NAME /mnt/NAME"
    if name.startswith("azureml.train.") and values.get("use_gpu") is True:
        yield "use_gpu=True: on a machine without GPUs the workers run on its CPUs."
    if name.startswith("azureml.train.") and values.get("framework_version"):
        yield f"framework_version={values['framework_version']!r}: the version that is installed is used."
    if name.startswith("azureml.train.") and (image := values.get("custom_docker_image")):
        yield f"custom_docker_image={image!r} is used if podman or docker answers."
    if last == "init_process_group" and ("nccl" in words or values.get("backend") == "nccl"):
        yield "NCCL needs GPUs: write 'gloo' for machines without GPUs."
    if last == "Environment" and words and str(words[0]).lower().startswith("azureml-"):
        yield f"the curated environment {words[0]!r} means the packages installed here."
    for package in (word for word in words if isinstance(word, str)):
        if last in ("add_conda_package", "add_pip_package") and package.startswith("azureml"):
            yield f"{package} is left out: Paceline provides azureml to scripts."


def programs(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (number of preceding lines, text) of each part to parse.

    The parts of a notebook are its code cells; a Python file is a single part. An unreadable file, or a notebook in
    another language, yields nothing.
    """
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        if file.suffix != ".ipynb":
            yield 0, text
            return
        book = json.loads(text)
        kernel = book.get("metadata", {}).get("kernelspec", {}).get("language", "python")
        cells = ["".join(cell.get("source", [])) for cell in book.get("cells", []) if cell.get("cell_type") == "code"]
    except (OSError, ValueError, AttributeError, TypeError):
        return
    before = 0
    for cell in cells if "python" in str(kernel).lower() else ():
        yield before, cell
        before += len(cell.splitlines())


def writes_script(text: str) -> bool:
    """Return whether a notebook's cell writes a file (`%%writefile`) instead of running."""
    return _WRITES.match(text.strip().partition("\n")[0]) is not None


def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a program or of a notebook's cell.

    Raises:
        SyntaxError: The text is not Python 3.
    """
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if first.startswith("%%"):
        if not first.startswith(_PYTHON_CELLS) and not _WRITES.match(first):
            return ast.Module(body=[], type_ignores=[])
        text = text.replace(first, "", 1)
    text = textwrap.dedent(text)
    try:
        return _tree(text)
    except SyntaxError:
        return _tree(_plain(text))


def _tree(text: str) -> ast.Module:
    found = compile(text, "<cell>", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(found, ast.Module)
    return found


def _plain(text: str) -> str:
    """Return a cell's text with each line of IPython syntax replaced by valid Python."""
    # Remove the first line's indentation from all lines of the cell, as IPython does.
    lines = text.splitlines()
    if lines and (indent := len(lines[0]) - len(lines[0].lstrip())):
        lines = [line[indent:] if not line[:indent].strip() else line for line in lines]
    kept: list[str] = []
    goes_on = False
    for line in lines:
        match = _LINE.match(line)
        if goes_on:
            kept.append("")
        elif match is not None:
            kept.append(f"{match[1]}{f'{match[2]} None' if match[2] else 'pass'}")
        else:
            kept.append(line)
        goes_on = (goes_on or match is not None) and line.rstrip().endswith("\\")
    return "\n".join(kept)
