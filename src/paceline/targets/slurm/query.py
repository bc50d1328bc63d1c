"""Query Slurm once for all runs of a user.

    <workspace>/engines/slurm-<which>.json     the last answer, for all processes that read runs of this workspace
    <workspace>/engines/slurm-<which>.lock     held during a query; other processes wait and use its answer

squeue lists ended jobs for some minutes (MinJobAge); later only accounting lists them, if the cluster has it. This
module caches the ends of jobs, so it queries each once.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.runs.remote_status import GONE, QUEUED, RUNNING, JobStatus
from paceline.targets import polling
from paceline.targets.slurm.scheduler import AwayError, Scheduler
from paceline.targets.slurm.script import job_name
from paceline.targets.slurm.states import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    JobState,
    gpu_count,
    parse_job,
    parse_sacct,
    parse_squeue,
)
from paceline.targets.status import JobUse

#: Maximum number of ended jobs in the cache. Paceline needs a job's end if the supervisor wrote no final record.
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

#: Slurm's reason why a job is pending -> an explanation. The table omits reasons that need no explanation.
_WAITS = {
    "Priority": "jobs with a higher priority are ahead",
    "Resources": "next in line, waiting for free nodes",
    "Dependency": "waiting for a job that it depends on",
    "BeginTime": "not before its earliest start; after a requeue Slurm waits two minutes",
    "Cleaning": "its last start is being cleaned up",
    "Licenses": "waiting for a license",
    "Reservation": "waiting for its reservation to begin",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs to start",
    "NodeDown": "a node that it needs is down",
    "FrontEndDown": "no front end is up",
    "Nodes required for job are DOWN": "nodes that it needs are down, drained or reserved",
    "JobArrayTaskLimit": "as many jobs of its array run as may",
    "None": "not looked at by the scheduler yet",
    "": "not looked at by the scheduler yet",
}

#: Slurm's reason why a job can never start -> an explanation, with the remedy.
_NEVER = {
    "BadConstraints": "no node has what it asks for; see the settings constraint, gres and memory",
    "InvalidAccount": "the account is not valid for you; see the setting account",
    "InvalidQOS": "the quality of service is not valid for you; see the setting qos",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows to one job, or has; see node_count and partition",
    "PartitionTimeLimit": "it asks for more time than the partition allows; see the setting time",
    "QOSNotAllowed": "the partition does not take this quality of service; see the settings qos and partition",
    "AccountNotAllowed": "the partition does not take this account; see the settings account and partition",
    "ReservationDeleted": "its reservation was deleted; see the setting reservation",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "MaxMemPerLimit": "it asks for more memory than the partition allows; see the setting memory",
}

#: Slurm's reason why a job is held -> an explanation. A held job starts when it is released.
_HELD = {
    "JobHeldUser": "held; `scontrol release {job_id}` lets it go",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held: it was requeued too often; `scontrol release {job_id}` lets it try again",
    "launch failed requeued held": (
        "held: its nodes could not start it; `scontrol show job {job_id}` names them, "
        "`scontrol release {job_id}` lets it try again"
    ),
    "launch failure limit exceeded requeued held": (
        "held: its nodes could not start it time and again; `scontrol show job {job_id}` names them"
    ),
    "user env retrieval failed requeued held": (
        "held: its node could not read your environment; `scontrol release {job_id}` lets it try again"
    ),
    "job requeued in held state": "held: it was requeued so; `scontrol release {job_id}` lets it go",
}

#: Pattern of the name of a Slurm limit, such as QOSMaxCpuPerUserLimit. Slurm has over a hundred limits.
_LIMIT = re.compile(
    r"(?P<whose>QOS|Assoc|)(?P<kind>Max|Grp|Min)"
    r"(?P<of>Cpu|CPU|Node|GRES|Memory|Mem|SubmitJobs?|Jobs|WallDuration|Wall|License|BB|Billing|Energy)"
    r"(?P<minutes>RunMinutes|RunMins|Minutes|)(?P<whom>PerJob|PerNode|PerUser|PerAccount|)(?:Limit|NotSatisfied|)"
)
_OF = {
    **{"Cpu": "cores", "CPU": "cores", "Node": "nodes", "GRES": "GPUs", "Mem": "memory", "Memory": "memory"},
    **{"Jobs": "jobs", "SubmitJob": "jobs in the queue", "SubmitJobs": "jobs in the queue", "BB": "burst buffer"},
    **{"Wall": "time", "WallDuration": "time", "License": "licenses", "Billing": "billing units", "Energy": "energy"},
}
_SETTING = {"nodes": "node_count", "time": "the setting time", "memory": "the setting memory"}

_QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
#: Slurm's state of an ended job -> (cause of the run's end, explanation). The text "" stands for the exit code as explanation.
_ENDED = {
    "CANCELLED": ("cancel", "{what} was canceled{by}."),
    "TIMEOUT": (
        "time_limit",
        "{what} reached its time limit. Give the target more (the setting time), or write checkpoints.",
    ),
    "DEADLINE": ("time_limit", "{what} reached its deadline."),
    "NODE_FAIL": ("node_lost", "A node of {what} was lost{nodes}."),
    "BOOT_FAIL": ("node_lost", "A node of {what} did not start{nodes}."),
    "PREEMPTED": (
        "preempted",
        "{what} was preempted{where}. With max_restarts it is requeued and goes on from its checkpoint.",
    ),
    "OUT_OF_MEMORY": (
        "memory",
        "{what} used more memory than it had asked for{where}. Give the target more (the setting memory).",
    ),
    **dict.fromkeys(("COMPLETED", "FAILED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"), ("engine", "")),
}
#: The signal number that Slurm reports for a batch script that could not start. No such signal exists.
_LAUNCH_SIGNAL = 53


class Query:
    """Cached queries of Slurm about one user's jobs.

    user: The user's uid or name, as for `squeue -u`.
    """

    def __init__(
        self, folder: Path, scheduler: Scheduler, user: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        which = hashlib.sha256(f"{scheduler.where} {user}".encode()).hexdigest()[:12]
        self._path = folder / f"slurm-{which}.json"
        self._scheduler, self._user, self._clock = scheduler, user, clock
        #: The time of the query whose answer was used last, in seconds since the epoch.
        self.answered_at = 0.0

    def job(self, job_id: str, since: float) -> JobState | None:
        """Return a Slurm job's state, at most `FRESH_S` seconds old, or None if unknown.

        since: Time of the job's submission in seconds since the epoch. If the cached answer is older, the job counts as
        pending, so that hundreds of submissions don't cause hundreds of queries.

        Raises:
            AwayError: Slurm does not answer.
        """
        data = self._data(job_id)
        # Look for the array's number, too, under which Slurm lists tasks that were canceled while pending.
        for key in (job_id, job_id.partition("_")[0]):
            found = data["jobs"].get(key) or data["ended"].get(key)
            if found is not None:
                return JobState.from_json({**found, "job_id": job_id})
        if data["time"] <= since:
            return JobState(job_id=job_id, state="PENDING")
        if data["unaccounted"]:
            # squeue no longer lists the job, and accounting does not answer. So the job's state is unknown.
            raise AwayError(data["unaccounted"])
        return None

    def job_named(self, name: str, task: int | None = None) -> JobState | None:
        """Return the state of the newest Slurm job of this name, or None.

        task: The number of a task, if `name` is a job array's name.

        Raises:
            AwayError: Slurm does not answer.
        """
        data = self._data()
        found = [
            job
            for job in data["jobs"].values()
            if job["name"] == name and (task is None or job["job_id"].endswith(f"_{task}"))
        ]
        return JobState.from_json(found[-1]) if found else None

    def remember(self, *job_ids: str) -> None:
        """Include Slurm jobs with these ids in all later queries of Slurm."""
        with polling.locked(self._path):
            data = self._read()
            data["known"] = [*data["known"], *job_ids][-_KEPT:]
            polling.keep(self._path, data)

    def forget_answer(self) -> None:
        """Discard the cached answer, since a job was changed."""
        with polling.locked(self._path):
            polling.keep(self._path, {**self._read(), "told": 0.0})

    def _data(self, job_id: str | None = None) -> dict[str, Any]:
        data = {**_EMPTY, **polling.answer(self._path, lambda: self._ask(self._read(), job_id), self._clock)}
        if data["error"]:
            raise AwayError(data["error"])
        self.answered_at = float(data["time"])
        return data

    # --- calls of squeue and sacct

    def _ask(self, data: dict[str, Any], job_id: str | None) -> dict[str, Any]:
        now = self._clock()
        try:
            listed = self._squeue()
            jobs = {job.job_id: job for job in listed}
            # Start with the cached ends of jobs, because squeue forgets a job some minutes after the job's end.
            ended = {key: JobState.from_json(value) for key, value in data["ended"].items()}
            ends = {key: job for key, job in jobs.items() if has_ended(job)}
            # Query only Paceline's jobs, since a user may have thousands of other jobs.
            ours = {*data["known"], *([job_id] if job_id else [])}
            settled = ended.keys() - data["known"]
            wanted = [key for key in sorted(ours) if key not in settled and (key not in jobs or key in ends)]
            told, accounting, unaccounted = self._sacct(wanted, data["accounting"])
            for key in wanted:
                best = self._best(ends.get(key), told.get(key))
                if best is not None:
                    ended[key] = best
            # If squeue lists a job as alive, Slurm has requeued the job since its cached end. So drop the cached end.
            ended = {key: job for key, job in ended.items() if key not in jobs or key in ends}
            unsigned = _unsigned(ended, ends) if accounting and not unaccounted else set()
        except AwayError as error:
            return {**data, "time": now, "told": self._clock(), "error": str(error)}
        return {
            # "time" is when the query began. "told" is when it ended, which may be more than `FRESH_S` s later.
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
        """Query Slurm for ended jobs' states, if it has `accounting`.

        Return the states by job id, whether accounting exists, and why accounting does not answer, or "".
        """
        if not job_ids or not accounting:
            return {}, accounting, ""
        try:
            done = self._scheduler.call(["sacct", "-X", "-j", ",".join(job_ids), "-n", "-P", "-o", SACCT_FORMAT])
        except AwayError as error:
            # slurmdbd does not answer, but the controller does: use squeue's answer.
            return {}, True, str(error)
        if done.returncode != 0:
            return {}, _NO_ACCOUNTING not in done.stderr, ""
        jobs = parse_sacct(done.stdout)
        names = {uid: self._user_name(uid) for uid in sorted({job.by for job in jobs if job.by})}
        return {job.job_id: replace(job, by=names.get(job.by or "")) for job in jobs}, True, ""

    def _user_name(self, uid: str) -> str:
        done = self._scheduler.call(["id", "-nu", uid])
        return done.stdout.strip() if done.returncode == 0 else f"user {uid}"

    def _best(self, listed: JobState | None, told: JobState | None) -> JobState | None:
        """Return the better report on a job: squeue's `listed` or accounting's `told`."""
        if told is not None and has_ended(told) and (listed is None or listed.state == told.state):
            return told
        if listed is not None and listed.state == "FAILED":
            with contextlib.suppress(AwayError):
                shown = parse_job(self._scheduler.call(["scontrol", "show", "job", "-o", listed.job_id]).stdout)
                if shown is not None:
                    return replace(listed, exit_code=shown.exit_code, signal=shown.signal, nodes=shown.nodes)
        return listed

    def _read(self) -> dict[str, Any]:
        return {**_EMPTY, **polling.kept(self._path)}


def _unsigned(ended: Mapping[str, JobState], listed: Mapping[str, JobState]) -> set[str]:
    """Return ids of `listed` canceled jobs whose canceling user is unknown."""
    return {key for key, job in ended.items() if key in listed and job.state == "CANCELLED" and job.by is None}


def look_of(job: JobState, *, python: str = "", run_dir: str = "") -> JobStatus:
    """Return the run's status, given the state of its Slurm job."""
    if job.state in _QUEUED:
        return JobStatus(state=QUEUED, message=waits_for(job))
    if job.state not in _ENDED:  # the job's state is RUNNING, COMPLETING, CONFIGURING, SUSPENDED or similar
        return JobStatus(state=RUNNING, message=job.state.lower() if job.state != "RUNNING" else "")
    return JobStatus(state=GONE, cause=_ENDED[job.state][0], by=job.by, message=_how_ended(job, python, run_dir))


