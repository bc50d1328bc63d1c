"""What an agent may cost a node."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
import paceline.remote.agent


@pytest.mark.promise("nothing-installed-host-python-3")
def test_agent_imports_only_the_standard_library():
    source = Path(paceline.__file__).parent.parent
    code = f"import sys; sys.path.append({str(source)!r}); import paceline.remote.agent.guardian, paceline.remote.agent.agent"
    # -S leaves out `site`, so no installed package can be imported.
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_bootstrap_program_is_valid_python_3_6():
    source = (Path(paceline.remote.agent.__file__).parent / "boot.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    found = ast.walk(ast.parse(source))
    names = {node.module for node in found if isinstance(node, ast.ImportFrom)}
    assert names == {"typing", "paceline.remote.agent.guardian"}
