"""One question for all runs of a user, whoever asks: squeue once in 5 s, sacct for what it lists no more.

    <workspace>/engines/slurm-<which>.json     the last answer, for every process that reads runs of this workspace
    <workspace>/engines/slurm-<which>.lock     held by the one that asks; the others wait and take its answer

squeue lists jobs that have ended for some minutes yet (MinJobAge); after that only accounting knows them, where there is
any. How a job ended is kept here, so it is asked for once.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.targets import poll_cache
from paceline.targets.slurm.reasons import has_ended
from paceline.targets.slurm.scheduler import AwayError, Scheduler
from paceline.targets.slurm.states import SACCT_FORMAT, SQUEUE_FORMAT, JobState, parse_job, parse_sacct, parse_squeue

#: How many ends are kept; they are small, and only runs whose supervisor could not write its end need them.
_KEPT = 2000
_EMPTY: Mapping[str, Any] = {
    "time": 0.0,
    "told": 0.0,
    "error": None,
    "accounting": True,
    "unaccounted": "",
    "jobs": {},
    "ended": {},
    "known": [],
}
_NO_ACCOUNTING = "accounting storage is disabled"


class Query:
    """The engine's answers about one user's jobs. user: a uid or a name, as squeue takes it."""

    def __init__(
        self, folder: Path, scheduler: Scheduler, user: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        which = hashlib.sha256(f"{scheduler.where} {user}".encode()).hexdigest()[:12]
        self._path = folder / f"slurm-{which}.json"
        self._scheduler, self._user, self._clock = scheduler, user, clock
        #: When the engine gave the answer that was last used, in seconds since the epoch.
        self.answered_at = 0.0

    def job(self, job_id: str, since: float) -> JobState | None:
        """The state of a job, no older than `FRESH_S`; None where the engine knows nothing of it.

        since: when it was submitted (seconds since the epoch). An answer from before that says nothing of it, and is no
            reason to ask again: whoever submits hundreds would have the engine asked for each. Until the answer has
            aged such a job is pending.

        Raises:
            AwayError: the engine does not answer.
        """
        data = self._data(job_id)
        # Tasks of an array that were canceled while they waited are listed as one, by the number of the array.
        for key in (job_id, job_id.partition("_")[0]):
            found = data["jobs"].get(key) or data["ended"].get(key)
            if found is not None:
                return JobState.from_json({**found, "job_id": job_id})
        if data["time"] <= since:
            return JobState(job_id=job_id, state="PENDING")
        if data["unaccounted"]:
            # squeue lists it no more, and who knows how it ended does not answer: no reason to call it lost.
            raise AwayError(data["unaccounted"])
        return None

    def job_named(self, name: str, task: int | None = None) -> JobState | None:
        """The state of the newest job of this name; None where the last answer has none. task: of an array that is so named.

        Raises:
            AwayError: the engine does not answer.
        """
        data = self._data()
        found = [
            job
            for job in data["jobs"].values()
            if job["name"] == name and (task is None or job["job_id"].endswith(f"_{task}"))
        ]
        return JobState.from_json(found[-1]) if found else None

    def remember(self, *job_ids: str) -> None:
        """Let later questions ask for these jobs too, so that one question serves all whose end nobody has seen."""
        with poll_cache.locked(self._path):
            data = self._read()
            data["known"] = [*data["known"], *job_ids][-_KEPT:]
            poll_cache.keep(self._path, data)

    def forget_answer(self) -> None:
        """Let the next look ask anew: something was done to a job."""
        with poll_cache.locked(self._path):
            poll_cache.keep(self._path, {**self._read(), "told": 0.0})

    def _data(self, job_id: str | None = None) -> dict[str, Any]:
        data = {**_EMPTY, **poll_cache.answer(self._path, lambda: self._ask(self._read(), job_id), self._clock)}
        if data["error"]:
            raise AwayError(data["error"])
        self.answered_at = float(data["time"])
        return data

    # --- asking

    def _ask(self, data: dict[str, Any], job_id: str | None) -> dict[str, Any]:
        now = self._clock()
        try:
            listed = self._squeue()
            jobs = {job.job_id: job for job in listed}
            # Ends that were seen before: squeue forgets a job some minutes after its end, this file does not.
            ended = {key: JobState.from_json(value) for key, value in data["ended"].items()}
            ends = {key: job for key, job in jobs.items() if has_ended(job)}
            # Those of ours alone: a user may have thousands of others.
            ours = {*data["known"], *([job_id] if job_id else [])}
            settled = ended.keys() - data["known"]
            wanted = [key for key in sorted(ours) if key not in settled and (key not in jobs or key in ends)]
            told, accounting, unaccounted = self._sacct(wanted, data["accounting"])
            for key in wanted:
                best = self._best(ends.get(key), told.get(key))
                if best is not None:
                    ended[key] = best
            # A job that is listed as living has been requeued since.
            ended = {key: job for key, job in ended.items() if key not in jobs or key in ends}
            unsigned = _unsigned(ended, ends) if accounting and not unaccounted else set()
        except AwayError as error:
            return {**data, "time": now, "told": self._clock(), "error": str(error)}
        return {
            # An answer says how things were when it was asked for, and is as fresh as its end: some take longer than `FRESH_S`.
            "time": now,
            "told": self._clock(),
            "error": None,
            "accounting": accounting,
            "unaccounted": unaccounted,
            "jobs": {key: job.to_json() for key, job in jobs.items() if key not in ended},
            "ended": {key: job.to_json() for key, job in list(ended.items())[-_KEPT:]},
            "known": [key for key in dict.fromkeys(data["known"]) if key not in ended or key in unsigned],
        }

    def _squeue(self) -> list[JobState]:
        done = self._scheduler.call(["squeue", "-h", "-r", "-u", self._user, "-t", "all", "-o", SQUEUE_FORMAT])
        if done.returncode != 0:
            raise AwayError(f"squeue can't say how jobs stand: {done.said}.")
        return parse_squeue(done.stdout)

    def _sacct(self, job_ids: list[str], accounting: bool) -> tuple[dict[str, JobState], bool, str]:
        """Ask accounting for these jobs.

        Returns what it knows, whether there is accounting, and why it does not answer just now, or "".
        """
        if not job_ids or not accounting:
            return {}, accounting, ""
        try:
            done = self._scheduler.call(["sacct", "-X", "-j", ",".join(job_ids), "-n", "-P", "-o", SACCT_FORMAT])
        except AwayError as error:
            # slurmdbd is away, the controller is not: of what squeue lists its word will do.
            return {}, True, str(error)
        if done.returncode != 0:
            return {}, _NO_ACCOUNTING not in done.stderr, ""
        jobs = parse_sacct(done.stdout)
        names = {uid: self._user_name(uid) for uid in sorted({job.by for job in jobs if job.by})}
        return {job.job_id: replace(job, by=names.get(job.by or "")) for job in jobs}, True, ""

    def _user_name(self, uid: str) -> str:
        """The name of the user who has this number where the engine is: behind a login host it may be another's here."""
        done = self._scheduler.call(["id", "-nu", uid])
        return done.stdout.strip() if done.returncode == 0 else f"user {uid}"

    def _best(self, listed: JobState | None, told: JobState | None) -> JobState | None:
        """The end of a job, by squeue's word and accounting's; accounting may be some seconds behind."""
        if told is not None and has_ended(told) and (listed is None or listed.state == told.state):
            return told
        if listed is not None and listed.state == "FAILED":
            with contextlib.suppress(AwayError):
                shown = parse_job(self._scheduler.call(["scontrol", "show", "job", "-o", listed.job_id]).stdout)
                if shown is not None:
                    return replace(listed, exit_code=shown.exit_code, signal=shown.signal, nodes=shown.nodes)
        return listed

    def _read(self) -> dict[str, Any]:
        return {**_EMPTY, **poll_cache.kept(self._path)}


def _unsigned(ended: Mapping[str, JobState], listed: Mapping[str, JobState]) -> set[str]:
    """Canceled jobs, listed yet, of which accounting has not said by whom: it hears of an end a moment after squeue shows it."""
    return {key for key, job in ended.items() if key in listed and job.state == "CANCELLED" and job.by is None}
