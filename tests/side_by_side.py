"""Decides which tests may run at the same time if pytest runs with several processes (`-n 4`): units, the longest first.

A unit is a folder: its tests share things that are slow to start, such as engines, worlds of ranks and environments. Of
`tests/engines/everywhere`, a test belongs to the unit of the target that its parameter names. So each engine is started
once, by the process that has its unit. Two units never need a port, a network, a store of containers or a folder of the
same name: each lab takes free ones. Two folders whose tests start the same programs are one unit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import NodeManager

#: Group of tests that run in the same process, such as a folder -> seconds that its tests took in the last measured
#: run.
DURATIONS = Path(__file__).with_name("durations.json")
#: Assumed seconds of a group that was never measured. It starts after the groups in tests/engines, and before groups
#: that are known to be short.
_UNKNOWN_S = 60.0
_ENGINES = "tests/engines"
_EVERYWHERE = f"{_ENGINES}/everywhere"
#: Folder -> folder whose process also runs its tests. Both load TensorFlow, and one process loads it only once.
_TOGETHER = {"tests/compat/horovod/keras": "tests/compat/horovod/tensorflow"}
#: The name of a target at the beginning of a test's parameter id, such as `[ray, shared folder]` or `[ssh]`.
_TARGET = re.compile(r"\[(local|ssh|slurm|ray)\b")


def end_with_crash(node: Any) -> NoReturn:
    """End the whole run because a pytest process has crashed; report the test it was in as failed.

    xdist would replace the process and run the crashed test again. A replacement that gets a single test waits for a second one
    for ever, so a crash near the end made the suite hang.

    Raises:
        Session.Interrupted: Always.
    """
    session = node.config.pluginmanager.getplugin("dsession")
    if session.sched is not None and (test := session.sched.running(node)) is not None:
        session.handle_crashitem(test, node)
    raise pytest.Session.Interrupted(f"the pytest process {node.gateway.id} crashed")


class ByUnit(LoadScopeScheduling):
    """Hands units to processes, one after the other, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        # After Ctrl-C, a process interrupts itself after 5 s and then has 10 s to stop its engines, so pytest waits longer.
        NodeManager.EXIT_TIMEOUT = 20

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def running(self, node: Any) -> str | None:
        """Return the test that a process is in, or None between two tests."""
        units = self.assigned_work.get(node, {}).values()
        return next((nodeid for unit in units for nodeid, is_done in unit.items() if not is_done), None)


def unit_of(nodeid: str) -> str:
    """ "tests/cli" of "tests/cli/test_run.py::test_it"; of a test everywhere, the folder of the target it is about."""
    folder = nodeid.partition("::")[0].rpartition("/")[0]
    if folder != _EVERYWHERE:
        return _TOGETHER.get(folder, folder)
    # Tests without a target in their id are about hosts over SSH.
    target = _TARGET.search(nodeid)
    return f"{_ENGINES}/{target[1] if target else 'ssh'}"


def longest_first(items: Iterable[pytest.Item], durations: Mapping[str, float]) -> list[pytest.Item]:
    """Return the tests unit by unit, in the given order within a unit."""
    items = list(items)
    first: dict[str, int] = {}
    for number, item in enumerate(items):
        first.setdefault(unit_of(item.nodeid), number)

    def key(item: pytest.Item) -> tuple[float, int]:
        unit = unit_of(item.nodeid)
        return -durations.get(unit, _UNKNOWN_S), first[unit]

    return sorted(items, key=key)


def compile_own_share(config: pytest.Config) -> None:
    """Import, in one of several processes, its share of the test modules, before it collects all of them.

    In a new clone nothing is compiled yet, and pytest compiles more than Python does. The processes collect the same modules in
    the same order, so each would compile every one of them. This way each finds what the others have compiled.
    """
    if (worker := getattr(config, "workerinput", None)) is None:
        return
    root = config.rootpath
    named = [root / arg.partition("::")[0] for arg in config.args]
    files = sorted(file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py")))
    number = int(worker["workerid"].removeprefix("gw"))
    for file in files[number :: worker["workercount"]]:
        # Ignore any error here: pytest reports it when it collects the module.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def kept_durations() -> dict[str, float]:
    """What `DURATIONS` holds."""
    return dict(json.loads(DURATIONS.read_text())) if DURATIONS.exists() else {}


def keep_durations(path: Path, measured: Mapping[str, float], *, is_whole: bool) -> None:
    """Write the seconds of units. is_whole: all were run, so that other names in the file are no longer units."""
    kept = {} if is_whole or not path.exists() else json.loads(path.read_text())
    kept.update({unit: round(seconds, 1) for unit, seconds in measured.items()})
    ordered = dict(sorted(kept.items(), key=lambda pair: (-pair[1], pair[0])))
    path.write_text(json.dumps(ordered, indent=2) + "\n")
