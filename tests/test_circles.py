"""No module imports another in a circle; imports in functions, for type checkers and by name count."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.sources import SOURCE, read


def module_of(path: Path) -> str:
    parts = ("paceline", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(module: str, code: bytes, known: Mapping[str, object], *, is_package: bool = False) -> set[str]:
    """Return the modules among `known` that the code imports, at any place; a name of a package counts as the package."""
    package = module if is_package else module.rpartition(".")[0]
    found: set[str] = set()
    by_name = [[name.decode()] for name in re.findall(rb'\bimport_module\(\s*"([\w.]+)"', code)]
    for names in [*by_name, *_imported(code, package)]:
        for name in names:
            parts = name.split(".")
            above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            found |= {next((known_as for known_as in above if known_as in known), "")} - {"", module}
    return found


def _imported(code: bytes, package: str) -> Iterator[list[str]]:
    """Yield the names of each import statement, at any place in the code."""
    for node in read(code).imports:
        if isinstance(node, ast.Import):
            yield [alias.name for alias in node.names]
        else:
            outer = package.split(".")
            base = ".".join(outer[: len(outer) - node.level + 1]) if node.level else ""
            yield [".".join(part for part in (base, node.module, alias.name) if part) for alias in node.names]


#: Module -> modules that it imports only for type checkers, because two public signatures name each other's classes.
#: For example, a run has a model, and a model has a run.
FOR_TYPES = {
    "paceline.data.datasets.dataset": {"paceline.workspace"},
    "paceline.data.stores.datastore": {"paceline.workspace"},
    "paceline.environments.environment": {"paceline.workspace"},
    "paceline.models.model": {"paceline.services.service", "paceline.workspace"},
    "paceline.runs.run": {"paceline.models.model", "paceline.workspace"},
    "paceline.services.service": {"paceline.workspace"},
}


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Kosaraju): first by end of a walk, then back along arrows."""

    def walk(start: str, along: Mapping[str, set[str]], seen: set[str]) -> list[str]:
        """Return the unseen modules that `start` reaches, each behind all that it reaches."""
        order, open_ = [], [(start, iter(sorted(along[start])))]
        seen.add(start)
        while open_:
            module, rest = open_[-1]
            following = next((name for name in rest if name not in seen), None)
            if following is None:
                order.append(module)
                open_.pop()
            else:
                seen.add(following)
                open_.append((following, iter(sorted(along[following]))))
        return order

    seen: set[str] = set()
    by_end = [module for start in sorted(arrows) if start not in seen for module in walk(start, arrows, seen)]
    back: dict[str, set[str]] = {module: set() for module in arrows}
    for module, others in arrows.items():
        for other in others:
            back[other].add(module)
    seen = set()
    components = [walk(start, back, seen) for start in reversed(by_end) if start not in seen]
    return sorted(sorted(component) for component in components if len(component) > 1)


@pytest.mark.promise("arrows-point-one-way-modules")
def test_package_has_no_circular_imports() -> None:
    files = {module_of(path): path for path in SOURCE.rglob("*.py")}
    arrows = {
        module: imported(module, path.read_bytes(), files, is_package=path.name == "__init__.py")
        for module, path in files.items()
    }
    assert len(files) > 500
    for module, above in FOR_TYPES.items():
        at_run_time = read(files[module].read_bytes()).at_run_time
        names = {node.module for node in at_run_time if isinstance(node, ast.ImportFrom)}
        assert above <= arrows[module], f"{module} has no use for its exception any more"
        assert not above & names, f"{module} imports one of {sorted(above)} at run time"
        arrows[module] -= above
    assert circles(arrows) == []


def test_circular_import_is_detected() -> None:
    codes = {
        "p": "from p.a import x",
        "p.a": "def f():\n    from . import b",
        "p.b": "if TYPE_CHECKING:\n    from p.c import C\nimport os",
        "p.c": "import p.a",
        "p.d": "from p import e",
        "p.e": "from p.a import name",
        "p.f": "from p import run",
        "p.g": "import p.f",
        "p.h": 'import importlib\ndef f():\n    importlib.import_module("p.i").run()',
        "p.i": "from p.h import f",
    }
    arrows = {
        module: imported(module, code.encode(), codes, is_package=module == "p") for module, code in codes.items()
    }
    assert arrows["p.f"] == {"p"}
    assert circles(arrows) == [["p.a", "p.b", "p.c"], ["p.h", "p.i"]]
