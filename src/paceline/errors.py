"""Exceptions of Paceline, by the part that failed.

Programs use them as `paceline.errors.JobError`. If another module defines a class, that module's name follows the
class, and this module does not import the class. `paceline.parallel` and `paceline.collectives` export their errors
themselves. A test compares the tree with the classes in all source files.

    PacelineError
    ├── UserError (also ValueError)       the caller can correct it; refused before anything starts. Exit code 2
    │   ├── JobError                      a value of an estimator or a job
    │   ├── WorkspaceError                the workspace's folder or its configuration
    │   ├── SnapshotError                 the source directory can't be copied
    │   ├── TargetError                   an unknown compute target, or one that can't hold the job
    │   │   ├── SettingError              targets.status: a setting names something that the engine lacks
    │   │   └── ApiRefusedError           targets.kubernetes.api: the cluster's API refused a request
    │   ├── LauncherError                 the job's launcher is not installed or not supported
    │   ├── EnvironmentSpecError          the specification of an environment
    │   ├── DataError                     a datastore, a reference to data, a dataset or a credential's place
    │   ├── SweepError                    a space, a sampler, a policy or another part of a sweep
    │   ├── PipelineError                 a step, data, a parameter or the graph of a pipeline
    │   ├── ScheduleError                 a time, an event or another part of a schedule, or its timer
    │   ├── ModelError                    a model's name, version, alias or files
    │   │   └── ModelNotFoundError (also LookupError)   no such model, version or alias
    │   ├── ServingError                  a served model, or a scoring script
    │   ├── ServiceError                  a setting of a service, or a request to change the service
    │   ├── MetricError                   a value that can't be logged
    │   ├── QueryError                    a query of runs, with the position
    │   ├── FileNameError                 a run id or a file name that leaves the run's folder
    │   ├── ArgumentError                 collectives.errors: an operation that is wrong on any rank
    │   └── ParallelError                 parallel.errors: a model, a strategy, a batch or a loss
    │       └── NotPlainError             parallel.exchange: a value that can't be sent to another rank
    ├── EngineError (also ConnectionError)   a scheduler, host, link, store or container engine did not answer. Exit code 69
    │   ├── LinkError                     remote.link.messages: a node's agent
    │   ├── AwayError                     targets.slurm.scheduler: Slurm, or its login host
    │   ├── UnreachableError              targets.ray.client: a Ray cluster
    │   ├── LostError                     targets.ray.placement_group: a node was lost before the run held all nodes
    │   └── StoreUnreachableError (also TransferError)   data.stores.failures: a datastore, or what a URL names
    ├── RunNotFoundError (also LookupError)   no such run, or no such file in it
    ├── ModelChangedError (also RuntimeError)   a model's files are not those that were registered
    ├── ServiceNotFoundError (also LookupError)   no such service
    ├── ServiceFailedError (also RuntimeError)    a service can't be started, or answered with an error
    ├── EnvironmentBuildError (also RuntimeError)   an environment could not be built; the message has the resolver's reason
    ├── TransferError (also RuntimeError)     a transfer of data failed
    ├── RunStateError (also RuntimeError)     the run's state does not allow the operation
    ├── RunContextError (also RuntimeError)   a worker lacks variables of its launcher
    ├── RunFailedError (also RuntimeError)    the run has failed; `.report` says which rank, and why
    ├── CheckpointError (also RuntimeError)   a checkpoint could not be written or read
    ├── EventsError   testing.sim.events: the events of a simulated worker
    ├── CollectivesError (also RuntimeError)   collectives.errors: an operation can't be done
    │   ├── MismatchError                 collectives.errors: the ranks asked for different things
    │   └── ShutDownError                 collectives.errors: a rank has died, or has shut its engine down
    │       └── LostRankError             collectives.errors: that rank's process is gone
    ├── WorkerError (also RuntimeError)       parallel.errors: another rank failed first
    ├── RegroupError (also RuntimeError)      parallel.regroup: after a loss, the ranks can't train together again
    ├── TorchError (also ImportError)         torch_private: the installed torch lacks a private function or class
    ├── HorovodInternalError (also RuntimeError)   compat.horovod.common.exceptions: a collective failed
    │   ├── HorovodPreconditionError      compat.horovod.tensorflow.launch: a collective failed, by TensorFlow's name
    │   └── HorovodUnknownError           compat.horovod.tensorflow.launch: a collective failed, by TensorFlow's name
    ├── HostsUpdatedInterrupt (also RuntimeError)   compat.horovod.common.exceptions: the hosts have changed
    ├── AzureMLException   compat.azureml.exceptions: base class of the Azure SDK's exceptions
    │   ├── UserErrorException  compat.azureml.exceptions: a value that the caller gave is wrong
    │   │   └── AuthenticationException  compat.azureml.exceptions: never raised: there is no login
    │   ├── ActivityFailedException  compat.azureml.exceptions: the run has failed
    │   ├── ActivityCanceledException  compat.azureml.exceptions: the awaited run was canceled
    │   ├── ComputeTargetException  compat.azureml.exceptions: a compute target is unknown, or can't hold the job
    │   ├── DiscoveryUrlNotFoundException  compat.azureml.exceptions: never raised: there is no service to discover
    │   ├── ExperimentExecutionException  compat.azureml.exceptions: a run could not start, or a wait for it ended early
    │   ├── ExperimentNotFoundException  compat.azureml.exceptions: there is no such experiment, or no such run in it
    │   ├── ScenarioNotSupportedException  compat.azureml.exceptions: the request has no counterpart here
    │   ├── ImageException  compat.azureml.exceptions: an image could not be made
    │   ├── ModelNotFoundException  compat.azureml.exceptions: there is no such model
    │   ├── ModelPathNotFoundException  compat.azureml.exceptions: files to register as a model are missing
    │   ├── ProjectSystemException  compat.azureml.exceptions: a folder of a project can't be used
    │   ├── RunConfigurationException  compat.azureml.exceptions: a run's configuration is wrong
    │   ├── RunEnvironmentException  compat.azureml.exceptions: this process belongs to no run, with `allow_offline=False`
    │   ├── ServiceException  compat.azureml.exceptions: an engine did not answer: a scheduler, a host, a store
    │   ├── SnapshotException  compat.azureml.exceptions: the source directory can't be copied
    │   ├── TrainingException  compat.azureml.exceptions: an estimator's job can't run
    │   ├── WebserviceException  compat.azureml.exceptions: a wrong request to a model or a web service
    │   │   └── LocalWebserviceException  compat.azureml.exceptions: a wrong request to a web service on this machine
    │   ├── WorkspaceException  compat.azureml.exceptions: there is no such workspace, or it can't be made
    │   ├── HyperDriveConfigException  compat.azureml.exceptions: the configuration of a sweep is wrong
    │   └── HyperDriveRuntimeException  compat.azureml.exceptions: a sweep does not support the operation
    └── HorovodVersionMismatchError (also ImportError)   compat.horovod.common.exceptions: never raised

A message names the value seen, the rule, and the next step; the message of an `EngineError` has the engine and the request.
"""

