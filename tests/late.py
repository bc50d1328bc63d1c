"""Libraries that a test loads when it uses them: collecting the tests, which each process does, loads none."""

from __future__ import annotations

import importlib
from typing import Any


class _Late:
    """A module by its name; it is imported when something of it is first read or replaced."""

    # Have no `__dict__`, because monkeypatch looks for a name's value in `__dict__` and must find the one of the real module.
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def _module(self) -> Any:
        return importlib.import_module(self._name)

    def __getattr__(self, name: str) -> Any:
        # pytest asks each object of a test file for `__test__`, `_mock_name` and similar names. These must not import the module.
        if name == "_mock_name" or (name.startswith("__") and name not in ("__dict__", "__name__", "__version__")):
            raise AttributeError(name)
        return getattr(self._module(), name)

    # monkeypatch calls the next two methods.

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._module(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module(), name)


def late(name: str) -> Any:
    """`late("torch.nn")` is what `torch.nn` is, loaded at its first use: not for a class's bases or a decorator."""
    return _Late(name)
