"""Names that will be removed, and experimental names, as promised by the page on stability."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from paceline.system.deprecation import deprecated, experimental
from tests.sources import SOURCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stability.md"


def test_deprecated_function_warns_its_caller_and_still_works() -> None:
    @deprecated("0.2", removed_in="0.4", instead="new()")
    def old(number: int) -> int:
        """Double a number."""
        return 2 * number

    with pytest.warns(
        DeprecationWarning, match=r"old is deprecated since Paceline 0.2 and goes away in 0.4. Use new\(\)."
    ) as seen:
        assert old(2) == 4

    assert seen[0].filename == __file__
    assert old.__doc__ is not None
    assert old.__doc__.startswith("Double a number.\n\nDeprecated: ")


def test_experimental_decorator_adds_a_note_to_the_docstring() -> None:
    @experimental("0.1")
    class New:
        """A new thing."""

    assert New.__doc__ == "A new thing.\n\nExperimental since Paceline 0.1: any version may change it."


def test_page_on_stability_lists_the_experimental_names() -> None:
    marked = set()
    for path in SOURCE.rglob("*.py"):
        if "@experimental(" in (text := path.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(text)):
                for decorator in getattr(node, "decorator_list", ()):
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "experimental":
                        marked.add((getattr(node, "name", ""), ast.literal_eval(decorator.args[0])))
    assert marked == set(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
