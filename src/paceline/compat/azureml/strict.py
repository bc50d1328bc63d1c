"""Mutable configuration objects that reject misspelled attributes, as in the SDK."""

from __future__ import annotations

import json
from typing import Any


class Strict:
    """A base class that rejects new attributes after `__init__`."""

    #: Names of obsolete attributes. Old programs may set these attributes, but they have no effect.
    _ignored: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        made = cls.__init__

        def __init__(self: Any, *arguments: object, **named: object) -> None:  # noqa: N807
            made(self, *arguments, **named)
            # Wait for the own class's __init__, which ends last: the __init__ of each base class is wrapped, too.
            if type(self) is cls:
                object.__setattr__(self, "_is_made", True)

        __init__.__doc__, __init__.__wrapped__ = made.__doc__, made  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_is_made", False) and not name.startswith("_") and not hasattr(self, name):
            if name in self._ignored:
                return
            settable = {key for key, value in vars(type(self)).items() if isinstance(value, property) and value.fset}
            known = ", ".join(sorted({key for key in vars(self) if not key.startswith("_")} | settable))
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; it has {known}.")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return json.dumps(self._plain(), indent=4, default=str)

    def _plain(self) -> dict[str, object]:
        """Return the attributes as they are printed, with the SDK's camel case names."""
        return {
            camel_case(key): value._plain() if isinstance(value, Strict) else value
            for key, value in vars(self).items()
            if not key.startswith("_")
        }


def camel_case(name: str) -> str:
    """Return `nodeCount` for `node_count`."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)
