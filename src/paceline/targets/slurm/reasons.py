"""Slurm's words for why a job waits, and for how it ended, in ours."""

from __future__ import annotations

import pwd

from paceline.runs.elsewhere import GONE, QUEUED, RUNNING, Look
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
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "nodes that it needs are down, drained or reserved"
    ),
    "QOSMaxJobsPerUserLimit": "you run as many jobs as your quality of service allows",
    "QOSMaxCpuPerUserLimit": "you use as many cores as your quality of service allows",
    "QOSMaxNodePerUserLimit": "you use as many nodes as your quality of service allows",
    "QOSMaxGRESPerUser": "you use as many GPUs as your quality of service allows",
    "QOSGrpCpuLimit": "all jobs of the quality of service together use as many cores as it allows",
    "QOSGrpNodeLimit": "all jobs of the quality of service together use as many nodes as it allows",
    "AssocGrpCpuLimit": "the account's jobs together use as many cores as it may",
    "AssocGrpGRES": "the account's jobs together use as many GPUs as it may",
    "AssocMaxJobsLimit": "you run as many jobs as the account allows",
    "MaxJobsPerAccount": "the account runs as many jobs as it may",
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
    "QOSMaxNodePerJobLimit": "it asks for more nodes than the quality of service allows to one job; see node_count",
    "QOSMaxCpuPerJobLimit": "it asks for more cores than the quality of service allows to one job",
    "QOSMaxWallDurationPerJobLimit": "it asks for more time than the quality of service allows; see the setting time",
    "QOSMaxGRESPerJob": "it asks for more GPUs than the quality of service allows to one job",
    "AssocMaxNodePerJobLimit": "it asks for more nodes than the account allows to one job; see node_count",
    "AssocMaxCpuPerJobLimit": "it asks for more cores than the account allows to one job",
    "AssocMaxWallDurationPerJobLimit": "it asks for more time than the account allows; see the setting time",
    "AssocMaxGRESPerJob": "it asks for more GPUs than the account allows to one job",
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
    "job requeued in held state": "held: it was requeued so; `scontrol release {job_id}` lets it go",
}

_QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_ENDED = {
    "CANCELLED": "canceled",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "NODE_FAIL": "node_lost",
    "BOOT_FAIL": "node_lost",
    "PREEMPTED": "preempted",
    "OUT_OF_MEMORY": "memory",
    "COMPLETED": "engine",
    "FAILED": "engine",
    "REVOKED": "engine",
    "LAUNCH_FAILED": "engine",
    "RECONFIG_FAIL": "engine",
}
#: Slurm's exit of a batch script whose output file could not be opened, and the like: a signal that none has.
_LAUNCH_SIGNAL = 53


def look_of(job: JobState, *, python: str = "", run_dir: str = "") -> Look:
    """What the state of a run's job says of the run."""
    if job.state in _QUEUED:
        return Look(state=QUEUED, message=waits_for(job))
    if job.state not in _ENDED:  # RUNNING, COMPLETING, CONFIGURING, SUSPENDED, ...
        return Look(state=RUNNING, message=job.state.lower() if job.state != "RUNNING" else "")
    cause = _ENDED[job.state]
    by = _user(job.by) if job.by else None
    return Look(state=GONE, cause=cause, by=by, message=_how_ended(job, by, python, run_dir))


def has_ended(job: JobState) -> bool:
    """Whether the job is over, as far as this state says."""
    return job.state in _ENDED


def waits_for(job: JobState) -> str:
    """What a job waits for: Slurm's word first, for whoever knows it."""
    reason = job.reason or "None"
    plain = reason.strip("()").split(",")[0]
    for table in (_NEVER, _HELD, _WAITS):
        if (text := table.get(reason) or table.get(plain)) is not None:
            never = "it can't start as it is: " if table is _NEVER else ""
            shown = "" if plain == "None" else f" ({reason})"
            return f"Slurm job {job.job_id}: {never}{text.format(job_id=job.job_id)}{shown}"
    return f"Slurm job {job.job_id} waits ({reason})"


def can_never_start(job: JobState) -> bool:
    """Whether the job waits for what will not come by itself."""
    return job.reason.strip("()").split(",")[0] in _NEVER


def _how_ended(job: JobState, by: str | None, python: str, run_dir: str) -> str:
    what = f"Slurm job {job.job_id}"
    where = f" on {job.nodes}" if job.nodes else ""
    if job.state == "CANCELLED":
        return f"{what} was canceled{f' by {by}' if by else ''}."
    if job.state == "TIMEOUT":
        return f"{what} reached its time limit. Give the target more (the setting time), or write checkpoints."
    if job.state == "DEADLINE":
        return f"{what} reached its deadline."
    if job.state in ("NODE_FAIL", "BOOT_FAIL"):
        verb = "was lost" if job.state == "NODE_FAIL" else "did not start"
        return f"A node of {what} {verb}{f' ({job.nodes})' if job.nodes else ''}."
    if job.state == "PREEMPTED":
        return f"{what} was preempted{where}. With max_restarts it is requeued and goes on from its checkpoint."
    if job.state == "OUT_OF_MEMORY":
        return f"{what} used more memory than it had asked for{where}. Give the target more (the setting memory)."
    if job.signal == _LAUNCH_SIGNAL:
        return (
            f"{what} could not start its batch script{where}: the node can't open files in {run_dir!r}. The workspace has "
            "to lie where all nodes see it at the same path."
        )
    if job.exit_code in (126, 127) and python:
        return f"{what} could not run {python!r}{where}. Set python on the target to one that its nodes have."
    how = f", exit code {job.exit_code}" if job.exit_code else f", signal {job.signal}" if job.signal else ""
    return f"{what} ended ({job.state}{how}){where} without a word of the run's supervisor."


def _user(by: str) -> str:
    if not by.isdigit():
        return by
    try:
        return pwd.getpwuid(int(by)).pw_name
    except KeyError:
        return f"user {by}"
