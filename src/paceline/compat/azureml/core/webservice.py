"""Web services (`azureml.core.webservice`) on Paceline's services.

https://learn.microsoft.com/python/api/azureml-core/azureml.core.webservice
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar, cast

from paceline.compat.azureml.exceptions import WebserviceException
from paceline.compat.azureml.packages import spec_of
from paceline.compat.azureml.policy import SubmissionNotes
from paceline.compat.azureml.strict import Strict
from paceline.environments import without_sdk_packages
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline import Service, Workspace
    from paceline.compat.azureml.core.image import Image, ImageConfiguration
    from paceline.compat.azureml.core.model import InferenceConfig

__all__ = ["AciWebservice", "AksEndpoint", "AksWebservice", "LocalWebservice", "Webservice", "WebserviceException"]

#: With `__path__`, this module counts as a package: in the SDK it is divided into modules.
__path__: list[str] = []


T = TypeVar("T")

_NO_ENDPOINT = (
    "AksEndpoint divides requests among versions, which is not available here. Deploy an "
    "AksWebservice for each version. To undo an update: paceline service rollback NAME."
)


class DeploymentConfiguration(Strict):
    """Settings of a service, from `deploy_configuration`. `kind` names the service's class."""

    def __init__(self, kind: str, **values: Any) -> None:
        self.kind = kind
        self.port: int | None = values.pop("port", None)
        self.auth_enabled: bool | None = values.pop("auth_enabled", None)
        self.tags: dict[str, str] | None = values.pop("tags", None)
        self.description: str | None = values.pop("description", None)
        self.values = values


