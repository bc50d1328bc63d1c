"""Which tests may run at the same time, where pytest runs with several processes (`-n 2`): whole folders, never two of one.

Tests of a folder share what is slow to start: engines, worlds of ranks, environments.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import NodeManager

#: The longest, most of which is waiting: the other processes have the rest meanwhile.
FIRST = "tests/engines"


class ByFolder(LoadScopeScheduling):
    """Hands folders to processes, one after the other, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        # After Ctrl-C, so that engines are stopped: a process interrupts itself after 5 s, and has 10 more.
        NodeManager.EXIT_TIMEOUT = 20

    def _split_scope(self, nodeid: str) -> str:
        return folder_of(nodeid)


def folder_of(nodeid: str) -> str:
    """ "tests/cli" of "tests/cli/test_run.py::test_it"."""
    return nodeid.partition("::")[0].rpartition("/")[0]