def has_ended(job: JobState) -> bool:
    """Return whether a job with this state has ended."""
    return job.state in _ENDED


def waits_for(job: JobState) -> str:
    """Return why a Slurm job waits, beginning with Slurm's own reason."""
    reason = job.reason or "None"
    # squeue prints spaces where scontrol prints underscores, and appends node names after a comma. Convert both to one form.
    plain = reason.strip("()").replace("_", " ").split(",")[0]
    shown = "" if plain == "None" else f" ({reason})"
    if plain in _NEVER:
        return f"Slurm job {job.job_id}: it can't start as it is: {_NEVER[plain]}{shown}"
    text = _HELD.get(plain) or _WAITS.get(plain) or _limit(plain)
    if text is not None:
        return f"Slurm job {job.job_id}: {text.format(job_id=job.job_id)}{shown}"
    return f"Slurm job {job.job_id} waits ({reason})"


def job_uses(lines: Iterable[str]) -> list[JobUse]:
    """Return each job's nodes, cores and GPUs from squeue's lines in `QUEUE_FORMAT`."""
    found = []
    for fields in (line.split("|", 8) for line in lines):
        if len(fields) == 9:
            job_id, state, user, cores, gres, nodes, node, reason, name = fields
            is_waiting = state in _QUEUED
            gpus = gpu_count(re.sub(r"gres[/:]", "", gres)) * _number(nodes)
            found.append(
                JobUse(
                    run_id=name.removeprefix(job_name("")),
                    user=user,
                    node="" if is_waiting else node,
                    cores=_number(cores),
                    gpus=str(gpus) if gpus else "",
                    is_waiting=is_waiting,
                    reason=waits_for(JobState(job_id=job_id, state=state, reason=reason)) if is_waiting else "",
                )
            )
    return found


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


