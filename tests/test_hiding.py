"""Modules that are hidden come back as if they were loaded at that moment."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import run_python, write_tree

#: A package from which other modules import names. As in torch.distributed, one of its names hides a submodule of the
#: same name.
FILES = {
    "package/__init__.py": "from .part import *\nfrom .same import same\n",
    "package/part.py": "def begin():\n    return 'own'\n",
    "package/same.py": "def same():\n    return 'a function'\n",
    "package/later.py": "from .part import begin\n",
    "package/unwanted.py": "",
}
CODE = """
import sys
sys.path[:0] = sys.argv[1:3]
from paceline.system.lazy_import import when_loaded
from tests.warm.hiding import Hiding
hiding = Hiding()
for name in ("package", "package.later", "package.unwanted"):
    hiding.load(name)
before = sys.modules["package.part"]
hiding.hide()
assert not [name for name in sys.modules if name.startswith("package")]
def instead(module):
    assert module is before and module.__spec__.origin == module.__file__
    module.begin = lambda: "ours"
when_loaded("package.part", instead)
when_loaded("package.same", lambda module: None)
import package
assert "package.unwanted" not in sys.modules and "package.later" not in sys.modules
print(package.begin(), package.same(), sys.modules["package.same"].same())
import package.later
print(package.later.begin(), package.later.__loader__.path == package.later.__file__)
"""


def test_import_of_a_hidden_preloaded_module_restores_the_module_and_runs_import_hooks(
    tmp_path: Path,
) -> None:
    write_tree(tmp_path, FILES)
    said = run_python(CODE, tmp_path, Path(__file__).parents[1])
    assert said.splitlines() == ["ours a function a function", "ours True"]
