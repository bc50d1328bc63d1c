"""The handle on a service, with the Azure SDK's calls."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from paceline.errors import ServiceError, ServiceFailedError, ServiceNotFoundError
from paceline.job.environment import EnvironmentSpec
from paceline.services import client, deploy, keys, log, revise, revision_spec, store
from paceline.services.record import DOWN, FAILED, GONE, STOPPED, TRANSITIONING, UNHEALTHY, UP, Revision, ServiceRecord

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.models.model import Model
    from paceline.workspace import Workspace

# `list` is a method of the class.
_Revisions: TypeAlias = "list[Revision]"

_PAUSE_S = 0.05

#: One model or several: registered ones, references such as "digits:3", or paths of files and folders.
Models: TypeAlias = "Model | str | os.PathLike[str] | Sequence[Model | str | os.PathLike[str]]"


class ServingOptions(TypedDict, total=False):
    """Settings of a service that may be given by their names."""

    max_batch: int
    max_queue: int
    max_body_bytes: int
    timeout_s: float
    load_timeout_s: float
    memory_limit_bytes: int | None
    drain_s: float
    threads: int | None
    log_level: Literal["debug", "info", "warning", "error"]
    allow_origins: Sequence[str]


class DeployOptions(ServingOptions, total=False):
    """What `Model.deploy` hands on to `Service.deploy`."""

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
    tags: Mapping[str, object] | None
    description: str


class Service:
    """A service of the workspace.

    Raises:
        ServiceError: a name that can't be one. ServiceNotFoundError: there is none of this name.
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
        tags: Mapping[str, object] | None = None,
        description: str = "",
        **settings: Unpack[ServingOptions],
    ) -> Service:
        """Make a service and start it; returns at once with its handle (`wait_for_deployment`).

        models: registered models, references such as "digits:3", or paths of files and folders; one or several.
        entry_script: with init() and run(); relative to source_directory, or a path, whose folder is the source then. None: the
            one model is served as it is.
        environment: in which the script runs; default: that of the run that made the first model, in its exact versions, else
            this interpreter.
        workers: model processes. host: "0.0.0.0" for all of this machine's addresses. port: default a free one; it is kept.
        auth: ask for a key; default: where other machines can reach the host. tls: PEM files of certificate and key.
        overwrite: make a service of this name, if there is one, into this one, without a lost request.
        settings: max_batch, max_queue, max_body_bytes, timeout_s, load_timeout_s, memory_limit_bytes, drain_s, threads,
            log_level, allow_origins.

        Args:
            workspace: Workspace that the service belongs to.
            environment_variables: Variables of the script.
            target: Compute target that serves it.
            tags: Tags of the service.
            description: Text for people.

        Raises:
            UserError: anything that can be known to be wrong before a process starts.
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
            tags=tags,
            description=description,
        )
        return cls(workspace, name)

    @staticmethod
    def list(workspace: Workspace) -> dict[str, Service]:
        """Name -> service, for all of the workspace."""
        return {folder.name: Service(workspace, folder.name) for folder in store.all_folders(_path(workspace))}

    @property
    def name(self) -> str:
        """The service's name."""
        return self._folder.name

    @property
    def workspace(self) -> Workspace:
        """The workspace that knows the service."""
        return self._workspace

    def record(self) -> ServiceRecord:
        """All that is known of it now. One that nobody looks after, though it should be up, is started again by this.

        Raises:
            ServiceNotFoundError: it has been deleted.
        """
        return store.record(self._folder)

    @property
    def state(self) -> str:
        """ "Transitioning", "Healthy", "Unhealthy", "Failed", "Stopped" or "NotResponding"."""
        return self.record().state

    @property
    def error(self) -> str | None:
        """Why its start or last update failed; None where it did not."""
        return self.record().failure

    @property
    def scoring_uri(self) -> str | None:
        """Where it is called (POST); None while that is not known."""
        return self.record().scoring_uri

    @property
    def swagger_uri(self) -> str | None:
        """Where it describes itself."""
        url = self.record().url
        return None if url is None else f"{url}/swagger.json"

    @property
    def tags(self) -> dict[str, str]:
        """Tag -> value."""
        return dict(self.record().tags)

    @property
    def revisions(self) -> _Revisions:
        """All that it has been or was to be, oldest first."""
        return store.revisions(self._folder)

    def wait_for_deployment(self, show_output: bool = False, timeout_sec: float | None = None) -> ServiceRecord:
        """Block until what was asked for last is being served; its record then.

        show_output: print what its supervisor and its server say meanwhile. timeout_sec: default: for ever.

        Raises:
            ServiceFailedError: it can't be served; the message has the reason. An update that fails leaves the revision before.
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
        """What the model answers: JSON as Python values.

        input_data: text or bytes go as they are, anything else as JSON. timeout_s: for a service that is being started again,
        and for its answer; its first start is waited for in any case.

        Raises:
            ServiceFailedError: it answered with an error, whose number is in `status`; or it can't be started.
            EngineError: it does not answer.
        """
        deadline = time.monotonic() + timeout_s
        while (record := self.record()).state == UNHEALTHY and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if record.state == TRANSITIONING:
            record = self.wait_for_deployment()
        if record.state == STOPPED:
            raise ServiceError(f"service {self.name!r} is stopped. `paceline service start {self.name}` starts it.")
        if record.state == FAILED or record.scoring_uri is None:
            raise ServiceError(f"service {self.name!r} has not been served yet: {record.failure or record.state}")
        uri, certificate = record.scoring_uri, record.tls_cert
        primary, secondary = keys.read(self._folder) if record.has_keys else (None, None)
        try:
            try:
                return client.call(uri, input_data, key=primary, timeout_s=timeout_s, certificate=certificate)
            except ServiceFailedError as error:
                if error.status != 401 or secondary is None:
                    raise
                # The server takes a new key a moment after it was made; on another machine, once a server there has it.
                return client.call(uri, input_data, key=secondary, timeout_s=timeout_s, certificate=certificate)
        except ServiceFailedError as error:
            if error.status is None or error.status < 500:
                raise
            # The reason is told to the service's owner alone, in its log.
            raise ServiceFailedError(f"{error} (`paceline service logs {self.name}`)", error.status) from None

    def get_logs(self, num_lines: int = 5000) -> str:
        """The last lines that its supervisor said and its servers printed.

        Args:
            num_lines: Most lines to return.
        """
        return log.last_lines(self._folder, num_lines)

    def get_keys(self) -> tuple[str, str]:
        """(primary, secondary): a request brings either as `Authorization: Bearer KEY`.

        Raises:
            ServiceError: it asks for none, or they are not yours to read.
        """
        return keys.read(self._folder)

    def regen_key(self, key: Literal["primary", "secondary"], set_key: str | None = None) -> str:
        """Replace a key, "primary" or "secondary", by a new one, or by this one; the key. The other one goes on being good.

        Raises:
            ServiceError: there is no such key, or set_key is too short.
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
        """Serve something else from now on, without a lost request; what is not named stays as it is.

        The source is copied anew if its script or folder is named. wait: until it is being served.

        Args:
            models: As for `deploy`; None: those that are served.
            entry_script: As for `deploy`.
            source_directory: As for `deploy`.
            environment: As for `deploy`.
            environment_variables: As for `deploy`.
            workers: Number of model processes.
            settings: As for `deploy`.

        Raises:
            UserError: a wrong value; nothing has changed.
            ServiceFailedError: it can't be served; the message says why, and the revision before goes on.
        """
        present = self._present()
        changes: dict[str, Any] = {}
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
        """Serve the same models by the script and the files beside it as they are now.

        Args:
            wait: Return only once it is being served.

        Raises:
            ServiceError: the folder that they came from is gone.
            ServiceFailedError: they can't be served; what was served goes on.
        """
        present = self._present()
        spec = revise.spec_of(self._folder, present)
        if spec.source_directory is not None:
            revision_spec.script_of(spec.entry_script, spec.source_directory)  # while the caller is here to be told
        deploy.update(self._folder, spec, why="reload")
        return self.wait_for_deployment() if wait else self.record()

    def scale(self, workers: int, wait: bool = True) -> ServiceRecord:
        """Serve by so many model processes.

        Args:
            workers: Number of model processes.
            wait: Return only once they are there.
        """
        revision_spec.check_workers(workers)
        deploy.request(self._folder, workers=workers, why=f"{workers} workers")
        return self.wait_for_deployment() if wait else self.record()

    def rollback(self, revision: int | None = None, wait: bool = True) -> ServiceRecord:
        """Serve a revision of before; by default the last one before the present that has been served.

        Args:
            wait: Return only once it is being served.

        Raises:
            ServiceError: there is none.
        """
        deploy.rollback(self._folder, revision)
        return self.wait_for_deployment() if wait else self.record()

    def stop(self, wait: bool = True) -> None:
        """End it, once the requests that it has are answered. Its port is free then; `start` takes the same again.

        Args:
            wait: Return only once it has ended.
        """
        if wait:
            deploy.end(self._folder, DOWN)
        else:
            deploy.request(self._folder, state=DOWN)

    def start(self, wait: bool = True) -> ServiceRecord:
        """Start it again, after it was stopped or has failed.

        Args:
            wait: Return only once it is being served.
        """
        deploy.request(self._folder, state=UP)
        return self.wait_for_deployment() if wait else self.record()

    def delete(self, wait: bool = True) -> None:
        """End it, and remove all of it. One that is gone already is no error.

        Args:
            wait: Return only once it is gone.
        """
        with contextlib.suppress(ServiceNotFoundError, FileNotFoundError):
            if wait:
                deploy.end(self._folder, GONE)
            else:
                deploy.request(self._folder, state=GONE)

    def _present(self) -> Revision:
        """The revision that is served; before any was, the one that is wanted."""
        found = store.stored(self._folder)
        return store.revision(self._folder, found.revision or store.desired(self._folder).revision)


def _path(workspace: Workspace) -> Path:
    path = getattr(workspace, "path", None)
    if not isinstance(path, Path):
        raise ServiceError(f"{workspace!r} is not a workspace. Give Workspace.from_config(), or Workspace(folder).")
    return path


def _why(changes: Mapping[str, Any], settings: Mapping[str, Any], workers: int | None) -> str:
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
