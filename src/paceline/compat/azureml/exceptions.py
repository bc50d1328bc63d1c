"""The SDK's exceptions (`azureml.exceptions`), and how Paceline's own arrive as these.

https://learn.microsoft.com/python/api/azureml-core/azureml.exceptions
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from paceline import errors

__all__ = [
    "ActivityCanceledException",
    "ActivityFailedException",
    "AuthenticationException",
    "AzureMLException",
    "ComputeTargetException",
    "DiscoveryUrlNotFoundException",
    "ExperimentExecutionException",
    "ExperimentNotFoundException",
    "HyperDriveConfigException",
    "HyperDriveRuntimeException",
    "ImageException",
    "LocalWebserviceException",
    "ModelNotFoundException",
    "ModelPathNotFoundException",
    "ProjectSystemException",
    "RunConfigurationException",
    "RunEnvironmentException",
    "ScenarioNotSupportedException",
    "ServiceException",
    "SnapshotException",
    "TrainingException",
    "UserErrorException",
    "WebserviceException",
    "WorkspaceException",
]

Kind = TypeVar("Kind", bound=type)


class AzureMLException(errors.PacelineError):
    """The root of the SDK's exceptions. `message`: its text."""

    def __init__(self, exception_message: object = "", **others: Any) -> None:
        super().__init__(str(exception_message))
        self.inner_exception: BaseException | None = others.get("inner_exception")

    @property
    def message(self) -> str:
        return str(self)


class UserErrorException(AzureMLException):
    """A value that the caller gave is wrong."""


class AuthenticationException(UserErrorException):
    """Never raised: nobody logs in."""


class ActivityFailedException(AzureMLException):
    """The run has failed. `message`: JSON of `error`, as in the run's details."""


class ActivityCanceledException(AzureMLException):
    """What was waited for was canceled."""


class ComputeTargetException(AzureMLException):
    """A compute target is unknown, or can't be what is asked of it."""


class DiscoveryUrlNotFoundException(AzureMLException):
    """Never raised: there is no service to discover."""


class ExperimentExecutionException(AzureMLException):
    """A run could not be started, or the waiting for it was broken off."""


class ExperimentNotFoundException(AzureMLException):
    """There is no such experiment, or no such run in it."""


class ScenarioNotSupportedException(AzureMLException):
    """What is asked for has no place here."""


class ImageException(AzureMLException):
    """An image could not be made."""


class ModelNotFoundException(AzureMLException):
    """There is no such model."""


class ModelPathNotFoundException(AzureMLException):
    """A model is to be registered of files that are not there."""


class ProjectSystemException(AzureMLException):
    """A folder of a project can't be used."""


class RunConfigurationException(AzureMLException):
    """A run's configuration is wrong."""


class RunEnvironmentException(AzureMLException):
    """This process belongs to no run, and `allow_offline=False` was said."""


class ServiceException(AzureMLException):
    """An engine did not answer: a scheduler, a host, a store."""

    status_code = 503


class SnapshotException(AzureMLException):
    """The source directory can't be copied as it is."""


class TrainingException(AzureMLException):
    """What an estimator was given can't be run."""


class WebserviceException(AzureMLException):
    """A model or a web service can't be what is asked of it. status_code: of the answer that a service gave, or None."""

    def __init__(self, exception_message: object = "", status_code: int | None = None, **others: Any) -> None:
        super().__init__(exception_message, **others)
        self.status_code = status_code


class LocalWebserviceException(WebserviceException):
    """The same, of a web service on this machine."""


class WorkspaceException(AzureMLException):
    """There is no such workspace, or it can't be made."""


class HyperDriveConfigException(AzureMLException):
    """The configuration of a sweep is wrong."""


class HyperDriveRuntimeException(AzureMLException):
    """A sweep can't be asked for this."""


#: The nearest class above an error's own decides.
_OF: dict[type[errors.PacelineError], type[AzureMLException]] = {
    errors.UserError: UserErrorException,
    errors.TargetError: ComputeTargetException,
    errors.SnapshotError: SnapshotException,
    errors.WorkspaceError: WorkspaceException,
    errors.SweepError: HyperDriveConfigException,
    errors.ModelError: WebserviceException,
    errors.EngineError: ServiceException,
    errors.RunNotFoundError: ExperimentNotFoundException,
    errors.RunFailedError: ActivityFailedException,
    errors.RunContextError: RunEnvironmentException,
    errors.PacelineError: AzureMLException,
}


def as_sdk(error: errors.PacelineError) -> AzureMLException:
    """The SDK's exception for one of Paceline's, with its sentence."""
    if isinstance(error, AzureMLException):
        return error
    kind = next(_OF[above] for above in type(error).__mro__ if above in _OF)
    return kind(str(error), inner_exception=error)


def sdk_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose errors of Paceline's arrive as the SDK's."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except AzureMLException:
            raise
        except errors.PacelineError as error:
            raise as_sdk(error) from error

    return call


def sdk_class(kind: Kind) -> Kind:
    """The class, whose own public calls raise the SDK's exceptions. For those that it inherits, name them in the class."""
    for name, value in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, (staticmethod, classmethod)):
            setattr(kind, name, type(value)(sdk_errors(value.__func__)))
        elif callable(value) and not isinstance(value, type):
            setattr(kind, name, sdk_errors(value))
        elif isinstance(value, property) and value.fget is not None:
            setattr(kind, name, property(sdk_errors(value.fget), value.fset, value.fdel, value.__doc__))
    return kind
