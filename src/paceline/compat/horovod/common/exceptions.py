"""Exceptions that scripts catch by Horovod's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError


class HorovodInternalError(PacelineError, RuntimeError):
    """A collective failed. `horovod.elastic.run` then returns to the last committed state."""


class HostsUpdatedInterrupt(PacelineError, RuntimeError):  # noqa: N818
    """The set of hosts has changed between two batches.

    `skip_sync` is True if hosts were only removed. Then every remaining rank has the current state already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(PacelineError, ImportError):
    """Never raised, as Paceline compiles nothing. Scripts name it in `except`."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built for {name} {version}, but {installed_version} is installed")
        self.name, self.version, self.installed_version = name, version, installed_version


@contextmanager
def translated() -> Iterator[None]:
    """Convert engine errors in the block to Horovod's exceptions."""
    from paceline.collectives.errors import CollectivesError

    try:
        yield
    except CollectivesError as error:
        raise HorovodInternalError(str(error)) from error
