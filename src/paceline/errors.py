"""Every exception that Paceline raises, by what failed.

A program names them `paceline.errors.JobError`. Behind each one of another module stands that module, which this one never
imports; `paceline.parallel` and `paceline.collectives` have theirs among their names. A test compares the drawing with the
classes in all source files.

    PacelineError
    ├── UserError (also ValueError)       the caller can mend it; refused before anything starts. Exit code 2
    │   ├── JobError                      a value of an estimator or a job
    │   ├── WorkspaceError                the workspace's folder or its configuration
    │   ├── SnapshotError                 the source directory can't be copied as it is
    │   ├── TargetError                   an unknown compute target, or one that can't hold the job
    │   │   └── SettingError              targets.status: a setting names what the engine has not got
    │   ├── LauncherError                 the launcher that the job asks for is not to be had
    │   ├── EnvironmentSpecError          what an environment is to be made of
    │   ├── DataError                     a datastore, a reference to data, a dataset or a credential's place
    │   ├── SweepError                    a space, a sampler, a policy or another part of a sweep
    │   ├── PipelineError                 a step, data, a parameter or the graph of a pipeline
    │   ├── ModelError                    a model's name, version, alias or files
    │   │   └── ModelNotFoundError (also LookupError)   no such model, version or alias
    │   ├── ServingError                  what a server is to serve, or a scoring script
    │   ├── ServiceError                  what a service is asked to be, or to do
    │   ├── MetricError                   a value that can't be logged
    │   ├── FileNameError                 a run id or a file name that leaves the run's folder
    │   ├── ArgumentError                 collectives.errors: an operation that can't be right on any rank
    │   └── ParallelError                 parallel.errors: a model, a strategy, a batch or a loss
    │       └── NotPlainError             parallel.exchange: a value that can't be sent to another rank
    ├── EngineError (also ConnectionError)   a scheduler, host, link, store or container engine did not answer. Exit code 69
    │   ├── LinkError                     remote.link.messages: a node's agent
    │   ├── AwayError                     targets.slurm.scheduler: Slurm, or its login host
    │   ├── UnreachableError              targets.ray.client: a Ray cluster
    │   ├── LostError                     targets.ray.placement_group: a node, before it was the run's
    │   └── StoreUnreachableError (also TransferError)   data.stores.failures: a datastore, or what a URL names
    ├── RunNotFoundError (also LookupError)   no such run, or no such file in it
    ├── ModelChangedError (also RuntimeError)   a model's files are not those that were registered
    ├── ServiceNotFoundError (also LookupError)   no such service
    ├── ServiceFailedError (also RuntimeError)    a service can't be started, or answered with an error
    ├── EnvironmentBuildError (also RuntimeError)   an environment could not be built; the resolver's own reason
    ├── TransferError (also RuntimeError)     data could not be read from, or written to, where it lies
    ├── RunStateError (also RuntimeError)     the run is not in a state in which this can be done
    ├── RunContextError (also RuntimeError)   a worker's environment lacks what its launcher owes it
    ├── RunFailedError (also RuntimeError)    the run has failed; `.report` says which rank, and why
    ├── CheckpointError (also RuntimeError)   a checkpoint could not be written or read
    ├── CollectivesError (also RuntimeError)   collectives.errors: an operation can't be done
    │   ├── MismatchError                 collectives.errors: the ranks asked for different things
    │   └── ShutDownError                 collectives.errors: a rank has died, or has shut its engine down
    │       └── LostRankError             collectives.errors: that rank's process is gone
    ├── WorkerError (also RuntimeError)       parallel.errors: another rank failed first
    ├── TorchError (also ImportError)         torch_private: this torch lacks what is needed of it
    ├── HorovodInternalError (also RuntimeError)   compat.horovod.common.exceptions: a collective failed
    │   ├── HorovodPreconditionError      compat.horovod.tensorflow.errors: the same, as TensorFlow names it
    │   └── HorovodUnknownError           compat.horovod.tensorflow.errors: the same, as TensorFlow names it
    ├── HostsUpdatedInterrupt (also RuntimeError)   compat.horovod.common.exceptions: the hosts have changed
    ├── AzureMLException   compat.azureml.exceptions: the root of the Azure SDK's own
    │   ├── UserErrorException  compat.azureml.exceptions: a value that the caller gave is wrong
    │   │   └── AuthenticationException  compat.azureml.exceptions: never raised: nobody logs in
    │   ├── ActivityFailedException  compat.azureml.exceptions: the run has failed
    │   ├── ActivityCanceledException  compat.azureml.exceptions: what was waited for was canceled
    │   ├── ComputeTargetException  compat.azureml.exceptions: a compute target is unknown, or can't be what is asked of it
    │   ├── DiscoveryUrlNotFoundException  compat.azureml.exceptions: never raised: there is no service to discover
    │   ├── ExperimentExecutionException  compat.azureml.exceptions: no start, or an end of the waiting
    │   ├── ExperimentNotFoundException  compat.azureml.exceptions: there is no such experiment, or no such run in it
    │   ├── ScenarioNotSupportedException  compat.azureml.exceptions: what is asked for has no place here
    │   ├── ImageException  compat.azureml.exceptions: an image could not be made
    │   ├── ModelNotFoundException  compat.azureml.exceptions: there is no such model
    │   ├── ModelPathNotFoundException  compat.azureml.exceptions: a model is to be registered of files that are not there
    │   ├── ProjectSystemException  compat.azureml.exceptions: a folder of a project can't be used
    │   ├── RunConfigurationException  compat.azureml.exceptions: a run's configuration is wrong
    │   ├── RunEnvironmentException  compat.azureml.exceptions: this process belongs to no run, and `allow_offline=False` was said
    │   ├── ServiceException  compat.azureml.exceptions: an engine did not answer: a scheduler, a host, a store
    │   ├── SnapshotException  compat.azureml.exceptions: the source directory can't be copied as it is
    │   ├── TrainingException  compat.azureml.exceptions: what an estimator was given can't be run
    │   ├── WebserviceException  compat.azureml.exceptions: a model or a web service can't be what is asked of it
    │   │   └── LocalWebserviceException  compat.azureml.exceptions: the same, of a web service on this machine
    │   ├── WorkspaceException  compat.azureml.exceptions: there is no such workspace, or it can't be made
    │   ├── HyperDriveConfigException  compat.azureml.exceptions: the configuration of a sweep is wrong
    │   └── HyperDriveRuntimeException  compat.azureml.exceptions: a sweep can't be asked for this
    └── HorovodVersionMismatchError (also ImportError)   compat.horovod.common.exceptions: never raised

A message names the value seen, the rule, and the next step; that of an `EngineError` says what was asked of whom.
"""

