"""The `Service` class: a handle on a deployed service, with the Azure SDK's method names."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from paceline.errors import ServiceError, ServiceFailedError, ServiceNotFoundError
from paceline.job.environment import EnvironmentSpec
from paceline.services import client, deploy, keys, log, revise, revision_spec, store
from paceline.services.record import (
    DOWN,
    FAILED,
    GONE,
    STOPPED,
    TRANSITIONING,
    UNHEALTHY,
    UP,
    Revision,
    ServiceRecord,
    ServingOptions,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.models.model import Model
    from paceline.workspace import Workspace

# An alias of the builtin, because `list` is a method of the class.
_Revisions: TypeAlias = "list[Revision]"

_PAUSE_S = 0.05

#: The models of a service, one or several: registered models, references such as "digits:3", or paths.
Models: TypeAlias = "Model | str | os.PathLike[str] | Sequence[Model | str | os.PathLike[str]]"


class DeployOptions(ServingOptions, total=False):
    """The arguments that `Model.deploy` passes on to `Service.deploy`."""

    entry_script: str | os.PathLike[str] | None
    source_directory: str | os.PathLike[str] | None
    environment: EnvironmentSpec | None
    environment_variables: Mapping[str, object] | None
    workers: int
    host: str
    port: int | None
    auth: bool | None
    tls: tuple[str, str] | None
    target: str
    overwrite: bool
    notify: Sequence[str] | str
    tags: Mapping[str, object] | None
    description: str


class Service:
    """A deployed service of a workspace.

    Raises:
        ServiceError: The name is not valid.
        ServiceNotFoundError: The workspace has no service of this name.

    Examples:
        >>> pl.Service.list(pl.Workspace("my_runs"))
        {}
        >>> service = pl.Workspace("my_runs").deploy("digits", "digits:1", entry_script="score.py")  # doctest: +SKIP
        >>> service.run([[0.0, 1.0]])  # doctest: +SKIP
    """

    def __init__(self, workspace: Workspace, name: str) -> None:
        self._workspace = workspace
        self._folder = store.folder_of(_path(workspace), name)

    def __repr__(self) -> str:
        return f"Service({self._workspace!r}, {self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Service) and other._folder == self._folder

    def __hash__(self) -> int:
        return hash(self._folder)

    @classmethod
    def deploy(
        cls,
        workspace: Workspace,
        name: str,
        models: Models,
        *,
        entry_script: str | os.PathLike[str] | None = None,
        source_directory: str | os.PathLike[str] | None = None,
        environment: EnvironmentSpec | None = None,
        environment_variables: Mapping[str, object] | None = None,
        workers: int = 1,
        host: str = "127.0.0.1",
        port: int | None = None,
        auth: bool | None = None,
        tls: tuple[str, str] | None = None,
        target: str = "local",
        overwrite: bool = False,
        notify: Sequence[str] | str = (),
        tags: Mapping[str, object] | None = None,
        description: str = "",
        **settings: Unpack[ServingOptions],
    ) -> Service:
        """Create and start a service.

        Return the service's handle without waiting for the start (see `wait_for_deployment`).

        Args:
            workspace: Workspace that the service belongs to.
            name: Name of the service.
            models: One or several registered models, references such as "digits:3", or paths of files and folders.
            entry_script: Script with init() and run(), relative to source_directory. Without source_directory, the
                script's own folder is its source. None serves a single model without a script.
            source_directory: Folder to copy for the script.
            environment: Environment of the script. Default: the environment of the first model's run, in its exact
                versions; without such a run, this interpreter.
            environment_variables: Variables of the script.
            workers: Number of model processes.
            host: Address to listen at; "0.0.0.0" for all addresses of this machine.
            port: Port to listen at. By default, the service chooses a free port at its first start, and keeps it.
            auth: Whether requests need a key. The default is True only if other machines can reach the host.
            tls: PEM files of certificate and key.
            target: Compute target that serves the models.
            overwrite: Update an existing service of this name. During the update, requests are still answered.
            notify: Receivers of a message, such as "mail:ann@example.com", in the forms of a run's `notify`. The message is
                sent when the service fails, or stays down although it is restarted.
            tags: Tags of the service.
            description: Text for people.
            settings: Limits and options of the server (`ServerConfig`): max_batch, max_queue, max_body_bytes, timeout_s,
                load_timeout_s, memory_limit_bytes, drain_s, threads, log_level, allow_origins.

        Raises:
            UserError: An argument is wrong. All mistakes that can be detected before a process starts are reported.
        """
        spec = revision_spec.make_spec(
            models,
            entry_script=entry_script,
            source_directory=source_directory,
            environment=environment,
            environment_variables=environment_variables,
            settings=settings,
        )
        deploy.deploy(
            _path(workspace),
            name,
            spec,
            workers=workers,
            host=host,
            port=port,
            auth=auth,
            tls=tls,
            target=target,
            overwrite=overwrite,
            notify=notify,
            tags=tags,
            description=description,
        )
        return cls(workspace, name)

    @staticmethod
    def list(workspace: Workspace) -> dict[str, Service]:
        """Return all services of the workspace, by name."""
        return {folder.name: Service(workspace, folder.name) for folder in store.all_folders(_path(workspace))}

    @property
    def name(self) -> str:
        """The name of the service."""
        return self._folder.name

    @property
    def workspace(self) -> Workspace:
        """The workspace of the service."""
        return self._workspace

    def record(self) -> ServiceRecord:
        """Return the service's current record. Restart the supervisor if it is not running.

        Raises:
            ServiceNotFoundError: The service has been deleted.
        """
        return store.record(self._folder)

    @property
    def state(self) -> str:
        """The state: "Transitioning", "Healthy", "Unhealthy", "Failed", "Stopped" or "NotResponding"."""
        return self.record().state

    @property
    def error(self) -> str | None:
        """The reason why the start or the last update failed, or None."""
        return self.record().failure

    @property
    def scoring_uri(self) -> str | None:
        """The URL to which requests are sent (POST), or None while it is unknown."""
        return self.record().scoring_uri

    @property
    def swagger_uri(self) -> str | None:
        """The URL of the service's OpenAPI document, or None while it is unknown."""
        url = self.record().url
        return None if url is None else f"{url}/swagger.json"

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the service."""
        return dict(self.record().tags)

    @property
    def revisions(self) -> _Revisions:
        """All revisions of the service, oldest first."""
        return store.revisions(self._folder)

    def wait_for_deployment(self, show_output: bool = False, timeout_sec: float | None = None) -> ServiceRecord:
        """Block until the last requested change is done. Return the record.

        Args:
            show_output: Print the log of the supervisor and its servers during the wait.
            timeout_sec: By default no limit.

        Raises:
            ServiceFailedError: The revision can't be served; the message has the reason. The previous revision stays.
        """
        tail = log.GrowingLog(self._folder.log)

        def show(record: ServiceRecord) -> None:
            sys.stdout.write(tail.new(whole_lines=False))
            sys.stdout.flush()

        serial = store.desired(self._folder).serial
        try:
            return deploy.wait(self._folder, serial, timeout_s=timeout_sec, on_look=show if show_output else None)
        finally:
            if show_output:
                show(store.stored(self._folder))

    def run(self, input_data: object, timeout_s: float = 60.0) -> Any:
        """Send a request and return the response, with JSON as Python values.

        Args:
            input_data: Text and bytes are sent unchanged, anything else as JSON.
            timeout_s: Limit in seconds on a restart of the service, and on the response. The first start has no limit.

        Raises:
            ServiceFailedError: The service is stopped, has failed, or responded with an error, whose number is in `status`.
            EngineError: The service did not respond.
        """
        deadline = time.monotonic() + timeout_s
        while (record := self.record()).state == UNHEALTHY and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if record.state == TRANSITIONING:
            record = self.wait_for_deployment()
        if record.state == STOPPED:
            raise ServiceFailedError(f"service {self.name!r} is stopped. Run `paceline service start {self.name}`.")
        if record.state == FAILED or record.scoring_uri is None:
            raise ServiceFailedError(f"service {self.name!r} has not been served yet: {record.failure or record.state}")
        uri, certificate = record.scoring_uri, record.tls_cert
        primary, secondary = keys.read(self._folder) if record.has_keys else (None, None)
        try:
            try:
                return client.call(uri, input_data, key=primary, timeout_s=timeout_s, certificate=certificate)
            except ServiceFailedError as error:
                if error.status != 401 or secondary is None:
                    raise
                # Try the secondary key: a server gets changed keys late; on another machine, only when it is replaced.
                return client.call(uri, input_data, key=secondary, timeout_s=timeout_s, certificate=certificate)
        except ServiceFailedError as error:
            if error.status is None or error.status < 500:
                raise
            # Name the command that shows the log, which has the reason. Only the service's owner may see the reason.
            raise ServiceFailedError(f"{error} (`paceline service logs {self.name}`)", error.status) from None

    def get_logs(self, num_lines: int = 5000) -> str:
        """Return the last lines of the supervisor's and the servers' log.

        Args:
            num_lines: Most lines to return.
        """
        return log.last_lines(self._folder, num_lines)

    def get_keys(self) -> tuple[str, str]:
        """Return the service's two keys (primary, secondary).

        A request needs one of the keys, as `Authorization: Bearer KEY`.

        Raises:
            ServiceError: The service has no keys, or you may not read the keys.
        """
        return keys.read(self._folder)

    def regen_key(self, key: Literal["primary", "secondary"], set_key: str | None = None) -> str:
        """Replace one of the two keys, and return the new key.

        Args:
            key: "primary" or "secondary". The other key stays valid.
            set_key: The new key; by default a random one.

        Raises:
            ServiceError: No key has this name, or set_key is too short.
        """
        with store.editing(self._folder):
            return keys.change(self._folder, key, set_key)

    def update(
        self,
        models: Models | None = None,
        *,
        entry_script: str | os.PathLike[str] | None = None,
        source_directory: str | os.PathLike[str] | None = None,
        environment: EnvironmentSpec | None = None,
        environment_variables: Mapping[str, object] | None = None,
        workers: int | None = None,
        wait: bool = True,
        **settings: Unpack[ServingOptions],
    ) -> ServiceRecord:
        """Serve a new revision without interrupting requests.

        Omitted arguments keep their values.

        Args:
            models: As for `deploy`.
            entry_script: As for `deploy`. If the script or its folder is given, the source is copied again.
            source_directory: As for `deploy`.
            environment: As for `deploy`.
            environment_variables: As for `deploy`.
            workers: Number of model processes.
            wait: Block until the revision is served.
            settings: As for `deploy`.

        Raises:
            UserError: An argument is wrong; nothing has changed.
            ServiceFailedError: The revision can't be served; the message has the reason. The previous revision stays.
        """
        present = self._present()
        changes: dict[str, object] = {}
        if models is not None:
            changes["models"] = revision_spec.as_models(models)
        if entry_script is not None or source_directory is not None:
            script, source = revision_spec.script_of(entry_script or present.entry_script, source_directory)
            changes |= {"entry_script": script, "source_directory": source}
        if environment is not None:
            revision_spec.check_environment(environment)
            changes["environment"] = environment
        if environment_variables is not None:
            changes["variables"] = revision_spec.as_variables(environment_variables)
        if not (changes or settings or workers is not None):
            raise ServiceError("nothing to update. Name models, a script, an environment, workers or a setting.")
        spec = revision_spec.changed_spec(revise.spec_of(self._folder, present), settings=settings, **changes)
        keep = None if "source_directory" in changes else present
        deploy.update(self._folder, spec, workers=workers, why=_why(changes, settings, workers), source_of=keep)
        return self.wait_for_deployment() if wait else self.record()

    def reload(self, wait: bool = True) -> ServiceRecord:
        """Serve the same models with the script's current source.

        Args:
            wait: Block until the revision is served.

        Raises:
            ServiceError: The source folder is gone.
            ServiceFailedError: The revision can't be served; the previous revision stays.
        """
        spec = revise.spec_of(self._folder, self._present())
        if spec.source_directory is not None:
            revision_spec.script_of(spec.entry_script, spec.source_directory)  # report a missing script to the caller
        deploy.update(self._folder, spec, why="reload")
        return self.wait_for_deployment() if wait else self.record()

    def scale(self, workers: int, wait: bool = True) -> ServiceRecord:
        """Change the number of model processes.

        Args:
            workers: Number of model processes.
            wait: Block until the model processes are ready.
        """
        revision_spec.check_workers(workers)
        deploy.request(self._folder, workers=workers, why=f"{workers} workers")
        return self.wait_for_deployment() if wait else self.record()

    def rollback(self, revision: int | None = None, wait: bool = True) -> ServiceRecord:
        """Serve an earlier revision.

        Args:
            revision: Number of the revision. Default: the revision that was served before the present one.
            wait: Block until the revision is served.

        Raises:
            ServiceError: The service has no such revision.
        """
        deploy.rollback(self._folder, revision)
        return self.wait_for_deployment() if wait else self.record()

    def stop(self, wait: bool = True) -> None:
        """Stop the service once it has answered its open requests.

        `start` makes the service listen at the same port again.

        Args:
            wait: Block until the service has ended.
        """
        if wait:
            deploy.end(self._folder, DOWN)
        else:
            deploy.request(self._folder, state=DOWN)

    def start(self, wait: bool = True) -> ServiceRecord:
        """Start a service that was stopped or that has failed.

        Args:
            wait: Block until the service answers requests.
        """
        deploy.request(self._folder, state=UP)
        return self.wait_for_deployment() if wait else self.record()

    def delete(self, wait: bool = True) -> None:
        """Stop the service, and remove its files.

        Args:
            wait: Block until the service is removed.
        """
        with contextlib.suppress(ServiceNotFoundError, FileNotFoundError):
            if wait:
                deploy.end(self._folder, GONE)
            else:
                deploy.request(self._folder, state=GONE)

    def _present(self) -> Revision:
        record = store.stored(self._folder)
        return store.revision(self._folder, record.revision or store.desired(self._folder).revision)


def _path(workspace: Workspace) -> Path:
    path = getattr(workspace, "path", None)
    if not isinstance(path, Path):
        raise ServiceError(f"{workspace!r} is not a workspace. Give Workspace.from_config(), or Workspace(folder).")
    return path


def _why(changes: Mapping[str, Any], settings: Mapping[str, object], workers: int | None) -> str:
    words = []
    if "models" in changes:
        words.append("models " + ", ".join(str(getattr(each, "id", each)) for each in changes["models"]))
    if "entry_script" in changes:
        words.append(f"script {changes['entry_script']}")
    words += [name for name in ("environment", "variables") if name in changes]
    words += [f"{name}={value}" for name, value in settings.items()]
    if workers is not None:
        words.append(f"{workers} workers")
    return ", ".join(words)
