"""The server of a service on Kubernetes: a Deployment, with a pod for each model process.

The pods run on without this machine. Programs in the cluster reach them by the Service's name. Connections to the service's
port on this machine are forwarded to the pods in turn. An update replaces one pod after the other, and is undone if a new pod
can't start.

<service folder>/cluster.json    {"target": compute target with its settings, "workspace": label of the workspace's objects,
                                  "secrets": names of Secrets that may exist}
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, cast

from paceline.errors import EngineError, PacelineError, TargetError
from paceline.job.plan import NodeSetup
from paceline.runs.driver_log import say
from paceline.services import keys
from paceline.services.folder import ServiceFolder
from paceline.services.listener import ConnectionRelay
from paceline.services.record import Revision, ServiceRecord
from paceline.services.remote_server import AwayServer, key_variables, with_server_packages, write_package
from paceline.system.files import read_json, write_json
from paceline.system.scratch import Scratch
from paceline.targets import configured
from paceline.targets.kubernetes import deployment, manifests, readers, submission

if TYPE_CHECKING:
    from paceline.targets.kubernetes import KubernetesTarget
    from paceline.targets.kubernetes.settings import Manifest

_LOOK_S, _PAUSE_S = 0.5, 0.3
#: Seconds for which a change of the service is tried again while the cluster's API can't be reached.
_PATIENCE_S = 60.0
#: Seconds after which a service counts as Unhealthy while the cluster's API does not answer.
_AWAY_S = 30.0
#: Seconds that an update may take, for the image and the environment, in addition to the time for loading the model.
_START_S = 600.0
#: At the end of a service: seconds for the API to answer, and for the pods to finish their open requests.
_END_S = 120.0


class ClusterServer(AwayServer):
    """The pods of a service on Kubernetes, with the methods of `paceline.services.server.Server`."""

    #: The server is no run. It consists of pods in the cluster.
    run_id: str | None = None
    pids: frozenset[int] = frozenset()

    def __init__(self, folder: ServiceFolder, listener: socket.socket, target: str) -> None:
        self._folder = folder
        known = read_json(folder.cluster) or {}
        self._secrets: list[str] = known.get("secrets", [])
        try:
            self._target = configured.read(folder.workspace_dir, target)
        except TargetError:
            if "target" not in known:
                raise
            # The user has removed the target, so use the settings of the target that the service has stored.
            self._target = configured.Configured.from_json(known["target"], str(folder.cluster))
        made, label = cast("KubernetesTarget", self._target.make()), known.get("workspace", "")
        self._objects = made.service(folder.name, folder.workspace_dir, label)
        self._has_volume = bool(self._target.settings.get("volume"))
        self._relay = ConnectionRelay(listener)
        self._forwards = readers.PodForwards(self._objects.cluster, manifests.POD_PORT, say)
        self._relay.place = self._forwards
        self._logs = deployment.PodLogs(self._objects.cluster, lambda line: print(line, flush=True))
        self._state: deployment.ServiceState | None = None
        self._tag = ""
        #: The Deployment before the last change, while the change can be undone; `_undoes`: whether it must be undone.
        self._before: Manifest | None = None
        self._undoes = False
        #: Whether all pods have to be ready after the last change. For pods of an earlier supervisor, one is enough.
        self._needs_all = True
        self._is_first = False
        self._changed_s = self._seen_s = time.monotonic()
        self._start_s = _START_S
        self._next_look_s = 0.0
        self._told = ""

    @property
    def is_up(self) -> bool:
        return bool(self._tag)

    @property
    def note(self) -> str | None:
        """A sentence that tells users where the server runs."""
        name, namespace = self._folder.name, self._objects.cluster.namespace
        return (
            f"It is Deployment {name} in namespace {namespace}. Programs in the cluster reach it at "
            f"http://{name}.{namespace}/score, with the same keys."
        )

    def start(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Create the Deployment, or adopt it if it has this revision."""
        self._is_first = record.revision is None
        self._put(tag, record, revision, workers)
        self._before = None

    def change(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Replace the pods by pods of another revision, or change their number."""
        self._put(tag, record, revision, workers)

    @property
    def answers(self) -> bool:
        """Whether a pod answers requests."""
        self._look()
        return bool(self._forwards.pods) and time.monotonic() - self._seen_s < _AWAY_S

    def is_ready(self, tag: str) -> bool:
        self._look()
        state = self._state
        if tag != self._tag or state is None or not (state.is_done if self._needs_all else state.ready):
            return False
        self._before, self._is_first = None, False
        # Ignore an error here, because the next change removes the Secrets that are left.
        with contextlib.suppress(PacelineError):
            self._secrets = self._objects.remove_secrets(self._secrets)
            self._note([])
        return True

    def refusal(self, tag: str) -> str | None:
        """Return why a change of the pods failed, or None. Start to undo it."""
        if tag != self._tag or self._is_first or self._state is None:
            return None
        reason, waited_s = self._state.failure, time.monotonic() - self._changed_s
        if reason is None and self._before is not None and waited_s > self._start_s:
            reason = f"the change took more than {self._start_s:g} s: {self._state.waiting}."
        if reason is not None and self._before is not None:
            self._undoes, self._next_look_s = True, 0.0
            self._look()
        return reason

    def ended(self) -> str | None:
        self._look()
        if self._state is None:
            return None
        if not self._state.exists:
            return f"Deployment {self._folder.name} does not exist any more: somebody deleted it."
        return self._state.failure if self._is_first else None

    def stop(self) -> None:
        """Delete the service's objects, and wait until its pods have ended."""
        deadline = time.monotonic() + _END_S
        try:
            while not self._objects.cluster.patiently(lambda: self._objects.remove(self._secrets), _END_S, say):
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_S)
        except PacelineError as error:
            say(f"{error} Objects may be left: `paceline prune --compute {self._target.name}` removes them.")
        self._folder.cluster.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Leave the pods running, for the next supervisor."""
        self._logs.follow(())
        self._relay.close()

    def clear(self) -> None:
        """Forget the Deployment, which has been deleted or could not start."""
        self._tag, self._state, self._before = "", None, None

    # --- the objects in the cluster

    def _put(self, tag: str, record: ServiceRecord, revision: Revision, workers: int) -> None:
        version = f"{revision.number}-{keys.changed_ns(self._folder)}"
        patiently = self._objects.cluster.patiently
        found = patiently(self._objects.present, _PATIENCE_S, say)
        self._needs_all = found is None or found[:2] != (version, workers)
        self._start_s = (revision.settings.get("load_timeout_s") or 600.0) + _START_S
        if self._needs_all:
            content = self._content(version, record, revision)
            patiently(lambda: self._objects.put(content, workers, self._note), _PATIENCE_S, say)
        # If an earlier update has not been undone yet, the Deployment before that update is still the one to restore.
        self._before = self._before if self._undoes else found[2] if found and self._needs_all else None
        self._undoes = False
        self._tag, self._changed_s, self._next_look_s = tag, time.monotonic(), 0.0
        self._state = None

    def _content(self, version: str, record: ServiceRecord, revision: Revision) -> manifests.ServiceContent:
        with Scratch("service") as scratch:
            place = scratch / "package"
            write_package(self._folder, revision, place, 1)
            package = submission.packed_tree(place, ".")
        drain_s = revision.settings.get("drain_s") or 30.0
        return manifests.ServiceContent(
            version=version,
            ticket={
                "program": "paceline.services.pod",
                "environment": with_server_packages(revision.environment).to_json(),
                "variables": {**revision.variables, **key_variables(self._folder, record)},
                "volume": self._has_volume,
            },
            package=package,
            drain_s=drain_s + 5.0,
            start_s=self._start_s,
        )

    def _note(self, secrets: list[str]) -> None:
        """Record names of Kubernetes Secrets, to delete them with the service."""
        self._secrets = list(dict.fromkeys([*self._secrets, *secrets]))
        known = {"target": self._target.to_json(), "workspace": self._objects.workspace, "secrets": self._secrets}
        write_json(self._folder.cluster, known)

    def _look(self) -> None:
        if not self._tag or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + _LOOK_S
        try:
            if self._undoes and self._before is not None:
                self._objects.replace(self._before)
                self._before, self._undoes = None, False
            self._state = self._objects.look()
        except (EngineError, TargetError) as error:
            self._tell(str(error))  # try again at the next tick, when the cluster may answer
            return
        self._seen_s = time.monotonic()
        self._forwards.pods = self._state.ready
        self._logs.follow(self._state.started)
        if self._state.exists and not self._state.is_done:
            self._tell(self._state.waiting)

    def _tell(self, text: str) -> None:
        """Write a line into the service's log, unless it repeats the last one."""
        if text != self._told:
            self._told = text
            say(text)
