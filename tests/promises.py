"""The list of promises: `python -m tests.promises` writes docs/promises.md from tests/promises.yaml and the marks on tests.

    @pytest.mark.promise("readers-never-see-half-written-record")

Nothing is imported to find the marks, so the page can be made without any engine.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import yaml

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "promises.md"

INTRODUCTION = """# What is promised, and what keeps it

Each line is a promise of the README, of these pages or of a benchmark, with the tests that fail if it is broken. Paths are those
below `tests/` and `benchmarks/`. The page is made from marks on the tests: `python -m tests.promises` writes it."""


@dataclass(frozen=True)
class Promise:
    """One promise.

    Attributes:
        name: The name in the marks of tests.
        text: The sentence on the page.
        benchmarks: Scripts and results below benchmarks/ that measure it.
        tests: Single cells of parametrized tests, and tests of the conformance suites, which have no marks.
        proof: The variable with which `make proof` does the full number, as `NAME=VALUE`; "" for none.
    """

    name: str
    text: str
    benchmarks: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    proof: str = ""


def read_promises() -> dict[str, list[Promise]]:
    """Return the promises of each section of the page."""
    sections = yaml.safe_load((TESTS / "promises.yaml").read_text(encoding="utf-8"))
    return {
        section: [_promise(name, value) for name, value in promises.items()] for section, promises in sections.items()
    }


def _promise(name: str, value: str | dict[str, object]) -> Promise:
    if isinstance(value, str):
        return Promise(name, value)
    lists = {key: tuple(words) for key, words in value.items() if isinstance(words, list)}
    return Promise(name, str(value["text"]), proof=str(value.get("proof", "")), **lists)


def marked_tests() -> dict[str, list[str]]:
    """Return the tests that carry each promise's name, as `path::test` below tests/."""
    tests: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if "mark.promise(" not in (code := path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(code)):
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise":
                    for name in map(ast.literal_eval, decorator.args):
                        tests.setdefault(name, []).append(
                            f"{path.relative_to(TESTS).as_posix()}::{getattr(node, 'name', '')}"
                        )
    return tests


def page() -> str:
    """Return the text of docs/promises.md."""
    tests = marked_tests()
    lines = [INTRODUCTION]
    for section, promises in read_promises().items():
        lines.append(f"\n## {section}\n")
        for promise in promises:
            keepers = [*sorted({*tests.get(promise.name, ()), *promise.tests}), *promise.benchmarks]
            words = [f"- {promise.text}", *(f"`{keeper}`" for keeper in keepers)]
            lines.append(" ".join([*words, f"proof: `{promise.proof}`"] if promise.proof else words))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
