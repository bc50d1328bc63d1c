"""Facts about an interpreter and its installed packages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from paceline.environments import base as module
from paceline.environments.base import base
from paceline.errors import EnvironmentSpecError
from tests.helpers import write_program


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(module, "_known", {})
    module._here.cache_clear()


@pytest.fixture
def other(tmp_path):
    """The interpreter of an empty venv."""
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    return str(tmp_path / "other" / "bin" / "python")


def test_running_interpreter_is_described_without_starting_it_again(tmp_path, monkeypatch):
    asked = module._ask(sys.executable, "", tmp_path)
    monkeypatch.setattr("subprocess.run", None)
    assert base(sys.executable, tmp_path) == asked


def test_interpreter_is_probed_once_for_all_processes(tmp_path, other, monkeypatch):
    found = base(other, tmp_path / "cache")
    assert (found.python, found.version) == (other, platform.python_version())
    assert [str(folder) for folder in found.folders] == [str(next((tmp_path / "other").glob("lib/*/site-packages")))]
    monkeypatch.setattr("subprocess.run", None)
    assert base(other, tmp_path / "cache") is found
    module._known.clear()
    assert base(other, tmp_path / "cache") == found


def test_interpreter_whose_pyvenv_cfg_has_changed_is_probed_again(tmp_path, other):
    before = base(other, tmp_path / "cache")
    config = tmp_path / "other" / "pyvenv.cfg"
    config.write_text(config.read_text().replace("= false", "= true"))
    after = base(other, tmp_path / "cache")
    assert len(after.site_folders) > len(before.site_folders)
    assert (before.user_folder, after.user_folder is None) == (None, False)


def test_interpreter_probe_imports_nothing_from_the_working_directory_or_pythonpath(tmp_path, other, monkeypatch):
    for name in ("platform", "sysconfig", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('read')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert base(other, tmp_path / "cache").implementation == sys.implementation.name


def test_interpreter_behind_a_shim_script_is_resolved_again_after_the_script_changes(tmp_path, other):
    script = write_program(tmp_path / "shim", f'#!/bin/sh\nexec "{other}" "$@"\n')
    assert base(str(script), tmp_path / "cache").python == other
    write_program(script, f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    module._known.clear()
    assert base(str(script), tmp_path / "cache").python == sys.executable


def test_user_site_is_excluded_with_pythonnousersite(tmp_path, monkeypatch):
    from dataclasses import replace

    (tmp_path / "user").mkdir()
    found = replace(base(sys.executable, tmp_path), user_folder=str(tmp_path / "user"))
    assert found.folders[0] == tmp_path / "user"
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    assert tmp_path / "user" not in found.folders


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho 'no such thing' >&2\nexit 3\n", "does not run as a Python interpreter: no such thing"),
        ("#!/bin/sh\necho hello\n", "does not run as a Python interpreter"),
        ("#!/bin/sh\n", "does not run as a Python interpreter"),
        ("#!/nowhere/sh\n", "does not run as a Python interpreter"),
    ],
)
def test_base_interpreter_is_refused_if_the_program_does_not_run_as_python(tmp_path, script, message):
    program = write_program(tmp_path / "a program", script)
    with pytest.raises(EnvironmentSpecError, match=message):
        base(str(program), tmp_path / "cache")


def test_missing_interpreter_is_named(tmp_path):
    with pytest.raises(EnvironmentSpecError, match="there is no interpreter '/nowhere/python'"):
        base("/nowhere/python", tmp_path)


def test_damaged_or_unwritable_interpreter_cache_is_ignored(tmp_path, other):
    found = base(other, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    for text in ("{", "[]", '{"asked": 1}', kept.read_text().replace('"version"', '"other"')):
        kept.write_text(text)
        module._known.clear()
        assert base(other, tmp_path / "cache") == found
    (tmp_path / "file").write_text("")
    module._known.clear()
    assert base(other, tmp_path / "file") == found
