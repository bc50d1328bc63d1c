"""Slurm's words for why a job waits, and for how it ended, in ours."""

from __future__ import annotations

import re

from paceline.runs.remote_status import GONE, QUEUED, RUNNING, JobStatus
from paceline.targets.slurm.states import JobState

#: Why a job waits, where Slurm's word alone says too little.
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

#: Why a job can't ever start as it is, with the way out.
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

#: Held: it starts once somebody lets it.
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

#: Slurm's names for limits, more than a hundred: whose it is, of which kind, on what, and for whom.
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
#: How a job ended -> the cause for its run, and that in words; "" where the script's own end says more.
_ENDED = {
    "CANCELLED": ("canceled", "{what} was canceled{by}."),
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
#: Slurm's exit of a batch script whose output file could not be opened, and the like: a signal that none has.
_LAUNCH_SIGNAL = 53


def look_of(job: JobState, *, python: str = "", run_dir: str = "") -> JobStatus:
    """The status of a run, by the state of its job."""
    if job.state in _QUEUED:
        return JobStatus(state=QUEUED, message=waits_for(job))
    if job.state not in _ENDED:  # RUNNING, COMPLETING, CONFIGURING, SUSPENDED, ...
        return JobStatus(state=RUNNING, message=job.state.lower() if job.state != "RUNNING" else "")
    return JobStatus(state=GONE, cause=_ENDED[job.state][0], by=job.by, message=_how_ended(job, python, run_dir))


def has_ended(job: JobState) -> bool:
    """True if the job is over, as far as this state says."""
    return job.state in _ENDED


def waits_for(job: JobState) -> str:
    """The reason why a job waits: Slurm's word first, for whoever knows it."""
    reason = job.reason or "None"
    # squeue has spaces where scontrol has underscores; after a comma come names of nodes.
    plain = reason.strip("()").replace("_", " ").split(",")[0]
    shown = "" if plain == "None" else f" ({reason})"
    if plain in _NEVER:
        return f"Slurm job {job.job_id}: it can't start as it is: {_NEVER[plain]}{shown}"
    text = _HELD.get(plain) or _WAITS.get(plain) or _limit(plain)
    if text is not None:
        return f"Slurm job {job.job_id}: {text.format(job_id=job.job_id)}{shown}"
    return f"Slurm job {job.job_id} waits ({reason})"


def _limit(reason: str) -> str | None:
    """The reason of a job that a limit holds back; None where the reason is no limit's."""
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
        # All that Slurm 20.11 says of an output file that it could not open; and the script's own word of a missing folder.
        return (
            f"{what} ended (exit code 1){where} without a word of the run's supervisor. If the run's driver.log is empty, "
            f"the node can't open files in {run_dir!r}: the workspace has to lie where all nodes see it at the same path."
        )
    how = f", exit code {job.exit_code}" if job.exit_code else f", signal {job.signal}" if job.signal else ""
    return f"{what} ended ({job.state}{how}){where} without a word of the run's supervisor."
