"""The programs on the page on partitions and datasets run as they stand there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from paceline.workspace import Workspace
from tests.docs.pages import DOCS, blocks
from tests.engines.conftest import require_engine
from tests.helpers import run_python, write_tree

PROGRAMS = [block.text for block in blocks(DOCS / "partitions.md", "python")]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_program_runs(tmp_path, number):
    program = PROGRAMS[number]
    for module in ("torch", "tensorflow", "pandas"):
        needed = {"pandas": "to_pandas_dataframe", "tensorflow": "tensorflow_dataset"}.get(module, f"import {module}")
        if needed in program:
            require_engine(module, find_spec(module))
    write_tree(Workspace.from_config().path / "data", {"people/a.csv": "age,name\n1,a\n2,b\n3,c\n4,d\n5,e\n"})
    run_python(program, environment={"PACELINE_DATA_CACHE": str(tmp_path / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"})


def test_the_first_program_prints_its_items():
    assert run_python(PROGRAMS[0]).strip() == "['b', 'd']"
