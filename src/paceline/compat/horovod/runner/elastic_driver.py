"""An elastic job of `horovodrun`: attempts on available hosts, each resumed from the last commit.

    hosts -> ranks start -> a rank is killed, or a host is lost     end the other ranks; continue on the remaining hosts
                         -> there are other hosts                   the ranks end at their next commit, with EXIT_RESIZE
                         -> all end with exit code 0                done

When ranks end, this process receives their commits, and sends them to the first rank of the next attempt.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.compat.horovod.runner import hosts as host_lists
from paceline.compat.horovod.runner import wire
from paceline.compat.horovod.runner.driver import ElasticPart, RanksDriver
from paceline.compat.horovod.runner.hosts import Host, HostWatch, Slot
from paceline.compat.horovod.runner.output import Output
from paceline.compat.horovod.runner.ranks import RankOutcome, why
from paceline.compat.horovod.runner.start import RanksJob
from paceline.errors import RunFailedError
from paceline.system.run_variables import EXIT_RESIZE

_TICK_S = 0.1
#: The job ends after this many failed attempts in a row without a commit. The value is a guess.
_FAILURES_WITHOUT_COMMIT = 3
_DEFAULT_WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class ElasticLimits:
    """Limits of an elastic job.

    Attributes:
        start: Number of ranks of the first attempt.
        least: Minimum number of ranks to continue with.
        most: Maximum number of ranks; None for the number of available slots.
        wait_s: How many seconds to wait for enough hosts.
        resets: Maximum number of attempts after the first attempt; None for no limit.
    """

    start: int
    least: int
    most: int | None = None
    wait_s: float = _DEFAULT_WAIT_S
    resets: int | None = None


class ElasticDriver:
    """A runner that repeats attempts until one succeeds or no further attempt can start.

    `job(slots)` returns the job of an attempt with a rank in each of these slots.
    """

    def __init__(
        self, job: Callable[[tuple[Slot, ...]], RanksJob], output: Output, watch: HostWatch, limits: ElasticLimits
    ) -> None:
        self._job, self._output, self._watch, self._limits = job, output, watch, limits
        self._commits: dict[str, bytes] = {}

    def run(self) -> RankOutcome:
        """Run the job's attempts, and return the outcome of the last one."""
        resets = failures = 0
        while True:
            try:
                hosts = self._await_hosts(self._limits.start if resets == 0 else self._limits.least)
            except KeyboardInterrupt:
                return RankOutcome([], None, signal.SIGINT)
            slots = tuple(host_lists.slots(hosts, self._ranks_on(hosts)))
            driver = RanksDriver(
                self._job(slots),
                self._output,
                ElasticPart(commits=self._commits, have_changed=partial(self._have_changed, slots)),
            )
            outcome = driver.run()
            if outcome.stopped_by is not None or all(rank.exit_code == 0 for rank in outcome.ranks):
                return outcome
            has_committed = self._take_commits(outcome)
            is_change = driver.is_asked_to_change and any(rank.exit_code == EXIT_RESIZE for rank in outcome.ranks)
            failures = 0 if has_committed or is_change else failures + 1
            if is_change:
                what = "there are other hosts"
            else:
                what = outcome.problem or (why(outcome) or (0, 0, "the ranks have ended"))[2]
                self._leave_out(outcome)
            resets += 1
            end = None
            if self._limits.resets is not None and resets > self._limits.resets:
                end = f"--reset-limit {self._limits.resets} is reached"
            elif failures >= _FAILURES_WITHOUT_COMMIT:
                end = f"it has failed {failures} times without a commit in between"
            next_step = "Going on from the last commit" if end is None else f"The job ends: {end}"
            print(f"horovodrun: {what.rstrip('.')}. {next_step}.", file=sys.stderr)
            if end is not None:
                return outcome

    def _ranks_on(self, hosts: Sequence[Host]) -> int:
        free = sum(host.slots for host in hosts)
        return free if self._limits.most is None else min(free, self._limits.most)

    def _await_hosts(self, ranks: int) -> list[Host]:
        deadline = time.monotonic() + self._limits.wait_s
        while True:
            hosts = self._watch.usable()
            if sum(host.slots for host in hosts) >= ranks:
                return hosts
            if time.monotonic() > deadline:
                present = ", ".join(f"{host.name}:{host.slots}" for host in hosts) or "none"
                reason = f" {self._watch.error}" if self._watch.error else ""
                raise RunFailedError(
                    f"{ranks} slots were not there within --elastic-timeout {self._limits.wait_s:g} s; the hosts that can be "
                    f"used are {present}. Those on which a rank has failed are left out (--blacklist-cooldown-range).{reason}"
                )
            time.sleep(_TICK_S)

    def _have_changed(self, slots: Sequence[Slot]) -> bool:
        """Return whether there are hosts for more ranks, or a used host was removed."""
        hosts = self._watch.usable()
        usable = {host.name: host.slots for host in hosts}
        taken = {slot.host: slot.local_size for slot in slots}
        are_gone = any(usable.get(name, 0) < count for name, count in taken.items())
        ranks = self._ranks_on(hosts)
        return ranks >= self._limits.least and (are_gone or ranks > len(slots))

    def _take_commits(self, outcome: RankOutcome) -> bool:
        """Keep the attempt's completely received commits. Return whether there are any."""
        arrived: dict[str, bytes] = {}
        for number, rank in enumerate(outcome.ranks):
            for name, content in rank.whole_files().items():
                if name != wire.RESULT:
                    # Rename the file, because in the next attempt a rank on the same host may write a file of this name.
                    arrived[f"{_state_of(name)}.of_before-{number}.safetensors"] = content
            for name in rank.files.keys() - {wire.RESULT}:
                del rank.files[name]
        # Each attempt starts from the newest stored commit. So commits of its ranks replace the stored ones.
        states = set(map(_state_of, arrived))
        self._commits = {name: data for name, data in self._commits.items() if _state_of(name) not in states} | arrived
        return bool(arrived)

    def _leave_out(self, outcome: RankOutcome) -> None:
        """Exclude hosts that are gone, or else the failed rank's host."""
        lost = {rank.host for rank in outcome.ranks if rank.is_lost or rank.connection is None}
        failed = why(outcome)
        if not lost and failed is not None:
            host = outcome.ranks[failed[0]].host
            left = [other for other in self._watch.usable() if other.name != host]
            if sum(other.slots for other in left) >= self._limits.least:
                lost = {host}
        for name in lost:
            self._watch.failed(name)


def _state_of(name: str) -> str:
    return name.partition(".of_")[0]
