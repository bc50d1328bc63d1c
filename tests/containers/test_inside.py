"""The first thing in a container, run here without one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.containers import inside

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def run(*options, command=None, **environment):
    """The arguments and the environment that a command finds."""
    words = command or [sys.executable, "-c", SHOW, "two words", "--", "-x"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", inside.__file__, *options, "--", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.returncode, done.stderr) if done.returncode else json.loads(done.stdout)


def test_variables_with_the_paceline_set_prefix_are_set_without_it_inside_the_container():
    arguments, found = run(
        _PACELINE_SET_HOME="/mine",
        _PACELINE_SET_TOKEN="a\n'b'",
        _PACELINE_SET_EMPTY="",
        _PACELINE_SET_IMAGES="replaced",
        IMAGES="the image's",
        PACELINE_RUN_ID="r",
    )
    assert arguments == ["two words", "--", "-x"]
    found.pop("LC_CTYPE", None)
    assert found == {"HOME": "/mine", "TOKEN": "a\n'b'", "EMPTY": "", "IMAGES": "replaced", "PACELINE_RUN_ID": "r"}


def test_default_variable_is_set_in_a_container_only_if_image_and_run_set_none():
    _, found = run(
        _PACELINE_DEFAULT_A="1", _PACELINE_DEFAULT_B="1", _PACELINE_DEFAULT_C="1", B="2", _PACELINE_SET_C="3"
    )
    assert {name: found[name] for name in "ABC"} == {"A": "1", "B": "2", "C": "3"}


def test_folder_of_environment_programs_comes_first_on_path():
    assert run("--path", "/env/bin", PATH="/usr/bin")[1]["PATH"] == "/env/bin:/usr/bin"
    assert run("--path", "/env/bin")[1]["PATH"] == f"/env/bin:{os.defpath}"


def test_home_of_the_image_is_kept_if_writable(tmp_path):
    assert run("--home", "/nowhere", HOME=str(tmp_path))[1]["HOME"] == str(tmp_path)


@pytest.mark.parametrize("images", ["/", "/nowhere", None])
def test_home_is_created_in_the_first_writable_folder_if_the_image_has_no_usable_home(tmp_path, images):
    variables = {"HOME": images} if images else {}
    home = Path(run("--home", "/nowhere", "--home", str(tmp_path), **variables)[1]["HOME"])
    assert home.parent == tmp_path
    assert home.is_dir()
    assert home.stat().st_mode & 0o777 == 0o700


def test_missing_worker_command_in_a_container_is_named_with_exit_code_127():
    code, told = run(command=["nothing-of-this-name"], PATH="/usr/bin")
    assert code == 127
    assert "paceline: 'nothing-of-this-name' could not be started in the container" in told


def test_interpreter_probe_returns_version_and_executable_of_python():
    done = subprocess.run(
        [sys.executable, "-I", "-S", inside.__file__, "--probe"], env={}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.strip().removeprefix("paceline-probe:"))
    assert found["version"] == list(sys.version_info[:3])
    assert found["executable"] == sys.executable


def test_interpreter_probe_file_is_valid_syntax_for_python_3_4():
    tree = ast.parse(Path(inside.__file__).read_bytes(), feature_version=(3, 4))
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.AnnAssign))]
    assert "annotations" not in Path(inside.__file__).read_text()
