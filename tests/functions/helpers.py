"""Modules of a user with functions, in a folder of their own."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

#: Each test needs a module with its own name, because Python caches modules by name.
_numbers = itertools.count()


def module_of(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module with this code from a new folder, and let it use a workspace below `folder`."""
    name = f"jobs_{next(_numbers)}"
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / f"{name}.py").write_text(f"import os, sys\nimport paceline\n{code}", encoding="utf-8")
    monkeypatch.syspath_prepend(source)
    monkeypatch.setenv("PACELINE_WORKSPACE", str(folder / "ws"))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    finally:
        sys.dont_write_bytecode = False
