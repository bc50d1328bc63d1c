"""Define all file names in a run's folder, and ensure that no name leads out of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import FileNameError
from paceline.system.files import PathAttribute, is_mine

# `rank_0.jsonl` belongs to attempt 1, `rank_0.2.jsonl` to attempt 2.
_RANK_LOG = re.compile(r"rank_(\d+)\.log", re.ASCII)
_METRIC_LOG = re.compile(r"rank_(\d+)(?:\.(\d+))?\.jsonl", re.ASCII)
_NODE_LOG = re.compile(r"node_(\d+)\.jsonl", re.ASCII)
_LOAD_LOG = re.compile(r"load_(\d+)\.jsonl", re.ASCII)


def node_logs(directory: Path) -> dict[int, Path]:
    """Return the nodes' load logs (CPU, memory, GPU) in `directory` by node rank."""
    found = ((_NODE_LOG.fullmatch(path.name), path) for path in directory.glob("node_*.jsonl"))
    return {int(name[1]): path for name, path in found if name}


def load_logs(directory: Path) -> dict[int, Path]:
    """Return the workers' load logs (CPU, memory, GPU) in `directory` by rank."""
    found = ((_LOAD_LOG.fullmatch(path.name), path) for path in directory.glob("load_*.jsonl"))
    return {int(name[1]): path for name, path in found if name}


