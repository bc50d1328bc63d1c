"""Names that other libraries taught people, on Paceline's engines. Nothing in Paceline imports this package.

`install("horovod")` lets a script's own `import horovod.torch as hvd` work in this process. The folder `shim/first` beside
this file does the same for whole processes that have it on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UserError

__all__ = ["install", "shim_dir"]


def install(name: str, *, force: bool = False) -> None:
    """Make `import <name>` find Paceline's own in this process. May be called again.

    force: put it before the real package of that name, where there is one.

    Raises:
        UserError: there is no such name here, or the real package is installed and `force` isn't set.
    """
    if name != "horovod":
        raise UserError(f"paceline.compat has no {name!r}. There is: 'horovod'.")
    # Imported here, for the package reads HOROVOD_LOG_LEVEL and may change the engine's logger when it is loaded; `import
    # paceline.compat` alone must not.
    from paceline.compat.horovod import aliases

    aliases.install(force=force)


def shim_dir() -> Path:
    """Return the folder that makes `import horovod` work for every process that has it on PYTHONPATH."""
    # `first` takes the name even where the real package is installed. `fallback` beside it, which horovodrun's ranks have,
    # lets the real one win.
    return Path(__file__).parent / "shim" / "first"
