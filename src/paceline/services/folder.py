"""The names of all files of a service.

<workspace>/services/<name>/
  service.json        the record: state, revision, address; one writer: the holder of the lock
  events.jsonl        every change of state, append only
  wanted.json         what it should be: which revision, how many workers, up or stopped; written by whoever asks
  wanted.lock         held for moments, while wanted.json or a revision is written
  supervisor.lock     held by the supervisor
  keys.json           its two keys, for its user alone
  logs/service.log    what its supervisor says and its servers print; service.log.1: what was before
  revisions/<n>/      revision.json; source/: a copy, in which the script runs; models/: those given by a path; hashes/;
                      prepared.json: the environment
  server/             the server's configuration and what it says of itself (server.json); gone when it has ended
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.system.files import PathAttribute

#: In the environment of all that a service's supervisor starts, with the service's folder.
MARK = "PACELINE_SERVICE_DIR"


@dataclass(frozen=True)
class ServiceFolder:
    """The folder of one service. called: its name, while the folder has another."""

    path: Path
    called: str | None = None

    record = PathAttribute("service.json")
    events = PathAttribute("events.jsonl")
    wanted = PathAttribute("wanted.json")
    wanted_lock = PathAttribute("wanted.lock")
    lock = PathAttribute("supervisor.lock")
    keys = PathAttribute("keys.json")
    logs = PathAttribute("logs")
    log = PathAttribute("logs/service.log")
    old_log = PathAttribute("logs/service.log.1")
    revisions = PathAttribute("revisions")
    server = PathAttribute("server")
    server_config = PathAttribute("server/config.json")

    @property
    def name(self) -> str:
        return self.called or self.path.name

    @property
    def workspace_dir(self) -> Path:
        return self.path.parents[1]

    def revision(self, number: int) -> RevisionFolder:
        return RevisionFolder(self.revisions / str(number))


@dataclass(frozen=True)
class RevisionFolder:
    """The folder of one revision of a service."""

    path: Path

    description = PathAttribute("revision.json")
    source = PathAttribute("source")
    models = PathAttribute("models")
    prepared = PathAttribute("prepared.json")

    @property
    def number(self) -> int:
        return int(self.path.name)

    def model(self, index: int) -> Path:
        """The folder with the copy of a model that was given by a path. index: among the revision's models, from 0."""
        return self.models / str(index)

    def hashes(self, index: int) -> Path:
        """The SHA-256 of a registered model's files, as `sha256sum` writes them."""
        return self.path / "hashes" / str(index)
