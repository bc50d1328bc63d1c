"""`python stage.py RUN_DIR PLAN`: a supervisor whose target gives the nodes of a plan, one after the other.

PLAN is a JSON list, with an entry for each request for nodes: their names and their fates.

    {"name": "a"}                     a node on this machine
    {"name": "a", "is_lost": true}    it is lost once the script has made outputs/lose
    {"name": "a", "leaves": "text"}   it leaves for this reason once the script has made outputs/lose, or at once if
                                      "at_once" is true
    {"name": "a", "cut_for_s": 2}     and a second node, c: it goes silent once the script has made outputs/lose, and the
                                      supervisor learns this so many seconds after the first worker's exception
    {"name": "a", "ahead_s": 300}     its clock is so many seconds ahead of the supervisor's
    {"name": "a", "keeps": "text"}    its files can't be fetched, for this reason
    {"name": "a", "errno": 5}         its files can't be written here, for this error of the disk
    "no nodes"                        refused with this message
    {"breaks": "text"}                an internal error of Paceline
    {"loads_after_s": 0}              first entry: time from an attempt's start until it has loaded the modules of diagnosis;
                                      then it makes outputs/loaded
    {"guarded_s": 2}                  first entry: start a guardian too, which waits so long for the run's lock;
                                      with "no_locks": true on a file system without locks
    {"signal_s": 2}                   first entry: time in which an engine that has ended a worker signals the supervisor

At the end it writes the names of its loaded modules to RUN_DIR/loaded.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import TargetError
from paceline.job.plan import Node
from paceline.runs import claim
from paceline.runs.folder import RunFolder
from paceline.runs.record import utc_now
from paceline.supervisor import __main__ as supervisor_main
from paceline.supervisor import supervise, watch
from paceline.system import locks
from paceline.targets.local_nodes import LocalNodes


class Target:
    def __init__(self, plan, told: Path) -> None:
        self._plan, self._told = plan, told

    def wait_for_nodes(self, job, run_dir, waiting):
        planned = self._plan.pop(0)
        if isinstance(planned, str):
            raise TargetError(planned)
        if text := planned.get("breaks"):
            raise AssertionError(text)
        self._tell(f"gave {planned['name']}")
        names = [planned["name"], "c"][: job.node_count]
        nodes = tuple(Node(node_rank=n, name=name, address="127.0.0.1", cores=1) for n, name in enumerate(names))
        return Nodes(planned, run_dir, nodes, (1, 2), lambda: self._tell(f"took {planned['name']}"))

    def release(self, run_dir) -> None:
        self._tell("released")
        (run_dir / "released_utc").write_text(utc_now())
        time.sleep(0.05)  # longer than the resolution of file times

    def _tell(self, text: str) -> None:
        with open(self._told, "a") as file:
            file.write(f"{text}\n")


class Nodes(LocalNodes):
    def __init__(self, planned, run_dir, *given) -> None:
        super().__init__(*given)
        self._planned, self._run_dir = planned, run_dir
        self.leave_reason = self.take_away

    def shell(self, node_rank):
        return dict(os.environ) if "cut_for_s" in self._planned else None

    def lost(self):
        if not self._is_cut():
            return {}
        if self._planned.get("is_lost"):
            return {0: f"{self._planned['name']}: nothing heard for 15 s"}
        noticed = self._run_dir / "attempts/1/error_0.json"
        is_over = noticed.exists() and time.time() - noticed.stat().st_mtime > self._planned["cut_for_s"]
        return {1: "c: nothing heard for 15 s"} if is_over else {}

    def take_away(self) -> str:
        is_due = self._planned.get("at_once") or (self._run_dir / "outputs/lose").exists()
        return self._planned.get("leaves", "") if is_due else ""

    def ended(self):
        is_cut = "cut_for_s" in self._planned and self._is_cut()
        ends = [ended for ended in super().ended() if not (is_cut and ended.node_rank == 1)]
        return [replace(ended, time=ended.time + self._planned.get("ahead_s", 0)) for ended in ends]

    def _is_cut(self) -> bool:
        may_be = self._planned.get("is_lost") or "cut_for_s" in self._planned
        return bool(may_be) and (self._run_dir / "outputs/lose").exists()

    def fetch(self) -> None:
        if text := self._planned.get("keeps"):
            raise TargetError(text)
        if number := self._planned.get("errno"):
            raise OSError(number, os.strerror(number), "/data")


def tell_loaded(name: str, package: str | None = None) -> ModuleType:
    found = import_module(name, package)
    if name == "paceline.observe.stacks":  # the last module that the supervisor loads
        (folder.outputs / "loaded").touch()
    return found


def refuse(fd: int, operation: int) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


if __name__ == "__main__":
    folder = RunFolder(Path(sys.argv[1]))
    plan = json.loads(sys.argv[2])
    if plan and "loads_after_s" in plan[0]:
        watch._LOAD_S = plan[0]["loads_after_s"]
        watch.import_module = tell_loaded
    if plan and "signal_s" in plan[0]:
        supervise._SIGNAL_S = plan[0]["signal_s"]
    target: Any = Target(plan, folder.path / "told")
    supervise.target_of_run = supervisor_main.target_of_run = lambda run_dir: target
    if plan and "guarded_s" in plan[0]:
        claim._LOCK_S = plan[0]["guarded_s"]
        if plan[0].get("no_locks"):
            fcntl.flock = refuse
        sys.exit(supervisor_main.main([str(folder.path)]))
    supervise.supervise(folder, claim.Claim(folder.lock, locks.claimed(folder.lock) or b""))
    (folder.path / "loaded").write_text("\n".join(sys.modules))