def _limit(reason: str) -> str | None:
    found = _LIMIT.fullmatch(reason)
    if found is None:
        return None
    whose = "the account" if found["whose"] == "Assoc" else "the quality of service"
    of = _OF[found["of"]]
    see = f"; see {_SETTING[of]}" if of in _SETTING else ""
    if found["minutes"]:
        of = f"{of.removesuffix('s')} minutes"
    if found["kind"] == "Min":
        return f"it can't start as it is: {whose} wants a job to ask for more {of}{see}"
    if found["whom"] in ("PerJob", "PerNode"):
        one = found["whom"].removeprefix("Per").lower()
        return f"it can't start as it is: it asks for more {of} than {whose} allows to one {one}{see}"
    if found["kind"] == "Grp":
        return f"all jobs of {whose} together have reached its limit on {of}"
    who = "your account has" if found["whom"] == "PerAccount" else "you have"
    return f"{who} reached {whose}'s limit on {of}"


def _how_ended(job: JobState, python: str, run_dir: str) -> str:
    what = f"Slurm job {job.job_id}"
    where = f" on {job.nodes}" if job.nodes else ""
    if text := _ENDED[job.state][1]:
        by, nodes = f" by {job.by}" if job.by else "", f" ({job.nodes})" if job.nodes else ""
        return text.format(what=what, where=where, by=by, nodes=nodes)
    if job.signal == _LAUNCH_SIGNAL:
        return (
            f"{what} could not start its batch script{where}: the node can't open files in {run_dir!r}. The workspace has "
            "to lie where all nodes see it at the same path."
        )
    if job.exit_code in (126, 127) and python:
        return f"{what} could not run {python!r}{where}. Set python on the target to one that its nodes have."
    if job.exit_code == 1 and run_dir:
        # Exit code 1 means that the run's folder is missing, or in Slurm 20.11 that Slurm can't open the output file.
        return (
            f"{what} ended (exit code 1){where} without a word of the run's supervisor. If the run's driver.log is empty, "
            f"the node can't open files in {run_dir!r}: the workspace has to lie where all nodes see it at the same path."
        )
    how = f", exit code {job.exit_code}" if job.exit_code else f", signal {job.signal}" if job.signal else ""
    return f"{what} ended ({job.state}{how}){where} without a word of the run's supervisor."
