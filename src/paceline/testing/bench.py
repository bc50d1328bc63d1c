"""Submit the conformance suite's scripts to the tested compute target, wait for them, and inspect their results."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.job.job import Job
from paceline.runs import states
from paceline.runs.run import Run
from paceline.testing import scripts
from paceline.testing.under_test import TargetUnderTest
from paceline.workspace import Experiment, Workspace

#: Seconds between SIGTERM and SIGKILL for runs that the tests end.
GRACE_S = 15.0
#: Default time limit in seconds for a condition to become true, or for a run to end.
_WAIT_S = 120.0

ENTRY_SCRIPT = "some scripts/train it's $HOME.py"
ODD_FOLDER = "a folder; $(touch owned) 'x'"
#: Arguments with characters that have a special meaning in command lines, shells and JSON.
WORDS = (
    *("two words", "", " ", 'a "quoted" name', "it's", "new\nline", "ünï ☃", "; touch owned"),
    *("$(touch owned) $NOWHERE", "`touch owned`", "&& touch owned | cat > owned", "--", "-n", "--set", "A=B", "="),
    *("*?[!a]{b,c}~", "back\\slash\\", "%s %d {} {0} %%", "\x1b[31mred"),
)
VARIABLES = {f"ODD_{number}": word for number, word in enumerate(WORDS)}


class Bench:
    """The runs that one test has submitted to the tested compute target."""

    def __init__(self, target: TargetUnderTest) -> None:
        self.target = target
        self.experiment = Experiment(Workspace(target.workspace_dir), "conformance")
        self.runs: list[Run] = []

    # --- methods that submit runs

    def submit(self, script: str, backend: str | None = None, **values: Any) -> Run:
        """Submit a script as one process, or with a `backend` on all nodes.

        values: Further fields of the job.
        """
        given = {**self.way(backend), "grace_period_seconds": GRACE_S, **self.target.values, **values}
        job = Job(entry_script=ENTRY_SCRIPT, compute_target=self.target.name, **given)
        run = self.experiment.submit(job, source_directory=self._source(script))
        self.runs.append(run)
        return run

    def finish(self, script: str, backend: str | None = None, **values: Any) -> Run:
        """Submit a script, and return the run after its end in any state."""
        run = self.submit(script, backend, **values)
        self.wait_for_end(run)
        return run

    def plain(self, backend: str | None) -> Run:
        """Return a completed run of `PLAIN` with this backend, which tests share."""
        key = f"plain {backend}"
        if key not in self.target.finished:
            run = self.finish(scripts.PLAIN, backend, arguments=WORDS, environment_variables=VARIABLES)
            assert run.status == states.COMPLETED, self.story(run)
            self.target.finished[key] = run
        return self.target.finished[key]

    def way(self, backend: str | None) -> dict[str, Any]:
        """Return fields of a distributed job on all nodes; {} without a backend.

        Skip the test if the target does not support the backend.
        """
        if backend is None:
            return {}
        if backend not in self.target.backends:
            pytest.skip(f"backend {backend!r} does not fit target {self.target.kind!r}")
        return {
            "node_count": self.target.node_count,
            "process_count_per_node": self.target.process_count_per_node,
            "distributed_backend": backend,
        }

    def _source(self, script: str) -> Path:
        top = self.target.folder / f"my sources; $(touch owned) 'x' {hashlib.sha256(script.encode()).hexdigest()[:8]}"
        if not top.exists():
            path = top / ENTRY_SCRIPT
            path.parent.mkdir(parents=True)
            path.with_name("meeting.py").write_text(scripts.MEETING)
            (top / "data").mkdir()
            (top / "data" / "tool.sh").write_text("#!/bin/sh\n")
            (top / "data" / "tool.sh").chmod(0o755)
            (top / "data" / "link").symlink_to("tool.sh")
            path.write_text(script)
        return top

    # --- methods that wait for a condition

    def wait_until(self, condition: Callable[[], object], what: str, limit_s: float = _WAIT_S) -> None:
        """Return once `condition` holds. Fail the test after `limit_s` and the target's `slack_s`."""
        looked = time.monotonic()
        deadline = looked + limit_s + self.target.slack_s
        while not condition():
            now = time.monotonic()
            assert now < deadline, f"within {limit_s:g} s not so: {what}\n{self.story(*self.runs)}"
            # Pause longer if `condition` is slow, because it may query a scheduler or list the processes of all nodes.
            time.sleep(min(0.3, max(0.05, 3 * (now - looked))))
            looked = time.monotonic()

    def wait_for_end(self, run: Run, limit_s: float = _WAIT_S) -> str:
        """Wait for the end of the run, and return its state."""
        self.wait_until(lambda: run.record().is_terminal, f"{run.id} has ended", limit_s)
        return run.status

    def wait_for_status(self, run: Run, status: str) -> None:
        """Wait for this status. Fail if the run ends with another status."""

        def reached() -> bool:
            record = run.record()
            assert record.status == status or not record.is_terminal, self.story(run)
            return record.status == status

        self.wait_until(reached, f"{run.id} is {status}")

    def wait_for_line(self, run: Run, line: str, attempt: int = 1) -> None:
        """Return once each rank's log has the line, with `{rank}` replaced by the rank."""
        job = run.record().job
        assert job is not None
        for rank in range(job.world_size):
            path, text = run.folder.rank_log(attempt, rank), line.format(rank=rank)
            self.wait_until(lambda p=path, t=text: t in text_of(p).splitlines(), f"rank {rank} has printed {text!r}")  # type: ignore[misc]

    def wait_for_nothing(self, run: Run, limit_s: float) -> None:
        """Return once no process of the run is alive on any node."""
        self.wait_until(lambda: not self.target.processes(run), "no process of the run is left", limit_s)

    # --- methods that return results of runs

    def story(self, *runs: Run) -> str:
        """Return runs' states, errors and processes as text for a failed check."""
        parts = []
        for run in runs:
            record = run.record()
            driver = text_of(run.folder.driver_log)[-3000:]
            parts.append(f"{run.id} is {record.status} ({record.waiting_for}): {record.failure}\n{driver}")
            parts.append(f"alive: {self.target.processes(run)}; left: {self.target.left(run)}")
        return "\n".join(parts)

    def close(self) -> None:
        """Cancel the test's runs. Fail if an ended run has left processes."""
        living = [run for run in self.runs if not run.record().is_terminal]
        for run in living:
            run.cancel()
        for run in living:
            self.wait_for_end(run, GRACE_S + _WAIT_S)
        for run in self.runs:
            self.wait_for_nothing(run, 5.0)
            self.wait_until(lambda r=run: not self.target.left(r), f"{run.id} has given back all", 5.0)  # type: ignore[misc]
            assert not list(run.folder.path.rglob("owned")), "a word was taken for a command by some shell"


def text_of(path: Path) -> str:
    """Return the present text of a log; "" if there is no log."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def seen(run: Run, rank: int) -> dict[str, Any]:
    """Return the JSON that a worker of the script `PLAIN` wrote."""
    found: dict[str, Any] = json.loads((run.folder.outputs / f"seen_{rank}.json").read_text())
    return found


def states_of(run: Run) -> list[str]:
    """Return the statuses that the run has had, in order."""
    found = [json.loads(line)["status"] for line in run.folder.events.read_text().splitlines()]
    return [status for index, status in enumerate(found) if index == 0 or status != found[index - 1]]


def node_of(run: Run, rank: int, attempt: int = 1) -> str:
    """Return the name of a rank's node."""
    record = run.record()
    assert record.job is not None
    return record.attempts[attempt - 1].nodes[rank // record.job.process_count_per_node]


def exit_codes(run: Run, attempt: int = 1) -> dict[int, int]:
    """Return the exit codes of an attempt, as {rank: exit code}."""
    return {int(rank): code for rank, code in run.record().attempts[attempt - 1].exit_codes.items()}