class Webservice:
    """A deployed service, found by name. Its class depends on its deployment configuration.

    Raises:
        WebserviceException: The service does not exist. The message contains WebserviceNotFound.
    """

    _kind: ClassVar[str] = "ACI"

    def __new__(cls, workspace: Workspace, name: str, *others: object, **named: object) -> Webservice:
        from paceline import Service

        try:
            service = Service(workspace, name)
            record = service.record()
        except PacelineError as error:
            raise WebserviceException(f"WebserviceNotFound: {error}", status_code=404) from error
        kind = record.tags.get("azureml.kind", "ACI")
        made = object.__new__(_CLASSES.get(kind, AciWebservice) if cls is Webservice else cls)
        made._workspace, made._service = workspace, service
        return made

    _workspace: Workspace
    _service: Service

    # --- deployment of models as a service

    @staticmethod
    def deploy_from_model(
        workspace: Workspace,
        name: str,
        models: Sequence[object],
        image_config: ImageConfiguration,
        deployment_config: object = None,
        deployment_target: object = None,
        overwrite: bool = False,
    ) -> Webservice:
        """Deploy models with a ContainerImage's configuration (SDK of 2018). Return the service."""
        return deploy(workspace, name, models, image_config.inference_config(), deployment_config, overwrite=overwrite)

    @staticmethod
    def deploy_from_image(
        workspace: Workspace,
        name: str,
        image: Image,
        deployment_config: object = None,
        deployment_target: object = None,
        overwrite: bool = False,
    ) -> Webservice:
        """Deploy an image's models (SDK of 2018). Return the service."""
        config = image.image_config.inference_config()
        return deploy(workspace, name, image.models, config, deployment_config, overwrite=overwrite)

    @staticmethod
    def deploy(
        workspace: Workspace,
        name: str,
        model_paths: Sequence[str],
        image_config: ImageConfiguration,
        deployment_config: object = None,
        deployment_target: object = None,
        overwrite: bool = False,
    ) -> Webservice:
        """Register files as models, and return a new service of these models."""
        from paceline.compat.azureml.core.model import Model

        models = [Model.register(workspace, path, os.path.basename(path.rstrip("/"))) for path in model_paths]
        return Webservice.deploy_from_model(
            workspace, name, models, image_config, deployment_config, overwrite=overwrite
        )

    @staticmethod
    def list(workspace: Workspace, compute_type: str | None = None, **others: object) -> Sequence[Webservice]:
        from paceline import Service

        found = [Webservice(workspace, name) for name in Service.list(workspace)]
        return [service for service in found if compute_type in (None, service.compute_type)]

    # --- properties of a service

    @property
    def name(self) -> str:
        return str(self._service.name)

    @property
    def workspace(self) -> Workspace:
        return self._workspace

    @property
    def compute_type(self) -> str:
        return self._kind

    @property
    def state(self) -> str:
        """The state: "Transitioning", "Healthy", "Unhealthy" or "Failed"."""
        found = str(self._service.state)
        return {"Stopped": "Unhealthy", "NotResponding": "Unhealthy"}.get(found, found)

    @property
    def error(self) -> str | None:
        return self._service.error

    @property
    def scoring_uri(self) -> str | None:
        return self._service.scoring_uri

    @property
    def swagger_uri(self) -> str | None:
        return self._service.swagger_uri

    @property
    def auth_enabled(self) -> bool:
        return bool(self._service.record().has_keys)

    @property
    def tags(self) -> dict[str, str]:
        return {key: value for key, value in self._service.tags.items() if key != "azureml.kind"}

    def wait_for_deployment(self, show_output: bool = False, timeout_sec: float | None = None) -> None:
        """Block until the service answers.

        Raises:
            WebserviceException: The deployment failed. The message has the reason and the end of the log.
        """
        self._asked(lambda: self._service.wait_for_deployment(show_output, timeout_sec))
        if show_output:
            print(f'Succeeded\n{self.compute_type} service creation operation finished, operation "Succeeded"')

    def run(self, input_data: object) -> Any:
        """Send a request and return the script's answer.

        Raises:
            WebserviceException: The service answered with an error, or not at all.
        """
        return self._asked(lambda: self._service.run(input_data))

    def get_logs(self, num_lines: int = 5000, **others: object) -> str:
        return str(self._service.get_logs(num_lines))

    def get_keys(self) -> tuple[str, str]:
        return self._asked(self._service.get_keys)

    def regen_key(self, key: str, set_key: str | None = None) -> None:
        """Replace the "Primary" or the "Secondary" key."""
        which = cast("Literal['primary', 'secondary']", str(key).lower())
        self._asked(lambda: self._service.regen_key(which, set_key))

    def get_token(self) -> NoReturn:
        """Raise WebserviceException: services have keys and no tokens."""
        raise WebserviceException("there are no tokens. Use get_keys().")

    def update(self, *arguments: object, **named: Any) -> None:
        """Change the served models or script.

        The arguments are `models` and `inference_config`, or `image`. All other arguments are ignored, with a note.
        """
        notes = SubmissionNotes()
        if (image := named.get("image")) is not None:
            named = {"models": image.models, "inference_config": image.image_config.inference_config(), **named}
        known = ("models", "inference_config", "image", "enable_app_insights", "collect_model_data")
        if ignored := [name for name, value in named.items() if name not in known and value is not None]:
            notes.add(
                f"The service's {', '.join(ignored)} can't be changed while it is served: deploy it with overwrite=True."
            )
        given = script_of(named.get("inference_config"), notes)
        if named.get("models"):
            given["models"] = ids_of(named["models"])
        notes.show()
        if given:
            self._asked(lambda: self._service.update(**given))

    def delete(self) -> None:
        self._asked(self._service.delete)

    def serialize(self) -> dict[str, object]:
        return {
            "name": self.name,
            "computeType": self.compute_type,
            "state": self.state,
            "scoringUri": self.scoring_uri,
            "authEnabled": self.auth_enabled,
            "tags": self.tags,
        }

    def update_deployment_state(self) -> None:
        """Do nothing: every read of a service fetches its current state."""

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except PacelineError as error:
            raise WebserviceException(str(error), status_code=getattr(error, "status", None)) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workspace={self._workspace!r}, name={self.name}, state={self.state})"


class AciWebservice(Webservice):
    """A service on this machine with the interface of Azure Container Instances."""

    _kind = "ACI"

    @staticmethod
    def deploy_configuration(
        cpu_cores: float | None = None,
        memory_gb: float | None = None,
        tags: dict[str, str] | None = None,
        properties: dict[str, str] | None = None,
        description: str | None = None,
        location: str | None = None,
        auth_enabled: bool | None = None,
        ssl_enabled: bool | None = None,
        enable_app_insights: bool | None = None,
        **others: object,
    ) -> DeploymentConfiguration:
        """Return settings for `Model.deploy`.

        cpu_cores, memory_gb, location and similar settings are recorded without effect.
        """
        return DeploymentConfiguration(
            "ACI",
            auth_enabled=auth_enabled,
            tags=tags,
            description=description,
            cpu_cores=cpu_cores,
            memory_gb=memory_gb,
        )


class AksWebservice(Webservice):
    """A service on this machine with AKS's interface, and with keys unless auth_enabled=False."""

    _kind = "AKS"

    @staticmethod
    def deploy_configuration(
        *settings: object,
        auth_enabled: bool | None = None,
        num_replicas: int | None = None,
        tags: dict[str, str] | None = None,
        description: str | None = None,
        **others: object,
    ) -> DeploymentConfiguration:
        """Return settings for `Model.deploy`. `num_replicas` is the number of model processes."""
        enabled = True if auth_enabled is None else auth_enabled
        return DeploymentConfiguration(
            "AKS", auth_enabled=enabled, tags=tags, description=description, workers=num_replicas
        )


