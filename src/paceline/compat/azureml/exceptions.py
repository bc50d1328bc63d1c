"""The SDK's exceptions (`azureml.exceptions`), and how Paceline's own arrive as these.

https://learn.microsoft.com/python/api/azureml-core/azureml.exceptions
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn, TypeVar

from paceline import errors

__all__ = [
    "ActivityCanceledException",
    "ActivityFailedException",
    "AuthenticationException",
    "AzureMLException",
    "ComputeTargetException",
    "DatasetExecutionError",
    "DatasetValidationError",
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

# A package for the import system: the SDK has the classes in `azureml.exceptions._azureml_exception`.
__path__: list[str] = []

Kind = TypeVar("Kind", bound=type)
#: inspect.CO_GENERATOR; that module takes longer to load than all else here.
_IS_GENERATOR = 0x20


class AzureMLException(errors.PacelineError):
    """The root of the SDK's exceptions. `message`: its text."""

    def __init__(self, exception_message: object = "", **others: Any) -> None:
        # Not super's: beside it may stand one of Paceline's classes, whose own is called otherwise.
        Exception.__init__(self, str(exception_message))
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


def raise_as_sdk(error: errors.PacelineError) -> NoReturn:
    """Raise the SDK's exception for one of Paceline's, with its sentence; of Paceline's own class as well."""
    if isinstance(error, AzureMLException):
        raise error
    above = next(above for above in type(error).__mro__ if above in _OF)
    made = _both((_OF[above], type(error)))(str(error))
    vars(made).update(vars(error))
    made.inner_exception = error
    raise made from error


@functools.cache
def _both(bases: tuple[type[AzureMLException], type[errors.PacelineError]]) -> type[AzureMLException]:
    # Paceline's own code, which calls the methods of these classes as well, catches its own errors.
    return type(bases[0].__name__, bases, {"__module__": bases[0].__module__, "__doc__": bases[0].__doc__})


def sdk_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose errors of Paceline's arrive as the SDK's; those of a generator's steps, too."""
    if function.__code__.co_flags & _IS_GENERATOR:

        @functools.wraps(function)
        def steps(*arguments: Any, **named: Any) -> Any:
            try:
                yield from function(*arguments, **named)
            except errors.PacelineError as error:
                raise_as_sdk(error)

        return steps

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except errors.PacelineError as error:
            raise_as_sdk(error)

    return call


def sdk_class(kind: Kind) -> Kind:
    """The class, whose public calls raise the SDK's exceptions, those too that it inherits from Paceline's own."""
    seen: set[str] = set()
    for above in kind.__mro__[:-1]:
        is_done = above is not kind and "_is_sdk_class" in vars(above)
        for name, value in list(vars(above).items()):
            if name in seen or (name.startswith("_") and name != "__init__"):
                continue
            seen.add(name)
            if is_done:
                continue
            if isinstance(value, (staticmethod, classmethod)):
                setattr(kind, name, type(value)(sdk_errors(value.__func__)))
            elif isinstance(value, FunctionType):
                setattr(kind, name, sdk_errors(value))
            elif isinstance(value, property) and value.fget is not None:
                setattr(kind, name, property(sdk_errors(value.fget), value.fset, value.fdel, value.__doc__))
    kind._is_sdk_class = True  # type: ignore[attr-defined]
    return kind


# A fault of a dataset is one exception here.
DatasetValidationError = DatasetExecutionError = UserErrorException
