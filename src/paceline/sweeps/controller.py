"""A sweep's own supervisor: proposes points, hands trials over, judges their curves, and says how it all ended.

All that it has to know lies in the sweep's record and its children's. So another one, started in its place, goes on where it
was: it reads the children, and the next number is the first that is not there.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import shutil
import time
from pathlib import Path

from paceline.errors import EngineError, PacelineError
from paceline.job.job import Job
from paceline.runs import read, removal, states, store, tags_and_properties
from paceline.runs.failure import CAUSES, EXIT_CANCELED, FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, parse_utc, utc_now
from paceline.submit import SourceCopy, submit
from paceline.supervisor.logs import say
from paceline.sweeps import results
from paceline.sweeps.children import child_id, children, trial_of
from paceline.sweeps.curves import CurveReader
from paceline.sweeps.points import job_of
from paceline.sweeps.samplers.samplers import make_sampler
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial, is_better
from paceline.system.files import read_json

#: Between two looks at the trials that run.
_LOOK_S = 0.1
#: How often a record that has not changed is read all the same, to see that somebody still looks after the trial.
_RECORD_S = 1.0
#: After an engine has not taken a trial.
_RETRY_S = 5.0
#: Completed trials without the primary metric, and none with it, that end a sweep.
_WITHOUT_METRIC = 3


class Controller:
    """Sees one sweep through. For the holder of its lock."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.record = store.stored(folder)
        assert self.record.sweep is not None, "its kind is sweep"
        assert self.record.job is not None, "a sweep has the job of its trials"
        self.spec = SweepSpec.from_json(self.record.sweep)
        self.job: Job = self.record.job
        self._secrets: dict[str, str] = read_json(folder.secrets) or {}
        self._trials: list[Trial] = []
        self._live: dict[int, _Watch] = {}
        self._stopped: set[int] = set()
        self._best: float | None = None
        self._leader: int | None = None
        # A sampler that has nothing left stays so: of a grid or a small space every point has been proposed.
        self._is_exhausted = False
        self._not_before = 0.0
        self._sampler = make_sampler(
            self.spec.sampler,
            self.spec.space,
            self.spec.seed,
            (self.spec.goal,),
            repeats=self.spec.repeats,
            source=folder.snapshot.resolve(),
        )

    def run(self) -> None:
        """To the sweep's end, which is written down."""
        self._take_up()
        if self.record.status != states.RUNNING:
            started = self.record.started_utc or utc_now()
            self.record = store.change(self.folder, self.record, states.RUNNING, started_utc=started)
        while True:
            changed = self._look()
            self._take_more()
            end = self._end_wanted()
            if end:
                self._cancel_all(end)
                if not self._live:
                    break
            else:
                if changed:
                    self._judge()
                self._hand_over()
                if not self._live and self._is_done():
                    break
            time.sleep(_LOOK_S)
        self._finish()

    # --- what was there before

    def _take_up(self) -> None:
        """Read the children that are there; of one that was being made when an earlier controller died, make it again."""
        # A kill in the midst of a submission leaves the hidden folder, and `store.create` refuses to make one that is there.
        shutil.rmtree(self._runs_dir / f".new-{child_id(self.folder.run_id, self._count())}", ignore_errors=True)
        records = list(children(self.folder))
        # Only the last one can be such a child, for the next number is given out after a submission has returned.
        if records and _never_began(records[-1]):
            removal.remove(RunFolder(self._runs_dir / records.pop().run_id))
        for record in records:
            trial = trial_of(record, self._runs_dir, self.spec)
            self._trials.append(trial)
            if not trial.is_over:
                self._live[trial.number] = _Watch(RunFolder(self._runs_dir / trial.run_id), self.spec.metric)
            self._tell_best(trial)
        if records:
            say(f"going on with {len(records)} trials, of which {len(self._live)} run")

    @property
    def _runs_dir(self) -> Path:
        return self.folder.path.parent

    def _count(self) -> int:
        number = 0
        while RunFolder(self._runs_dir / child_id(self.folder.run_id, number)).record.exists():
            number += 1
        return number

    # --- looking

    def _look(self) -> bool:
        """Bring the trials up to date; whether a curve or a state has changed."""
        changed = False
        # Over a copy: trials that have ended are taken out on the way.
        for number, watch in list(self._live.items()):
            before = self._trials[number]
            after = watch.look(before)
            if after is before:
                continue
            changed = True
            self._trials[number] = after
            self._tell_best(after)
            if after.is_over:
                del self._live[number]
                self._tell_end(after)
        return changed

    def _tell_best(self, trial: Trial) -> None:
        value = trial.best(self.spec.goal)
        if value is None or (self._best is not None and not is_better(value, self._best, self.spec.goal)):
            return
        self._best = value
        if self._leader != trial.number:
            self._leader = trial.number
            say(f"trial {trial.number} has the best {self.spec.metric} so far: {value:g}")

    def _tell_end(self, trial: Trial) -> None:
        value = trial.best(self.spec.goal)
        what = f"{self.spec.metric} {value:g}" if value is not None else f"no {self.spec.metric}"
        say(f"trial {trial.number} is {trial.status}: {what}")
        # One warning is enough; the trials that come after lack the metric for the same reason.
        if trial.status == states.COMPLETED and not trial.curve and not self.record.warnings:
            self._warn(self._no_metric(trial))

    def _warn(self, text: str) -> None:
        say(f"warning: {text}")
        self.record = dataclasses.replace(self.record, warnings=(*self.record.warnings, text))
        store.write(self.folder, self.record)

    def _no_metric(self, trial: Trial) -> str:
        names = sorted(CurveReader(RunFolder(self._runs_dir / trial.run_id).metrics, self.spec.metric).names)
        logged = (
            f"It logged {', '.join(names)}" if names else "It logged nothing: call run.log(name, value) in the script"
        )
        return f"trial {trial.number} has ended without a value of the primary metric {self.spec.metric!r}. {logged}."

    # --- more trials

    def _take_more(self) -> None:
        """What `paceline sweep more` has asked for while the sweep runs."""
        request = self.folder.path / results.MORE
        asked = read_json(request)
        if isinstance(asked, dict) and isinstance(asked.get("trials"), int):
            self.spec = dataclasses.replace(self.spec, trials=self.spec.trials + asked["trials"])
            self.record = dataclasses.replace(self.record, sweep=self.spec.to_json())
            # Written before the request goes: a kill in between adds the trials twice, the other order would lose them.
            store.write(self.folder, self.record)
            request.unlink(missing_ok=True)
            say(f"{asked['trials']} more trials were asked for: {self.spec.trials} in all")

    # --- judging

    def _judge(self) -> None:
        if self.spec.stop is None:
            return
        # A policy goes on naming a trial until it is over, and its processes may take their time to end.
        for number, reason in self.spec.stop.stops(self._trials, self.spec.goal).items():
            # A trial that ended in the meantime is not touched: what it has reached stands as it is.
            if number in self._live and number not in self._stopped:
                self._stopped.add(number)
                self._cancel(number, reason)
                say(f"trial {number} is stopped: {reason}")

    def _cancel(self, number: int, reason: str) -> None:
        folder = RunFolder(self._runs_dir / self._trials[number].run_id)
        # Who canceled the trial by hand keeps that as its reason.
        if not folder.cancel_request.exists():
            # A trial that can't be told now runs on to its own end, which harms nothing but the time it takes.
            with contextlib.suppress(PacelineError, OSError):
                # The tag goes first, so that whoever sees the trial end can read why.
                tags_and_properties.set_tags(folder.notes, {"stopped": reason})
                read.request_cancel(folder, by=f"sweep {self.folder.run_id}", reason=reason)

    def _cancel_all(self, reason: str) -> None:
        for number in self._live:
            if number not in self._stopped:
                self._stopped.add(number)
                self._cancel(number, reason)

    # --- handing over

    def _hand_over(self) -> None:
        """Start trials until as many run as may."""
        while len(self._live) < self.spec.concurrent and len(self._trials) < self.spec.trials:
            if self._is_exhausted or time.monotonic() < self._not_before:
                return
            number = len(self._trials)
            chosen = self._proposed(number)
            if chosen is None:
                self._is_exhausted = True
                say(f"the space has no further point: {number} trials in all")
                return
            values = self.spec.space.values(chosen)
            try:
                folder = submit(
                    job_of(self.job, values),
                    self._source(),
                    self._runs_dir.parent,
                    self.record.experiment,
                    parent_run_id=self.folder.run_id,
                    run_id=child_id(self.folder.run_id, number),
                    trial={"number": number, "chosen": dict(chosen), "values": values},
                    values=self._secrets,
                )
            except EngineError as error:
                # The engine may answer again: nothing is wrong with the sweep. What was begun of the trial has no process yet.
                begun = RunFolder(self._runs_dir / child_id(self.folder.run_id, number))
                if begun.record.exists():
                    removal.remove(begun)
                say(f"trial {number} could not be handed over, and will be tried again: {error}")
                self._not_before = time.monotonic() + _RETRY_S
                return
            self._trials.append(Trial(number=number, run_id=folder.run_id, chosen=chosen, values=values))
            self._live[number] = _Watch(folder, self.spec.metric)
            said = ", ".join(f"{name.lstrip('-')}={value}" for name, value in values.items())
            say(f"trial {number} begins: {said}")

    def _proposed(self, number: int) -> dict[str, int | float] | None:
        # The user's own points come first, as raw values, so that samplers learn from them like from any other.
        if number < len(self.spec.points):
            return self.spec.space.chosen(self.spec.points[number])
        proposed = self._sampler.propose(number, self._trials)
        return None if proposed is None else dict(proposed)

    def _source(self) -> SourceCopy:
        return SourceCopy(
            directory=Path(self.record.source_directory or "."),
            snapshot_id=self.record.snapshot_id,
            git=self.record.git,
        )

    # --- the end

    def _is_done(self) -> bool:
        return self._is_exhausted or len(self._trials) >= self.spec.trials

    def _end_wanted(self) -> str | None:
        """Why the sweep is to end before its time."""
        if self.folder.cancel_request.exists():
            return "the sweep is canceled"
        limit, started = self.spec.max_duration_seconds, self.record.started_utc
        if limit is not None and started and time.time() > parse_utc(started).timestamp() + limit:
            return f"the sweep has come to its limit of {limit:g} s"
        return self._failure()

    def _failure(self) -> str | None:
        failed = [trial for trial in self._trials if trial.status == states.FAILED]
        if self.spec.max_failures is not None and len(failed) >= self.spec.max_failures:
            return f"{len(failed)} trials have failed, and max_failures is {self.spec.max_failures}. {self._common(failed)}"
        completed = [trial for trial in self._trials if trial.status == states.COMPLETED]
        # The 3 is lowered for a sweep of one or two trials, which could never come to three.
        if len(completed) >= min(_WITHOUT_METRIC, self.spec.trials) and not any(trial.curve for trial in self._trials):
            return f"{len(completed)} trials have ended, and none has logged the primary metric. {self._no_metric(completed[0])}"
        # While trials run one of them may still complete.
        if failed and self._is_done() and not self._live and len(failed) == len(self._trials):
            return f"all trials have failed. {self._common(failed)}"
        return None

    def _common(self, failed: list[Trial]) -> str:
        """ "7 of 8 failed with the same error: ..." """
        messages: collections.Counter[str] = collections.Counter()
        for trial in failed:
            # A trial's folder may have been removed by hand; the others still tell what they died of.
            with contextlib.suppress(PacelineError):
                report = store.stored(RunFolder(self._runs_dir / trial.run_id)).failure
                messages[(report.exception or report.message).strip() if report else "?"] += 1
        message, count = messages.most_common(1)[0] if messages else ("?", 0)
        same = f"{count} of {len(failed)} failed with the same error" if count > 1 else "The first error"
        return f"{same}: {message}"

    def _finish(self) -> None:
        # Readers must not take the sweep for ended before its table lies in the outputs.
        self.record = store.change(self.folder, self.record, states.FINALIZING)
        results.write_table(self.folder, self.spec, self._trials)
        failure = self._failure()
        # A cancel goes before a failure: it is why the sweep ended, however its trials did.
        if self.folder.cancel_request.exists():
            by = (read_json(self.folder.cancel_request) or {}).get("by", "unknown")
            self._close(states.CANCELED, exit_code=EXIT_CANCELED, canceled_by=str(by))
        elif failure:
            self._close(states.FAILED, exit_code=1, failure=FailureReport(cause="trials", message=failure))
        else:
            # Also a sweep that has come to its time limit: it has done what it could in the time that it was given.
            self._close(states.COMPLETED, exit_code=0)

    def _close(self, status: str, **changes: object) -> None:
        self.record = store.change(self.folder, self.record, status, ended_utc=utc_now(), **changes)
        say(f"the sweep is {status}")