from __future__ import annotations

# Define the name here, because importing typing is slow. Type checkers recognize it.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.runs.failure import FailureReport


class PacelineError(Exception):
    """The root of all of Paceline's exceptions."""


# The class is also a ValueError, so that `except ValueError` works without knowledge of Paceline.
class UserError(PacelineError, ValueError):
    """An error in the caller's values; nothing has been started."""


class JobError(UserError):
    """A wrong value of an estimator or of a job."""


class WorkspaceError(UserError):
    """An unusable folder or configuration of a workspace."""


class SnapshotError(UserError):
    """A source directory that can't be copied."""


class TargetError(UserError):
    """An unknown compute target, or a compute target that can't hold the job."""


class LauncherError(UserError):
    """A launcher that is not installed or not supported."""


class EnvironmentSpecError(UserError):
    """A wrong or unreadable specification of an environment."""


class DataError(UserError):
    """A wrong or unknown datastore, data reference, dataset or source of a credential."""


class SweepError(UserError):
    """A wrong search space, sampler, policy or other part of a sweep."""


class PipelineError(UserError):
    """A wrong step, input, parameter or graph of a pipeline."""


class ModelError(UserError):
    """A wrong name, version, alias or file of a model."""


class ModelNotFoundError(ModelError, LookupError):
    """An unknown model, version or alias."""


class ServingError(UserError):
    """A wrong model, setting or scoring script of a server."""


class ScheduleError(UserError):
    """A wrong value of a schedule, or a machine without a timer."""


class ServiceError(UserError):
    """A wrong setting of a service, or a request that the service can't fulfil."""


class MetricError(UserError):
    """A value that can't be logged as this kind of metric."""


class QueryError(UserError):
    """A query of runs that can't be understood.

    `problem` is the error. `at` is its position in the query from 0. `expected` is a correct text for this position.
    """

    def __init__(self, problem: str, at: int, expected: str) -> None:
        super().__init__(problem, at, expected)
        self.problem = problem if problem.endswith((".", "?")) else f"{problem}."
        self.at, self.expected = at, expected

    def __str__(self) -> str:
        return f"At character {self.at + 1} of the query: {self.problem} Expected: {self.expected}."

    def pointed(self, query: str) -> str:
        """Return the message, and the query with a caret under the wrong place."""
        begin = max(0, self.at - 60)
        shown = "".join(one if one.isprintable() else " " for one in query[begin : begin + 100])
        return f"{self}\n  {shown}\n  {' ' * (self.at - begin)}^"


class FileNameError(UserError):
    """A run id or file name that would leave its folder."""


# ConnectionError is an OSError, so a handler for this class must come before one for OSError, which would report trouble
# with this machine's files.
class EngineError(PacelineError, ConnectionError):
    """A scheduler, host, link, store or container engine that did not answer.

    The user's values were right, so a retry may succeed. The message has the request, and the answer if there was one.
    """


class RunNotFoundError(PacelineError, LookupError):
    """An unknown run, or an unknown file of a run."""


class ModelChangedError(PacelineError, RuntimeError):
    """Changed files of a registered model version; the message names the files."""


class ServiceNotFoundError(PacelineError, LookupError):
    """An unknown service."""


class ServiceFailedError(PacelineError, RuntimeError):
    """A service that failed to start, or that answered with an error.

    Attributes:
        status: HTTP status of the answer, or None without an answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EnvironmentBuildError(PacelineError, RuntimeError):
    """A failed build of an environment; the message has the reason."""


class TransferError(PacelineError, RuntimeError):
    """A failed transfer of data; the message names the store and the file."""


class RunStateError(PacelineError, RuntimeError):
    """A run in the wrong state for this call."""


class RunContextError(PacelineError, RuntimeError):
    """A worker's environment without variables that its launcher should have set."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint that could not be read or written; earlier checkpoints are unchanged."""


class RunFailedError(PacelineError, RuntimeError):
    """A run that ended as Failed.

    Attributes:
        report: The failure report, or None if there is no report.
    """

    def __init__(self, message: str, report: FailureReport | None = None) -> None:
        super().__init__(message)
        self.report = report
