"""A module of Python's own that is loaded when something of it is first asked for."""

from __future__ import annotations

import pytest

from tests.helpers import run_python

HEAD = """
import sys
from paceline.system import lazy
lazy.later("inspect")
stand_in = sys.modules["inspect"]
"""


def test_what_imports_it_loads_nothing_and_finds_each_name_when_it_asks():
    code = """
import dataclasses
@dataclasses.dataclass
class A:
    "With a docstring."
    a: int
print("ast" in sys.modules)
import inspect
print(inspect is stand_in, inspect.signature(A), "ast" in sys.modules)
import inspect as again
print(again is stand_in, inspect.signature is again.signature)
from inspect import Parameter
print(Parameter.__module__)
"""
    # What dataclasses loads of it beside differs from one release of Python to the next.
    told = run_python(HEAD + code).splitlines()
    assert told[1:] == ["True (a: int) -> None True", "False True", "inspect"]


@pytest.mark.parametrize("statement", ["import inspect", "import dataclasses, inspect"])
def test_what_is_loaded_already_stays(statement):
    code = f"{statement}\nfrom paceline.system import lazy\nlazy.later('inspect')\nimport sys\n"
    assert run_python(code + "print(sys.modules['inspect'] is inspect, 'signature' in vars(inspect))") == "True True\n"