class AksEndpoint(AksWebservice):
    """An endpoint that splits requests among versions. Not supported.

    Raises:
        WebserviceException: Always. Update a service or roll it back instead.
    """

    refused: ClassVar[str] = _NO_ENDPOINT

    def __new__(cls, *arguments: object, **named: object) -> AksEndpoint:
        raise WebserviceException(_NO_ENDPOINT)

    @staticmethod
    def deploy_configuration(*arguments: object, **named: object) -> DeploymentConfiguration:
        """Raise WebserviceException: endpoints that split requests are not supported."""
        raise WebserviceException(_NO_ENDPOINT)


class LocalWebservice(Webservice):
    """A service on a port of this machine."""

    _kind = "Local"
    STATE_DEPLOYING, STATE_RUNNING, STATE_FAILED = "deploying", "running", "failed"
    STATE_DELETED, STATE_UNKNOWN = "deleted", "unknown"

    @staticmethod
    def deploy_configuration(port: int | None = None) -> DeploymentConfiguration:
        """Return settings for `Model.deploy`. The default port is any free port."""
        return DeploymentConfiguration("Local", port=port)

    @property
    def state(self) -> str:
        """The state: "deploying", "running", "failed", "deleted" or "unknown"."""
        try:
            found = str(self._service.state)
        except PacelineError:
            return "deleted"
        return {"Transitioning": "deploying", "Healthy": "running", "Failed": "failed"}.get(found, "unknown")

    @property
    def port(self) -> int | None:
        uri = self.scoring_uri
        return int(uri.split(":")[2].split("/")[0]) if uri else None

    def wait_for_deployment(self, show_output: bool = False, timeout_sec: float | None = None) -> None:
        """Block until the service answers, then print its address."""
        super().wait_for_deployment(False, timeout_sec)
        print(f"Local webservice is running at http://localhost:{self.port}")

    def reload(self, wait: bool = False) -> None:
        """Restart the service with the current entry script and files."""
        self._asked(self._service.reload)
        if wait:
            self.wait_for_deployment()

    def get_keys(self) -> NoReturn:
        """Raise NotImplementedError, as the SDK does: local services have no keys."""
        raise NotImplementedError("a local web service has no keys")

    def get_token(self) -> NoReturn:
        """Raise NotImplementedError, as the SDK does: local services have no tokens."""
        raise NotImplementedError("a local web service has no tokens")


_CLASSES: dict[str, type[Webservice]] = {"ACI": AciWebservice, "AKS": AksWebservice, "Local": LocalWebservice}


def deploy(
    workspace: Workspace,
    name: str,
    models: Sequence[object],
    inference_config: InferenceConfig | None,
    deployment_config: object,
    *,
    overwrite: bool,
) -> Webservice:
    """Deploy models with a script and configuration. Return the service."""
    from paceline import Service

    notes = SubmissionNotes()
    config = deployment_config or AciWebservice.deploy_configuration()
    if not isinstance(config, DeploymentConfiguration):
        raise WebserviceException(
            f"deployment_config={config!r} must be a deployment configuration, such as LocalWebservice.deploy_configuration()."
        )
    given = script_of(inference_config, notes)
    if config.values.get("workers"):
        given["workers"] = int(config.values["workers"])
    try:
        Service.deploy(
            workspace,
            name,
            ids_of(models or ()),
            port=config.port,
            auth=bool(config.auth_enabled),
            overwrite=overwrite,
            tags={**(config.tags or {}), "azureml.kind": config.kind},
            description=config.description or "",
            **given,
        )
    except PacelineError as error:
        raise WebserviceException(str(error)) from error
    notes.show()
    return Webservice(workspace, name)


def ids_of(models: Iterable[object]) -> list[str]:
    """Return the ids of models. Paths are returned unchanged."""
    return [str(getattr(one, "id", one)) for one in models]


def script_of(config: InferenceConfig | None, notes: SubmissionNotes) -> dict[str, Any]:
    """Return an InferenceConfig as keyword arguments of `Service.deploy`; {} for None."""
    if config is None:
        return {}
    found: dict[str, object] = {"entry_script": config.entry_script}
    variables: dict[str, str] = {}
    if config.source_directory:
        found["source_directory"] = config.source_directory
        # With this variable, the server runs the script in the source folder's parent, so that `./<source folder>/file` works.
        variables["AZUREML_SOURCE_DIRECTORY"] = os.path.basename(os.path.realpath(config.source_directory))
    if config.environment is not None:
        spec, _ = without_sdk_packages(spec_of(config.environment, notes))
        if spec.needs_build or spec.python:
            found["environment"] = spec
        variables |= spec.environment_variables
    if variables:
        found["environment_variables"] = variables
    return found
