"""Empty virtual environments, and the view of a base."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from paceline.environments import venv
from paceline.environments.base import base
from paceline.errors import EnvironmentBuildError
from tests.helpers import write_program, write_tree

pytestmark = pytest.mark.usefixtures("index")


@pytest.fixture
def make(tmp_path):
    def make(uv, prefix=None, python=sys.executable):
        prefix = prefix or tmp_path / "an 'env'"
        with open(os.devnull) as lock:
            found = replace(base(sys.executable, tmp_path / "bases"), python=python)
            venv.make(prefix, found, uv, venv.build_environment(), print, lock.fileno())
        return prefix

    return make


@pytest.mark.parametrize("uv", [venv.find_uv(), None, "/bin/false"], ids=["uv", "none", "broken"])
def test_new_venv_is_empty_with_and_without_uv(make, uv):
    prefix = make(uv)
    shown = subprocess.run(
        [prefix / "bin" / "python", "-c", "import sys; print(sys.prefix); import pip"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == f"{prefix}\n"
    assert "No module named 'pip'" in shown.stderr
    left = {name for name in os.listdir(venv.site_packages(prefix)) if not name.startswith("_virtualenv")}
    assert left == set()


def test_venv_prefers_its_own_packages_to_those_of_added_folders(make, tmp_path):
    prefix = make(None)
    write_tree(
        tmp_path,
        {
            "it's a base/both.py": "WHERE = 'base'",
            "it's a base/only.py": "WHERE = 'base'",
            "it's a base/more.pth": f"{tmp_path}/added\n",
            "added/editable.py": "WHERE = 'added'",
        },
    )
    (venv.site_packages(prefix) / "both.py").write_text("WHERE = 'own'")
    (venv.site_packages(prefix) / "own.pth").write_text(f"{tmp_path}/own editable\n")
    write_tree(tmp_path, {"own editable/only.py": "WHERE = 'own editable'"})
    venv.show([tmp_path / "it's a base"], prefix)
    code = "import both, only, editable; print(both.WHERE, only.WHERE, editable.WHERE, sep=', ')"
    done = subprocess.run([prefix / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "own, own editable, added\n"


def test_interpreter_without_venv_raises_environment_build_error(make, tmp_path):
    real = f'#!/bin/sh\ncase "$*" in *"-m venv"*) echo no venv module >&2; exit 1;; esac\nexec {sys.executable} "$@"\n'
    odd = write_program(tmp_path / "odd python", real)
    with pytest.raises(
        EnvironmentBuildError, match=r"no virtual environment could be made of '.*odd python': no venv module"
    ):
        make(None, python=str(odd))