class _Watch:
    """A trial that runs: its record and its curve, read where they have changed."""

    def __init__(self, folder: RunFolder, metric: str) -> None:
        self._folder = folder
        self._curve = CurveReader(folder.metrics, metric)
        self._stamp: tuple[int, int] | None = None
        # So long ago that the first look reads the record at any rate.
        self._read_at = -_RECORD_S

    def look(self, trial: Trial) -> Trial:
        """The trial as it is now; the same object where nothing has changed."""
        status = self._status() or trial.status
        # After the record: what was logged before a run's end is in the curve that is seen with it.
        curve = self._curve.look()
        if (status, len(curve)) == (trial.status, len(trial.curve)):
            return trial
        return dataclasses.replace(trial, status=status, curve=curve)

    def _status(self) -> str | None:
        try:
            found = self._folder.record.stat()
        except OSError:
            return None
        # The inode as well: a record is replaced by a rename, and two writes may fall into one tick of the file system's clock.
        stamp, now = (found.st_mtime_ns, found.st_ino), time.monotonic()
        if stamp == self._stamp and now - self._read_at < _RECORD_S:
            return None
        self._stamp, self._read_at = stamp, now
        with contextlib.suppress(PacelineError, OSError):
            return read.record(self._folder).status
        return None


def _never_began(record: RunRecord) -> bool:
    """Whether a child was made, and its submission ended there: no process of it has ever run."""
    report = record.failure
    return (
        not record.attempts
        and report is not None
        and report.cause == "not_started"
        and CAUSES["not_started"] in (report.message[0].lower() + report.message[1:])
    )
