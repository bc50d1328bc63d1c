"""The table of all supported SDK names, by module, for the documentation.

`python -m <this module>` prints it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from paceline.compat import azureml
from paceline.compat.azureml import aliases


def by_module() -> dict[str, list[str]]:
    """Return a dict: module ("azureml.core.run") -> sorted list of its public names."""
    found: dict[str, list[str]] = {}
    for name in _modules(azureml.__path__, azureml.__name__):
        module = importlib.import_module(name)
        names = sorted(getattr(module, "__all__", ()))
        if names:
            found["azureml" + name[len(azureml.__name__) :]] = names
    return found


def table() -> str:
    """Return the table of supported SDK names as Markdown.

    The last rows are for modules that only repeat names of other modules: a row lists all modules that repeat the same one.
    """
    rows = [f"| {_code(module)} | {_code(*names)} |" for module, names in by_module().items()]
    for own in sorted(set(aliases.RENAMED.values())):
        modules = sorted(f"azureml.{module}" for module, name in aliases.RENAMED.items() if name == own)
        names = "refused, with an alternative" if own == "refused" else f"names of {_code(f'azureml.{own}')}"
        rows.append(f"| {_code(*modules)} | {names} |")
    return "\n".join(("| module | names |", "|---|---|", *rows)) + "\n"


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _modules(path: list[str], prefix: str) -> Iterator[str]:
    for info in pkgutil.iter_modules(path):
        if info.name in aliases.OUR_OWN or info.name.startswith("_"):
            continue
        name = f"{prefix}.{info.name}"
        yield name
        if info.ispkg:
            yield from _modules([f"{path[0]}/{info.name}"], name)


if __name__ == "__main__":
    print(table(), end="")
