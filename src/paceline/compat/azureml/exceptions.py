"""The SDK's exceptions (`azureml.exceptions`), and how they replace Paceline's exceptions.

https://learn.microsoft.com/python/api/azureml-core/azureml.exceptions
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NoReturn, TypeVar, cast

from paceline import errors

__all__ = [
    "ActivityCanceledException", "ActivityFailedException", "AuthenticationException", "AzureMLException",
    "ComputeTargetException", "DatasetExecutionError", "DatasetValidationError", "DiscoveryUrlNotFoundException",
    "ExperimentExecutionException", "ExperimentNotFoundException", "HyperDriveConfigException",
    "HyperDriveRuntimeException", "ImageException", "LocalWebserviceException", "ModelNotFoundException",
    "ModelPathNotFoundException", "ProjectSystemException", "RunConfigurationException", "RunEnvironmentException",
    "ScenarioNotSupportedException", "ServiceException", "SnapshotException", "TrainingException",
    "UserErrorException", "WebserviceException", "WorkspaceException",
]  # fmt: skip

# With `__path__`, this module counts as a package: the SDK defines the classes in `azureml.exceptions._azureml_exception`.
__path__: list[str] = []

Kind = TypeVar("Kind", bound=type)
Wrapped = TypeVar("Wrapped", bound=Callable[..., object])
#: Value of inspect.CO_GENERATOR. Importing inspect would take more time than all other imports of this module together.
_IS_GENERATOR = 0x20


class AzureMLException(errors.PacelineError):
    """The root of the SDK's exceptions; `message` is its text."""

    def __init__(
        self, exception_message: object = "", inner_exception: BaseException | None = None, **others: object
    ) -> None:
        # Don't use super(): in the order of base classes, the next class may be Paceline's, whose __init__ takes other arguments.
        Exception.__init__(self, str(exception_message))
        self.inner_exception = inner_exception

    @property
    def message(self) -> str:
        return str(self)


class UserErrorException(AzureMLException):
    """An invalid value from the caller."""


class AuthenticationException(UserErrorException):
    """A failed login. Never raised: Paceline has no logins."""


class ActivityFailedException(AzureMLException):
    """A failed run. `message` is the `error` of the run's details, as JSON."""


class ActivityCanceledException(AzureMLException):
    """A canceled run or operation."""


class ComputeTargetException(AzureMLException):
    """An unknown compute target, or a request that a target can't fulfil."""


class DiscoveryUrlNotFoundException(AzureMLException):
    """A failed service discovery. Never raised: there is no such service."""


class ExperimentExecutionException(AzureMLException):
    """A run that could not start, or an interrupted wait for a run."""


class ExperimentNotFoundException(AzureMLException):
    """A missing experiment, or a run that the experiment lacks."""


class ScenarioNotSupportedException(AzureMLException):
    """A feature of Azure that Paceline does not offer."""


class ImageException(AzureMLException):
    """An image that could not be built."""


class ModelNotFoundException(AzureMLException):
    """A missing model."""


class ModelPathNotFoundException(AzureMLException):
    """A model registration from missing files."""


class ProjectSystemException(AzureMLException):
    """An unusable project folder."""


class RunConfigurationException(AzureMLException):
    """An invalid run configuration."""


class RunEnvironmentException(AzureMLException):
    """A call of `get_context(allow_offline=False)` outside a run."""


class ServiceException(AzureMLException):
    """A scheduler, host or store that did not answer."""

    status_code = 503


class SnapshotException(AzureMLException):
    """A source directory that could not be copied."""


class TrainingException(AzureMLException):
    """Estimator settings that can't run."""


class WebserviceException(AzureMLException):
    """A failed operation on a model or web service, with `status_code` or None."""

    def __init__(self, exception_message: object = "", status_code: int | None = None, **others: Any) -> None:
        super().__init__(exception_message, **others)
        self.status_code = status_code


class LocalWebserviceException(WebserviceException):
    """A failed operation on a web service of this machine."""


class WorkspaceException(AzureMLException):
    """A workspace that is missing, or can't be created."""


class HyperDriveConfigException(AzureMLException):
    """An invalid sweep configuration."""


class HyperDriveRuntimeException(AzureMLException):
    """An operation that sweeps do not support."""


#: Paceline's class of exceptions -> the SDK's class. A class without an entry uses the entry of its nearest base class.
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
    """Raise the error as an instance of both its class and an SDK class."""
    if isinstance(error, AzureMLException):
        raise error
    above = next(above for above in type(error).__mro__ if above in _OF)
    made = _both((_OF[above], type(error)))(str(error))
    vars(made).update(vars(error))
    made.inner_exception = error
    raise made from error


@functools.cache
def _both(bases: tuple[type[AzureMLException], type[errors.PacelineError]]) -> type[AzureMLException]:
    # Derive from both classes, because programs catch the SDK's exception, and Paceline's own code catches Paceline's.
    return type(bases[0].__name__, bases, {"__module__": bases[0].__module__, "__doc__": bases[0].__doc__})


def sdk_errors(function: Wrapped) -> Wrapped:
    """Wrap a function or generator so that it raises the SDK's exceptions."""
    if function.__code__.co_flags & _IS_GENERATOR:

        @functools.wraps(function)
        def steps(*arguments: object, **named: object) -> Iterator[object]:
            made = cast("Iterator[object]", function(*arguments, **named))
            try:
                yield from made
            except errors.PacelineError as error:
                raise_as_sdk(error)

        return cast(Wrapped, steps)

    @functools.wraps(function)
    def call(*arguments: object, **named: object) -> object:
        try:
            return function(*arguments, **named)
        except errors.PacelineError as error:
            raise_as_sdk(error)

    return cast(Wrapped, call)


def sdk_class(kind: Kind) -> Kind:
    """Make all public methods of a class raise the SDK's exceptions. Return the class."""
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


# The SDK has a separate exception class for each problem of a dataset. Here, a single class serves for all of them.
DatasetValidationError = DatasetExecutionError = UserErrorException
