"""The one owner of every file name in a run's folder, and of the rule that no name leaves it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import FileNameError
from paceline.system.files import PathAttribute

# `rank_0.jsonl` is of the first attempt, `rank_0.2.jsonl` of the second.
_RANK_LOG = re.compile(r"rank_(\d+)\.log", re.ASCII)
_METRIC_LOG = re.compile(r"rank_(\d+)(?:\.(\d+))?\.jsonl", re.ASCII)
_NODE_LOG = re.compile(r"node_(\d+)\.jsonl", re.ASCII)
_LOAD_LOG = re.compile(r"load_(\d+)\.jsonl", re.ASCII)


def node_logs(directory: Path) -> dict[int, Path]:
    """Node -> the log of how busy it was, below `directory`."""
    found = ((_NODE_LOG.fullmatch(path.name), path) for path in directory.glob("node_*.jsonl"))
    return {int(name[1]): path for name, path in found if name}


def load_logs(directory: Path) -> dict[int, Path]:
    """Rank -> the log of what its worker took, below `directory`."""
    found = ((_LOAD_LOG.fullmatch(path.name), path) for path in directory.glob("load_*.jsonl"))
    return {int(name[1]): path for name, path in found if name}


def check_file_name(name: object) -> str:
    """`name` in its plain form (`outputs/model.pt`), if it stays inside the run's folder.

    Raises:
        FileNameError: empty, absolute, with a NUL or a `..` part.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise FileNameError(
            f"file name {name!r}: a name is a non-empty string without NUL, such as 'outputs/model.pt'."
        )
    parts = [part for part in name.replace(os.sep, "/").split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts:
        raise FileNameError(
            f"file name {name!r} leaves the run's folder. Give a relative name without '..', such as 'outputs/model.pt'."
        )
    return "/".join(parts)


def _temporary_folder() -> str:
    import tempfile  # which takes longer to load than this module

    return tempfile.gettempdir()


def metric_logs(directory: Path) -> dict[int, dict[int, Path]]:
    """Rank -> attempt -> metric log under `directory`, for each rank that logged anything; both in order."""
    found: dict[int, dict[int, Path]] = {}
    for path in directory.glob("rank_*.jsonl"):
        if name := _METRIC_LOG.fullmatch(path.name):
            found.setdefault(int(name[1]), {})[int(name[2] or 1)] = path
    return {rank: dict(sorted(found[rank].items())) for rank in sorted(found)}


@dataclass(frozen=True)
class RunFolder:
    """The file names of the run whose folder is `path`."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    #: `run.json`: whole at all times; one writer, whoever holds `lock`.
    record = PathAttribute("run.json")
    #: Locked (flock) by whoever looks after the run; free means that nobody does.
    lock = PathAttribute("lock")
    #: One JSON line per change of state.
    events = PathAttribute("events.jsonl")
    #: Variable -> value of the job's secrets, mode 0600: for the run's supervisor alone, gone once the run has ended.
    secrets = PathAttribute("secrets.json")
    #: Tags, properties and names: one JSON line per change, appended by anybody.
    notes = PathAttribute("notes.jsonl")
    #: Exists once somebody has asked for the run's end; holds who and why.
    cancel_request = PathAttribute("cancel.json")
    #: A folder for each command that somebody runs beside a worker at the moment, for its owner alone.
    exec_requests = PathAttribute("exec")
    #: Signs what such a command is told where that goes through a datastore; mode 0600, on the submitting machine alone.
    exec_key = PathAttribute("exec_key")

    def exec_output(self, attempt: int, name: str) -> Path:
        """The output of such a command, while somebody reads it."""
        return self.attempt(attempt) / f"exec_{name}.jsonl"

    #: Exists while somebody ends what a killed supervisor has left: the lock is held then, but the run is over.
    closing = PathAttribute("closing")

    def passing(self) -> list[Path]:
        """The paths that are there while files come from nodes, and that a killed supervisor may leave: files that are not whole
        yet, and marks by which it is seen whether a node has the same folder.
        """
        return [path for pattern in (".incoming", ".seen-*") for path in self.path.glob(pattern)]

    #: Names the engine and its job that the run is, where its supervisor is inside that job.
    engine = PathAttribute("engine.json")
    #: Made when the engine was first found not to know the run's job any more, while the record is not final.
    gone = PathAttribute("gone")
    #: Kind and settings of the compute target, as they were when the run was submitted.
    target = PathAttribute("target.json")
    #: Bytes held back so that the last record can be written on a full disk.
    ballast = PathAttribute("ballast")

    @property
    def scratch(self) -> Path:
        """Outside the run's folder, with a short path, for sockets and shared memory; in memory where there is such a
        file system.
        """
        # The path of a Unix socket may have 107 bytes, and a run's folder often lies deeper than that.
        top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else _temporary_folder()
        return Path(top) / f"paceline-{self.run_id[-8:]}"

    #: Link to the workspace's snapshot.
    snapshot = PathAttribute("snapshot")
    #: Names of the source that the snapshot has not: the working directory links to them (`paceline.system.linked`).
    linked = PathAttribute("linked.json")
    #: What of these was sent to this machine: the name of each copy in the working directory -> where its original lies here.
    sent = PathAttribute("sent.json")
    #: Of a pipeline: links to the snapshots of its steps, so that they stay until the steps' runs have them.
    sources = PathAttribute("sources")
    #: The workers' working directory; in the end, only what the script left there.
    work = PathAttribute("work")
    outputs = PathAttribute("outputs")
    #: Uploaded files whose names lie neither under `outputs/` nor under `logs/`.
    artifacts = PathAttribute("artifacts")
    #: A folder for each output that is stored when the run ends; what could not be stored stays.
    uploads = PathAttribute("uploads")
    #: The run's files that nodes elsewhere have not sent, and why: one JSON line for each name.
    left_out = PathAttribute("left_out.jsonl")
    #: The packages of the script's environment with the exact versions, where one was built.
    environment = PathAttribute("environment.json")
    #: The data that the run took from datastores, with fingerprints, and what it stored there.
    data = PathAttribute("data.json")
    #: Says where on this machine lies what the job names on the submitting one; not there where that is the same.
    carried = PathAttribute("carried.json")
    #: Output folders that wait to be stored on the submitting machine, with their files. Written on the others.
    left = PathAttribute("prepared/left.json")
    #: On the submitting machine: that there will be output folders to store here, and how far that is; gone then.
    home = PathAttribute("home.json")

    def prepare_log(self, node_rank: int) -> Path:
        """The log of what was installed and fetched on a node before the workers, and stored after them."""
        return self.logs / f"prepare_{node_rank}.log"

    def prepared(self, node_rank: int) -> Path:
        """A node's result of preparing: what it has ready for its workers, or why it has not."""
        return self.path / "prepared" / f"node_{node_rank}.json"

    def stored(self, node_rank: int) -> Path:
        """A node's result of storing at the end: what it has stored, or why it could not."""
        return self.path / "prepared" / f"stored_{node_rank}.json"

    def cleaned(self, node_rank: int) -> Path:
        """A node's result of cleaning up: that it has nothing more of the run, or why not."""
        return self.path / "prepared" / f"cleaned_{node_rank}.json"

    checkpoints = PathAttribute("checkpoints")
    metrics = PathAttribute("metrics")

    def metric_log(self, rank: int, attempt: int = 1) -> Path:
        """A rank's metrics of one attempt: a worker of an earlier one that is cut off, and not dead yet, can't write there."""
        return self.metrics / (f"rank_{rank}.jsonl" if attempt == 1 else f"rank_{rank}.{attempt}.jsonl")

    def node_log(self, node_rank: int) -> Path:
        """How busy a node was, in the form of a metric log whose steps are seconds since 1970; written by the supervisor."""
        return self.metrics / f"node_{node_rank}.jsonl"

    def load_log(self, rank: int) -> Path:
        """The same of what a rank's worker took."""
        return self.metrics / f"load_{rank}.jsonl"

    #: Live logs of the current attempt, links into its folder, and the driver's log over all attempts.
    logs = PathAttribute("logs")
    #: The words of the supervisor and the launcher.
    driver_log = PathAttribute("logs/driver.log")

    def live_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    def attempt(self, number: int) -> Path:
        return self.path / "attempts" / str(number)

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"rank_{rank}.log"

    def ranks_with_log(self, attempt: int) -> list[int]:
        """Return the ranks that have a log of this attempt: its workers', and those that a script has started itself."""
        try:
            names = os.listdir(self.attempt(attempt))
        except OSError:
            return []
        return sorted(int(found[1]) for name in names if (found := _RANK_LOG.fullmatch(name)))

    def ranks(self, world_size: int) -> range:
        """Return the run's ranks: its workers', and those that a script has started and that have logged anything."""
        attempts = self.path.glob("attempts/*")
        logs = (rank for path in attempts if path.name.isdecimal() for rank in self.ranks_with_log(int(path.name)))
        return range(1 + max((world_size - 1, *logs, *metric_logs(self.metrics))))

    def log_order(self, attempt: int) -> Path:
        """Lines of `seconds rank offset`: by then, that rank's log had grown to that many bytes."""
        return self.attempt(attempt) / "log_order.txt"

    def worker_start(self, attempt: int, rank: int) -> Path:
        """Written by the worker once it has its rank."""
        return self.attempt(attempt) / f"start_{rank}.json"

    def worker_error(self, attempt: int, rank: int) -> Path:
        """The worker's exception, in torchelastic's shape."""
        return self.attempt(attempt) / f"error_{rank}.json"

    def worker_end(self, attempt: int, rank: int) -> Path:
        """The worker's end, written beside it where the supervisor is not its parent."""
        return self.attempt(attempt) / f"end_{rank}.json"

    def worker_alone(self, attempt: int, rank: int) -> Path:
        """Written by a worker at its end, where it has trained a model that no other took part in."""
        return self.attempt(attempt) / f"alone_{rank}.json"

    def load(self, attempt: int) -> Path:
        """The last sample of what nodes and workers take, and how the time of each rank goes; written by the supervisor."""
        return self.attempt(attempt) / "load.json"

    def memory_plan(self, attempt: int, rank: int) -> Path:
        """The memory that a worker said it will take: `paceline.parallel` writes it, where it knows."""
        return self.attempt(attempt) / f"memory_{rank}.json"

    def hang_report(self, attempt: int) -> Path:
        """Where all workers were when the attempt was found to hang; a file of the same name ends in `.json`."""
        return self.attempt(attempt) / "hang.txt"

    def stalled(self, attempt: int) -> Path:
        """Operations that ranks wait for in vain, a line of JSON each; written by the collectives' engine on rank 0."""
        return self.attempt(attempt) / "stalled.jsonl"

    def held(self, attempt: int) -> list[Path]:
        """Files by which workers hold the space for their reports, lest the disk fill up."""
        return sorted(self.attempt(attempt).glob("*.held"))

    def metric_folders(self, rank: int) -> Path:
        """The folders of trackers' files that this rank's processes have met, with the prefixes of their metrics."""
        return self.metrics / f"folders_{rank}.jsonl"

    def file(self, name: str) -> Path:
        """The path of the run's file of this name (`outputs/...`, `logs/...` or any other).

        Raises:
            FileNameError: the name leaves the run's folder.
        """
        plain = check_file_name(name)
        top = plain.split("/", 1)[0]
        return self.path / plain if top in ("outputs", "logs") else self.artifacts / plain
