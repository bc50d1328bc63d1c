"""Replace lost workers while the other workers continue (`on_failure="replace"`).

    attempts/<k>/group_<rank>.json     whether a rank in `hvd.elastic.run`, or in the steps of `parallelize`, can continue after
                                       a loss: {"generation": ...}

A generation is a group of ranks that started their collectives together. After a loss, the other ranks go back to their
last commit or step, and wait for the next generation. If all ranks were in one generation, Paceline starts the lost rank again,
in the next generation. Otherwise the attempt ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.job.plan import Launch, StartedCommand
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import Replacement, utc_now
from paceline.system.files import read_json
from paceline.system.run_variables import GENERATION_VARIABLE
from paceline.targets import Nodes


class Replacing:
    """A manager that starts lost workers of one attempt again.

    shells: The environment variables of each node, which each command extends.
    left: How many replacements `max_restarts` still allows.
    note: Called to record a replacement.
    """

    def __init__(
        self,
        launch: Launch,
        folder: RunFolder,
        nodes: Nodes,
        shells: Sequence[Mapping[str, str]],
        left: int,
        note: Callable[[Replacement], None],
    ) -> None:
        self._launch, self._folder, self._nodes, self._shells = launch, folder, nodes, shells
        self._left, self._note = left, note
        #: Generation (number of the process group) that all ranks must have reached before another lost worker can be replaced.
        self._least = 0
        #: Reason why the last lost worker was not replaced.
        self.why_not = ""
        #: Cause of the loss of the worker that was replaced last.
        self._cause = ""

    def is_ending(self, pids: Mapping[int, int]) -> bool:
        """Return whether any worker of {rank: pid} is about to end."""
        of_nodes: dict[int, list[int]] = {}
        for rank, pid in pids.items():
            of_nodes.setdefault(self._launch.places[rank].node_rank, []).append(pid)
        return hasattr(self._nodes, "are_ending") and self._nodes.are_ending(of_nodes)

    def start(
        self, lost: Mapping[int, StartedCommand], staying: Collection[int], errors: Collection[int], cause: str
    ) -> dict[int, StartedCommand]:
        """Start lost workers again. Return {rank: started command}, or {} if this is impossible.

        lost: Lost rank -> the command that had started it.
        staying: The ranks whose workers still run.
        errors: Ranks whose script raised an exception.
        cause: The cause of the loss, for the record.
        """
        groups = {place.rank: self._group(place.rank) for place in self._launch.places}
        self.why_not = self._why_not(groups, lost, staying, errors)
        if self.why_not or self._left <= 0:
            return {}
        generation = groups[min(staying)]["generation"] + 1
        started: dict[int, StartedCommand] = {}
        for rank, before in lost.items():
            # Kill the lost worker's children, which may hold its port or write into its log.
            self._nodes.kill_session(before.pid, before.command.node_rank)  # type: ignore[attr-defined]
            self._folder.worker_start(self._launch.attempt, rank).unlink(missing_ok=True)
            variables = before.command.environment | {GENERATION_VARIABLE: str(generation)}
            command = replace(before.command, environment=variables)
            try:
                shell = self._shells[command.node_rank]
                started[rank] = self._nodes.start(command, self._launch.work_dir, shell)
            except OSError as error:
                self.why_not = f"rank {rank} could not be started: {error.strerror or error}"
                return started
            if cold := started[rank].cold:
                say(f"rank {rank} starts cold: {cold}")
        self._least, self._left, self._cause = generation, self._left - 1, cause
        say(f"{_ranks(sorted(lost))} started again in group {generation} ({cause}), {_ranks(sorted(staying))} stayed")
        self._note({"started_utc": utc_now(), "ranks": sorted(lost), "cause": cause})
        return started

    def judged(self, failure: FailureReport | None) -> FailureReport | None:
        """Correct the cause of a failure that only follows from a lost worker.

        A worker may fail because it could not join the other workers after that loss, or lost its connection to the lost worker.
        """
        if failure is None or failure.cause != "exception" or failure.rank is None or not self._cause:
            return failure
        from paceline.supervisor.diagnosis.diagnose import LOST_PEER

        groups = [self._group(place.rank) for place in self._launch.places]
        has_met = all((group.get("generation") or -1) >= self._least for group in groups)
        if groups[failure.rank].get("gave_up") or (not has_met and LOST_PEER.search(failure.exception or "")):
            return replace(failure, cause=self._cause)
        return failure

    def _why_not(
        self,
        groups: Mapping[int, Mapping[str, Any]],
        lost: Collection[int],
        staying: Collection[int],
        errors: Collection[int],
    ) -> str:
        if self._nodes.lost():
            return "a node was lost"
        if not hasattr(self._nodes, "kill_session"):
            return "this compute target can't replace a worker"
        for rank, group in groups.items():
            if not group:
                return f"rank {rank} was neither in hvd.elastic.run nor past its first step of parallelize"
            if group["why_not"]:
                return str(group["why_not"])
            if group["generation"] is None:
                return f"rank {rank} had left hvd.elastic.run"
        if len({group["generation"] for group in groups.values()}) > 1 or groups[0]["generation"] < self._least:
            return "another worker was lost before all ranks had met again"
        if errors:
            return f"the script of {_ranks(sorted(errors))} raised an exception"
        if ended := sorted(groups.keys() - lost - set(staying)):
            return f"{_ranks(ended)} had ended already"
        if not staying:
            return "no worker is left"
        if 0 in lost and not groups[min(staying)]["hands_over"]:
            return "rank 0 was lost, and no other rank can hand over a state of this class"
        return ""

    def _group(self, rank: int) -> Mapping[str, Any]:
        return read_json(self._folder.worker_group(self._launch.attempt, rank)) or {}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