from __future__ import annotations

# Not typing's, as in `paceline`, which loads this module.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.runs.failure import FailureReport


class PacelineError(Exception):
    """The root of everything that Paceline raises."""


# A ValueError as well: a program that guards a call with `except ValueError` need not know of Paceline.
class UserError(PacelineError, ValueError):
    """A value that the caller gave is wrong; nothing has been started."""


class JobError(UserError):
    """A value of an estimator or of a job is wrong."""


class WorkspaceError(UserError):
    """The workspace's folder or configuration can't be used."""


class SnapshotError(UserError):
    """The source directory can't be copied as it is."""


class TargetError(UserError):
    """The compute target is unknown, or can't hold the job."""


class LauncherError(UserError):
    """The launcher that the job needs is not installed, or not of a kind that is supported."""


class EnvironmentSpecError(UserError):
    """What an environment is to be made of is wrong, or can't be read."""


class DataError(UserError):
    """A datastore, a reference to data, a dataset or the place of a credential is wrong or unknown."""


class SweepError(UserError):
    """A space, a sampler, a policy or another part of a sweep is wrong."""


class PipelineError(UserError):
    """A step, its data, a parameter or the graph of a pipeline is wrong."""


class ModelError(UserError):
    """A model's name, version, alias or files are wrong, or can't be registered as they are."""


class ModelNotFoundError(ModelError, LookupError):
    """There is no such model in the workspace, or no such version or alias of it."""


class ServingError(UserError):
    """What a server is to serve, how it is to serve it, or its scoring script is wrong."""


class ServiceError(UserError):
    """What a service is asked to be, or to do, is wrong."""


class MetricError(UserError):
    """The value can't be logged as this kind of metric."""


class FileNameError(UserError):
    """A run id or file name that would leave the folder it belongs to."""


# ConnectionError is an OSError. So where both may come, a handler for this class has to stand before one for OSError, which
# would take an engine's silence for trouble with this machine's files.
class EngineError(PacelineError, ConnectionError):
    """A scheduler, a host, a link, a store or a container engine did not answer.

    Nothing that was given is wrong, so the same may go well later. The message says what was asked of whom, and what was
    heard instead.
    """


class RunNotFoundError(PacelineError, LookupError):
    """There is no such run in the workspace, or no such file in the run."""


class ModelChangedError(PacelineError, RuntimeError):
    """The files of a model's version are not those that were registered; the message names them."""


class ServiceNotFoundError(PacelineError, LookupError):
    """There is no such service in the workspace."""


class ServiceFailedError(PacelineError, RuntimeError):
    """A service could not be started, or has answered a request with an error; the message has its own reason.

    status: of the answer (HTTP), None where there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EnvironmentBuildError(PacelineError, RuntimeError):
    """An environment could not be built; the message has the resolver's or the installer's own reason."""


class TransferError(PacelineError, RuntimeError):
    """Data could not be read from, or written to, the place where it lies; the message names the store and the file."""


class RunStateError(PacelineError, RuntimeError):
    """The run is not in a state in which this can be done."""


class RunContextError(PacelineError, RuntimeError):
    """The process's environment lacks what a worker's launcher should have set."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint could not be written or read; what was there before is there still."""


class RunFailedError(PacelineError, RuntimeError):
    """The run ended as Failed.

    report: the failure report, or None where the run's folder holds none.
    """

    def __init__(self, message: str, report: FailureReport | None = None) -> None:
        super().__init__(message)
        self.report = report
