"""Define all file names in a run's folder, and ensure that no name leads out of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import FileNameError
from paceline.system.files import PathAttribute, is_mine

_RANK_LOG = re.compile(r"rank_(\d+)\.log", re.ASCII)
# Metrics of rank 0: `rank_0.jsonl` for attempt 1, and `rank_0.2.jsonl` for attempt 2.
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
    """Return `name` as a normalized relative path, such as `outputs/model.pt`.

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

    #: The job and everything else that never changes. This file is written once, before the folder gets its final name.
    job = PathAttribute("job.json")
    #: The part of the record that changes. Only the process that holds `lock` writes this file, and replaces it atomically.
    state = PathAttribute("state.json")
    #: The file that the run's owner locks (flock). If no process holds the lock, the run is abandoned.
    lock = PathAttribute("lock")
    #: A file with one line of JSON for each change of the run's state.
    events = PathAttribute("events.jsonl")
    #: Values of secret variables, with mode 0600. Only the supervisor reads this file, and deletes it at the end of the run.
    secrets = PathAttribute("secrets.json")
    #: Tags, properties and names of the run. Any process may append a change to this file, as a line of JSON.
    notes = PathAttribute("notes.jsonl")
    #: Time and user of the run's deletion. Only a run in the trash has this file (`paceline.runs.trash`).
    deleted = PathAttribute("deleted.json")
    #: For a run that was imported from another tracker: how much the last import has copied (`paceline.trackers.imports`).
    origin = PathAttribute("import.json")
    #: How many metrics were relayed to servers of other trackers, one file for each server (`paceline.trackers.relay`).
    relays = PathAttribute("relays")
    #: The arguments of a run of a function, if they are too long for its command line (`paceline.functions.calls`).
    call = PathAttribute("call")
    #: The key or token that opens an interactive session. Only its owner can read it, and it is never sent to another machine.
    session = PathAttribute("session")
    #: A request to end the run, with the user and the reason. The file exists only after such a request.
    cancel_request = PathAttribute("cancel.json")
    #: A folder with one folder for each running `paceline exec` command. Only the run's owner can read it.
    exec_requests = PathAttribute("exec")
    #: The key that signs messages to exec commands through a datastore. It has mode 0600, and stays on the submitting machine.
    exec_key = PathAttribute("exec_key")

    def exec_output(self, attempt: int, name: str) -> Path:
        """Return the file with an exec command's output, kept while a client reads it."""
        return self.attempt(attempt) / f"exec_{name}.jsonl"

    #: Receivers that were notified of the run's end, one JSON line each. A process that closes the run later skips them.
    told = PathAttribute("told.jsonl")
    #: This file exists while a process closes an abandoned run. This process then holds the lock, although the run is over.
    closing = PathAttribute("closing")

    def passing(self) -> list[Path]:
        """Return the temporary files that a killed supervisor left in the run's folder."""
        return [path for pattern in (".incoming", ".seen-*", ".work") for path in self.path.glob(pattern)]

    #: The failure of a rank other than 0, for a program that a launcher has started and that itself logs the run.
    rank_failure = PathAttribute("rank_failure.json")
    #: The engine (such as Slurm) and its job's number, if the supervisor runs inside a job of the engine.
    engine = PathAttribute("engine.json")
    #: An empty file. Its mtime is the time at which the engine first did not know the job of this unfinished run.
    gone = PathAttribute("gone")
    #: Kind and settings of the compute target at the time of the submission.
    target = PathAttribute("target.json")
    #: A file that only reserves disk space. On a full disk Paceline writes the last record into it.
    ballast = PathAttribute("ballast")

    @property
    def scratch(self) -> Path:
        """A short path of a folder outside the run, for sockets and shared memory."""
        # Use a short path outside the run's folder, because a Unix socket's path may have at most 107 bytes.
        top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else _temporary_folder()
        return Path(top) / f"paceline-{self.run_id[-8:]}"

    #: Link to the run's snapshot of the source in the workspace.
    snapshot = PathAttribute("snapshot")
    #: Files of the source that are links in the working directory, and are not in the snapshot (`paceline.system.linked`).
    linked = PathAttribute("linked.json")
    #: Linked files that were sent to this machine: their names in the working directory -> the paths of the sent files.
    sent = PathAttribute("sent.json")
    #: Links that protect the snapshots of a pipeline's steps from removal until the steps' runs use the snapshots.
    sources = PathAttribute("sources")
    #: The working directory of the workers. After the run it has only files that the script has left.
    work = PathAttribute("work")
    #: The working directory while it is made. It gets its name `work` once it is complete.
    unfinished_work = PathAttribute(".work")
    outputs = PathAttribute("outputs")
    #: Uploaded files with names outside `outputs/` and `logs/`.
    artifacts = PathAttribute("artifacts")
    #: One folder for each output that is stored at the end of the run. A folder stays if storing its output fails.
    uploads = PathAttribute("uploads")
    #: Names of files that remote nodes did not send, and the reasons: one line of JSON for each name.
    left_out = PathAttribute("left_out.jsonl")
    #: The exact package versions of an environment that was built.
    environment = PathAttribute("environment.json")
    #: Datasets that the run has read, with their fingerprints, and outputs that the run has stored.
    data = PathAttribute("data.json")
    #: Local paths of files that the job names by their paths on the submitting machine. Absent if these paths are equal.
    carried = PathAttribute("carried.json")
    #: Written on the machine that runs the job: the output folders that the submitting machine has to store, and their files.
    left = PathAttribute("prepared/left.json")
    #: Written on the submitting machine: the output folders that it still has to store, and the progress. Deleted at the end.
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

    def rescued(self, node_rank: int) -> Path:
        """Return the file with a node's result of saving in-memory training states."""
        return self.path / "prepared" / f"rescued_{node_rank}.json"

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

    #: The folder with links to the logs of the current attempt, and with the driver's log of all attempts.
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
        """Return the ranks below `world_size`, or up to the highest rank with a log."""
        attempts = self.path.glob("attempts/*")
        logs = (rank for path in attempts if path.name.isdecimal() for rank in self.ranks_with_log(int(path.name)))
        return range(1 + max((world_size - 1, *logs, *metric_logs(self.metrics))))

    def log_order(self, attempt: int) -> Path:
        """Return the file of (time, rank, log size) lines, for merging ranks' logs."""
        return self.attempt(attempt) / "log_order.txt"

    def worker_start(self, attempt: int, rank: int) -> Path:
        """Return the file that a worker writes once it knows its rank."""
        return self.path.joinpath("attempts", str(attempt), f"start_{rank}.json")

    def spare(self, attempt: int, node_rank: int) -> Path:
        """Return the file that describes the idle process that forks a node's workers."""
        return self.attempt(attempt) / f"spare_{node_rank}.json"

    def keeper(self, attempt: int, node_rank: int) -> Path:
        """Return the file with the port of a node's process that keeps training states."""
        return self.attempt(attempt) / f"keeper_{node_rank}.json"

    def kept(self, attempt: int, rank: int | str) -> Path:
        """Return the file that marks a worker's training states as kept in memory."""
        return self.attempt(attempt) / f"kept_{rank}.json"

    def worker_group(self, attempt: int, rank: int) -> Path:
        """Return the file that says whether a rank can continue after lost workers."""
        return self.attempt(attempt) / f"group_{rank}.json"

    def worker_error(self, attempt: int, rank: int) -> Path:
        """Return the file in which a worker stores its exception, in torchelastic's format."""
        return self.path.joinpath("attempts", str(attempt), f"error_{rank}.json")

    def worker_end(self, attempt: int, rank: int) -> Path:
        """Return the file that says how a worker under mpirun or srun ended."""
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
        """Return the hang report's path. The `.json` file beside it has all stacks."""
        return self.attempt(attempt) / "hang.txt"

    def hangs(self, attempt: int) -> Path:
        """Return the file with a JSON line for each hang's begin or end."""
        return self.attempt(attempt) / "hangs.jsonl"

    def stalled(self, attempt: int) -> Path:
        """Return rank 0's file with a JSON line for each stalled collective operation."""
        return self.attempt(attempt) / "stalled.jsonl"

    def held(self, attempt: int) -> list[Path]:
        """Return the placeholder files that reserve disk space for workers' failure reports."""
        return sorted(self.attempt(attempt).glob("*.held"))

    def metric_folders(self, rank: int) -> Path:
        """Return the file that lists the folders in which a rank's trackers wrote metrics."""
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
