"""Horovod's and the Azure ML SDK's APIs on Paceline's engines. Paceline itself never imports these packages.

After `install("horovod")`, a script's own `import horovod.torch as hvd` loads Paceline's package in this process. The
folder `shim/first` beside this file has the same effect in every process that has the folder on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UserError

__all__ = ["install", "shim_dir"]


def install(name: str, *, force: bool = False) -> None:
    """Make `import <name>` load Paceline's package in this process. Idempotent.

    If the real package of this name is installed, `force=True` replaces it in this process.

    Raises:
        UserError: The name is not "horovod", or the real package is installed and `force` is False.
    """
    if name != "horovod":
        raise UserError(f"paceline.compat has no {name!r}. There is: 'horovod'.")
    # Import paceline.compat.horovod only when it is used. Its import reads HOROVOD_LOG_LEVEL and may change the logger
    # `paceline.collectives`, which `import paceline.compat` alone must not do.
    from paceline.compat.horovod import aliases

    aliases.install(force=force)


def shim_dir() -> Path:
    """Return the folder that makes `import horovod` work when it is on PYTHONPATH."""
    # The modules in the folder `shim/first` hide an installed Horovod. The command `horovodrun` uses `shim/fallback` instead,
    # whose modules are imported only if Horovod is not installed.
    return Path(__file__).parent / "shim" / "first"