def check_file_name(name: object) -> str:
    """Return `name` in its plain form, such as `outputs/model.pt`.

    Raises:
        FileNameError: The name is empty, absolute, or has a NUL or a `..` part.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise FileNameError(f"file name {name!r}: a name is a non-empty text without NUL, such as 'outputs/model.pt'.")
    parts = [part for part in name.replace(os.sep, "/").split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts:
        raise FileNameError(
            f"file name {name!r} leaves the run's folder. Give a relative name without '..', such as 'outputs/model.pt'."
        )
    return "/".join(parts)


def _temporary_folder() -> str:
    import tempfile  # imported here, because it loads slower than this module

    return tempfile.gettempdir()


def metric_logs(directory: Path) -> dict[int, dict[int, Path]]:
    """Return the paths of metric logs as {rank: {attempt: path}}, both sorted."""
    found: dict[int, dict[int, Path]] = {}
    for path in directory.glob("rank_*.jsonl"):
        if name := _METRIC_LOG.fullmatch(path.name):
            found.setdefault(int(name[1]), {})[int(name[2] or 1)] = path
    return {rank: dict(sorted(found[rank].items())) for rank in sorted(found)}


@dataclass(frozen=True)
class RunFolder:
    """The paths of all files of the run whose folder is `path`."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    #: The job and everything else that never changes: written once, before the folder gets its final name.
    job = PathAttribute("job.json")
    #: The rest of the record. Replaced atomically by its only writer, the process that holds `lock`.
    state = PathAttribute("state.json")
    #: Locked (flock) by the run's owner; a free lock means that the run is abandoned.
    lock = PathAttribute("lock")
    #: Changes of the run's state, one JSON line each.
    events = PathAttribute("events.jsonl")
    #: Secrets by variable, mode 0600: only the supervisor reads them; removed at the end of the run.
    secrets = PathAttribute("secrets.json")
    #: Tags, properties and names: one JSON line per change, appended by any process.
    notes = PathAttribute("notes.jsonl")
    #: When and by whom the run was deleted: only in the trash (`paceline.runs.trash`).
    deleted = PathAttribute("deleted.json")
    #: For a run of another tracker: what its last import read (`paceline.trackers.imports`).
    origin = PathAttribute("import.json")
    #: The progress of each relay of the metrics, one file for each server (`paceline.trackers.relay`).
    relays = PathAttribute("relays")
    #: The arguments of a function's run that are too long for its command line (`paceline.functions.calls`).
    call = PathAttribute("call")
    #: The key or token that opens a session, for its owner alone (`paceline.cli.sessions`). It stays on this machine.
    session = PathAttribute("session")
    #: Exists after a request to end the run; holds the user and the reason.
    cancel_request = PathAttribute("cancel.json")
    #: One folder per running `paceline exec` command, readable only for its owner.
    exec_requests = PathAttribute("exec")
    #: Key that signs messages to exec commands sent through a datastore; mode 0600, on the submitting machine only.
    exec_key = PathAttribute("exec_key")

    def exec_output(self, attempt: int, name: str) -> Path:
        """Return the file with an exec command's output, kept while a client reads it."""
        return self.attempt(attempt) / f"exec_{name}.jsonl"

    #: The receivers that were notified of the run's end: one JSON line each, for the process that closes a killed run.
    told = PathAttribute("told.jsonl")
    #: Exists while a process closes an abandoned run: the lock is held, but the run is over.
    closing = PathAttribute("closing")

    def passing(self) -> list[Path]:
        """Return the temporary files that a killed supervisor left in the run's folder."""
        return [path for pattern in (".incoming", ".seen-*") for path in self.path.glob(pattern)]

    #: Failure of a rank that a launcher started beside the program that logs the run.
    rank_failure = PathAttribute("rank_failure.json")
    #: The engine (such as Slurm) and the number of its job, if the run's supervisor is inside this job.
    engine = PathAttribute("engine.json")
    #: A mark whose time is when the engine first did not know the job, although the record was not final.
    gone = PathAttribute("gone")
    #: Kind and settings of the compute target, as they were at the submission.
    target = PathAttribute("target.json")
    #: A file of reserved bytes, deleted on a full disk to make space for the last record.
    ballast = PathAttribute("ballast")

    @property
    def scratch(self) -> Path:
        """A short path of a folder outside the run, for sockets and shared memory."""
        # Don't use the run's folder: a Unix socket's path has at most 107 bytes, and the folder's path is often longer.
        top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else _temporary_folder()
        return Path(top) / f"paceline-{self.run_id[-8:]}"

    #: Link to the workspace's snapshot.
    snapshot = PathAttribute("snapshot")
    #: Files of the source that are links in the working directory, and not in the snapshot (`paceline.system.linked`).
    linked = PathAttribute("linked.json")
    #: Linked files whose copies were sent to this machine: name in the working directory -> path of the original here.
    sent = PathAttribute("sent.json")
    #: Links that keep the snapshots of a pipeline's steps until the steps' runs use them.
    sources = PathAttribute("sources")
    #: The workers' working directory; after the run, only files that the script left.
    work = PathAttribute("work")
    outputs = PathAttribute("outputs")
    #: Uploaded files with names outside `outputs/` and `logs/`.
    artifacts = PathAttribute("artifacts")
    #: One folder per output that is stored at the end; it stays if storing fails.
    uploads = PathAttribute("uploads")
    #: Files that remote nodes did not send, and why: one JSON line per name.
    left_out = PathAttribute("left_out.jsonl")
    #: The exact package versions of an environment that was built.
    environment = PathAttribute("environment.json")
    #: Datasets that the run read, with fingerprints, and outputs that it stored.
    data = PathAttribute("data.json")
    #: Local paths of files that the job names by their paths on the submitting machine; absent if both paths are equal.
    carried = PathAttribute("carried.json")
    #: Output folders that the submitting machine will store, with their files. Written on other machines.
    left = PathAttribute("prepared/left.json")
    #: On the submitting machine: output folders that this machine has to store, and the progress; removed afterwards.
    home = PathAttribute("home.json")

    def prepare_log(self, node_rank: int) -> Path:
        """Return a node's log file of environment setup, downloads and uploads."""
        return self.logs / f"prepare_{node_rank}.log"

    def prepared(self, node_rank: int) -> Path:
        """Return the file with a node's result of preparing environment and inputs."""
        return self.path / "prepared" / f"node_{node_rank}.json"

    def stored(self, node_rank: int) -> Path:
        """Return the file with a node's result of storing the run's outputs."""
        return self.path / "prepared" / f"stored_{node_rank}.json"

    def cleaned(self, node_rank: int) -> Path:
        """Return the file with a node's result of cleaning up after the run."""
        return self.path / "prepared" / f"cleaned_{node_rank}.json"

    checkpoints = PathAttribute("checkpoints")
    metrics = PathAttribute("metrics")

    def metric_log(self, rank: int, attempt: int = 1) -> Path:
        """Return the file with the metrics of a rank in one attempt."""
        return self.metrics / (f"rank_{rank}.jsonl" if attempt == 1 else f"rank_{rank}.{attempt}.jsonl")

    def node_log(self, node_rank: int) -> Path:
        """Return the metric log with a node's CPU, memory and GPU samples."""
        return self.metrics / f"node_{node_rank}.jsonl"

    def load_log(self, rank: int) -> Path:
        """Return the metric log with a worker's CPU, memory and GPU samples."""
        return self.metrics / f"load_{rank}.jsonl"

    #: Links to the logs of the current attempt, and the driver's log of all attempts.
    logs = PathAttribute("logs")
    #: Output of the supervisor and the launcher.
    driver_log = PathAttribute("logs/driver.log")

    def live_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    def attempt(self, number: int) -> Path:
        return self.path.joinpath("attempts", str(number))

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.path.joinpath("attempts", str(attempt), f"rank_{rank}.log")

    def ranks_with_log(self, attempt: int) -> list[int]:
        """Return the ranks with a log in this attempt, even beyond the world size."""
        try:
            names = os.listdir(self.attempt(attempt))
        except OSError:
            return []
        return sorted(int(found[1]) for name in names if (found := _RANK_LOG.fullmatch(name)))

    def ranks(self, world_size: int) -> range:
        """Return the ranks of the world size, and further ranks that logged."""
        attempts = self.path.glob("attempts/*")
        logs = (rank for path in attempts if path.name.isdecimal() for rank in self.ranks_with_log(int(path.name)))
        return range(1 + max((world_size - 1, *logs, *metric_logs(self.metrics))))

    def log_order(self, attempt: int) -> Path:
        """Return the file with lines of time, rank and log size, for merging."""
        return self.attempt(attempt) / "log_order.txt"

    def worker_start(self, attempt: int, rank: int) -> Path:
        """Return the file that a worker writes once it knows its rank."""
        return self.path.joinpath("attempts", str(attempt), f"start_{rank}.json")

    def spare(self, attempt: int, node_rank: int) -> Path:
        """Return the file on a node's process preloaded for workers: modules and memory."""
        return self.attempt(attempt) / f"spare_{node_rank}.json"

    def worker_group(self, attempt: int, rank: int) -> Path:
        """Return the file with a rank's facts for replacing lost workers (`on_failure="replace"`)."""
        return self.attempt(attempt) / f"group_{rank}.json"

    def worker_error(self, attempt: int, rank: int) -> Path:
        """Return the file in which a worker stores its exception, in torchelastic's format."""
        return self.path.joinpath("attempts", str(attempt), f"error_{rank}.json")

    def worker_end(self, attempt: int, rank: int) -> Path:
        """Return the file that says how a worker ended, for supervisors other than its parent."""
        return self.path.joinpath("attempts", str(attempt), f"end_{rank}.json")

    def worker_alone(self, attempt: int, rank: int) -> Path:
        """Return the file that a worker writes if it trained without other ranks."""
        return self.attempt(attempt) / f"alone_{rank}.json"

    def load(self, attempt: int) -> Path:
        """Return the file with the newest load samples (CPU, memory, GPU) of nodes and workers."""
        return self.attempt(attempt) / "load.json"

    def memory_plan(self, attempt: int, rank: int) -> Path:
        """Return the file with the memory plan that `paceline.parallel` wrote for a worker."""
        return self.attempt(attempt) / f"memory_{rank}.json"

    def hang_report(self, attempt: int) -> Path:
        """Return the hang report. The `.json` file beside it has all stacks."""
        return self.attempt(attempt) / "hang.txt"

    def hangs(self, attempt: int) -> Path:
        """Return the file with a JSON line for each begin or end of a hang."""
        return self.attempt(attempt) / "hangs.jsonl"

    def stalled(self, attempt: int) -> Path:
        """Return rank 0's file with a JSON line for each stalled collective operation."""
        return self.attempt(attempt) / "stalled.jsonl"

    def held(self, attempt: int) -> list[Path]:
        """Return the placeholder files that reserve disk space for workers' failure reports."""
        return sorted(self.attempt(attempt).glob("*.held"))

    def metric_folders(self, rank: int) -> Path:
        """Return the log of the folders into which this rank's trackers wrote metrics."""
        return self.metrics / f"folders_{rank}.jsonl"

    def file(self, name: str) -> Path:
        """Return the path of the run's file of this name.

        Raises:
            FileNameError: The name leaves the run's folder.
        """
        plain = check_file_name(name)
        top = plain.split("/", 1)[0]
        return self.path / plain if top in ("outputs", "logs") else self.artifacts / plain


def has_own_record(folder: RunFolder) -> bool:
    """Return whether this user or root wrote both files of the run's record."""
    return is_mine(folder.state) and is_mine(folder.job)
