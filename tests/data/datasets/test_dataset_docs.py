"""The programs on the page on partitions and datasets run unchanged."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import pytest

from paceline.workspace import Workspace
from tests.docs.pages import DOCS, blocks
from tests.engines.conftest import require_engine
from tests.helpers import run_python, write_tree
from tests.warm import TENSORFLOW, TORCH, run_alone

PROGRAMS = [block.text for block in blocks(DOCS / "partitions.md", "python")]

#: Library -> text that a program contains if it needs this library.
NEEDED = {"torch": "import torch", "tensorflow": "tensorflow_dataset", "pandas": "to_pandas_dataframe"}

#: Library -> modules that a shared process loads once for all programs.
WARM = {"torch": TORCH, "tensorflow": TENSORFLOW}

#: This script runs each program separately within one Python process, because loading TensorFlow takes longer than all programs.
RUNNER = """
import json, sys
for program in json.loads(sys.argv[1]):
    print(f"The program is\\n{program}", file=sys.stderr)
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
"""


def programs_of(library: str) -> list[str]:
    return [program for program in PROGRAMS if NEEDED[library] in program]


@pytest.mark.parametrize("library", NEEDED)
def test_documented_dataset_programs_of_each_library_run_without_error(tmp_path, library):
    require_engine(library, find_spec(library))
    assert programs_of(library)
    write_tree(Workspace.from_config().path / "data", {"people/a.csv": "age,name\n1,a\n2,b\n3,c\n4,d\n5,e\n"})
    environment = {"PACELINE_DATA_CACHE": str(tmp_path / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    if library in WARM:
        (tmp_path / "runner.py").write_text(RUNNER)
        words = (str(tmp_path / "runner.py"), json.dumps(programs_of(library)))
        done = run_alone(*words, loaded=WARM[library], environment={**os.environ, **environment}, frees=False)
        assert done.returncode == 0, done.stderr
    else:
        run_python(RUNNER, json.dumps(programs_of(library)), environment=environment)


def test_every_documented_dataset_program_is_tested():
    known = [PROGRAMS[0], *(program for library in NEEDED for program in programs_of(library))]
    assert sorted(known) == sorted(PROGRAMS)


def test_first_documented_program_prints_the_shown_items():
    assert run_python(PROGRAMS[0]).strip() == "['b', 'd']"
