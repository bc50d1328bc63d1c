"""Names that drivers and scripts import, and their table in the docs."""

from __future__ import annotations

import pytest

from paceline.compat.azureml.aliases import RENAMED
from paceline.compat.azureml.check.findings import missing
from paceline.compat.azureml.check.names import by_module, table
from tests.helpers import run_python

#: Module of the SDK -> names that programs import from it.
IMPORTED = {
    "core": "Workspace Experiment Run ScriptRunConfig Environment Dataset Datastore Model ComputeTarget RunConfiguration "
    "Keyvault Webservice Image ContainerRegistry ScriptRun get_run VERSION __version__",
    "core.workspace": "Workspace",
    "core.experiment": "Experiment",
    "core.run": "Run get_run _OfflineRun ScriptRun _SubmittedRun",
    "core.script_run_config": "ScriptRunConfig ScriptRun",
    "core.environment": "Environment CondaDependencies DockerSection PythonSection DEFAULT_CPU_IMAGE DEFAULT_GPU_IMAGE "
    "DockerBuildContext",
    "core.dataset": "Dataset",
    "core.datastore": "Datastore",
    "core.model": "Model InferenceConfig Dataset",
    "core.keyvault": "Keyvault",
    "core.container_registry": "ContainerRegistry",
    "core.conda_dependencies": "CondaDependencies",
    "core.compute_target": "ComputeTarget ComputeTargetException",
    "core.authentication": "InteractiveLoginAuthentication ServicePrincipalAuthentication AzureCliAuthentication "
    "MsiAuthentication TokenAuthentication ArmTokenAuthentication Audience",
    "core.image": "Image ContainerImage",
    "core.image.image": "Image",
    "core.image.container": "ContainerImage",
    "core.webservice": "Webservice AciWebservice AksWebservice LocalWebservice",
    "core.webservice.webservice": "Webservice",
    "core.webservice.aci": "AciWebservice",
    "core.webservice.local": "LocalWebservice",
    "core.compute": "ComputeTarget AmlCompute RemoteCompute ComputeInstance DsvmCompute KubernetesCompute AksCompute "
    "HDInsightCompute DatabricksCompute BatchCompute BatchAiCompute AdlaCompute DataFactoryCompute KustoCompute SynapseCompute",
    "core.runconfig": "RunConfiguration MpiConfiguration PyTorchConfiguration TensorflowConfiguration ParallelTaskConfiguration "
    "DockerConfiguration DataReferenceConfiguration CondaDependencies ContainerRegistry EnvironmentDefinition DEFAULT_CPU_IMAGE "
    "DEFAULT_GPU_IMAGE",
    "core.resource_configuration": "ResourceConfiguration",
    "core.webservice.aks": "AksWebservice",
    "data.dataset_type_definitions": "PromoteHeadersBehavior",
    "data": "FileDataset TabularDataset OutputFileDatasetConfig DataType",
    "core.profile": "ModelProfile",
    "core.private_endpoint": "PrivateEndPointConfig PrivateEndPoint",
    "core.databricks": "MavenLibrary PyPiLibrary RCranLibrary JarLibrary EggLibrary DatabricksCluster DatabricksSection",
    "_restclient.constants": "RunStatus RUN_ORIGIN",
    "data.constants": "AZURE_BLOB AZURE_FILE AZURE_DATA_LAKE WORKSPACE_BLOB_DATASTORE",
    "data.dataset_error_handling": "DatasetValidationError DatasetExecutionError",
    "data.azure_data_lake_datastore": "AzureDataLakeDatastore AzureDataLakeGen2Datastore",
    "data.data_reference": "DataReference",
    "data.datapath": "DataPath DataPathComputeBinding",
    "data.dataset_consumption_config": "DatasetConsumptionConfig",
    "data.dataset_factory": "TabularDatasetFactory FileDatasetFactory DataType",
    "data.azure_storage_datastore": "AzureBlobDatastore AzureFileDatastore",
    "data.output_dataset_config": "OutputFileDatasetConfig",
    "train.dnn": "PyTorch TensorFlow Chainer Mpi Gloo Nccl ParameterServer",
    "train.estimator": "Estimator Mpi Gloo Nccl ParameterServer MMLBaseEstimator",
    "train.sklearn": "SKLearn",
    "train.hyperdrive": "HyperDriveConfig HyperDriveRunConfig HyperDriveRun PrimaryMetricGoal RandomParameterSampling "
    "GridParameterSampling BayesianParameterSampling BanditPolicy MedianStoppingPolicy TruncationSelectionPolicy "
    "NoTerminationPolicy EarlyTerminationPolicy HyperParameterSampling choice randint uniform quniform loguniform qloguniform "
    "normal qnormal lognormal qlognormal",
    "train.hyperdrive.runconfig": "HyperDriveConfig HyperDriveRunConfig PrimaryMetricGoal",
    "train.hyperdrive.run": "HyperDriveRun PrimaryMetricGoal",
    "train.hyperdrive.sampling": "RandomParameterSampling",
    "train.hyperdrive.policy": "BanditPolicy",
    "train.hyperdrive.parameter_expressions": "choice uniform",
    "train.hyperdrive.exceptions": "HyperDriveConfigException",
    "pipeline.core": "Pipeline PipelineData PipelineParameter PipelineRun PipelineStep StepRun StepRunOutput StepSequence "
    "PortDataReference TrainingOutput Schedule ScheduleRecurrence TimeZone PublishedPipeline PipelineEndpoint",
    "pipeline.core.run": "PipelineRun StepRun",
    "pipeline.core.graph": "PipelineParameter InputPortBinding OutputPortBinding PortDataReference TrainingOutput "
    "InputPortDef OutputPortDef",
    "pipeline.core.schedule": "ScheduleRecurrence",
    "pipeline.core.builder": "PipelineData PipelineStep StepSequence",
    "pipeline.core.pipeline": "Pipeline",
    "pipeline.steps": "PythonScriptStep EstimatorStep HyperDriveStep HyperDriveStepRun MpiStep CommandStep ParallelRunStep "
    "ParallelRunConfig DatabricksStep DataTransferStep AutoMLStep",
    "widgets": "RunDetails",
    "train.widgets": "RunDetails",
    "telemetry": "set_diagnostics_collection",
    "tensorboard": "Tensorboard",
    "tensorboard.export": "export_to_tensorboard",
    "opendatasets": "MNIST Diabetes NoaaIsdWeather",
    "monitoring": "ModelDataCollector",
    "exceptions": "ActivityFailedException AuthenticationException AzureMLException ComputeTargetException "
    "ExperimentExecutionException ModelNotFoundException ModelPathNotFoundException ProjectSystemException "
    "RunConfigurationException RunEnvironmentException ServiceException SnapshotException TrainingException UserErrorException "
    "WebserviceException WorkspaceException",
}


#: Names that can be imported, but that raise an error with an explanation when they are used.
REFUSED = {
    *("AdlaCompute", "BatchCompute", "DataFactoryCompute", "DatabricksCompute", "HDInsightCompute", "KustoCompute"),
    *("SynapseCompute", "MNIST", "NoaaIsdWeather", "PublishedPipeline", "PipelineEndpoint", "Schedule"),
    *("DatabricksStep", "DataTransferStep", "AutoMLStep", "ModelProfile", "PrivateEndPointConfig", "PrivateEndPoint"),
    *(
        "MavenLibrary",
        "PyPiLibrary",
        "RCranLibrary",
        "JarLibrary",
        "EggLibrary",
        "DatabricksCluster",
        "DatabricksSection",
    ),
    "DockerBuildContext",
}


@pytest.mark.promise("programs-import-there-table-code")
@pytest.mark.parametrize("module", IMPORTED)
def test_each_azureml_name_that_programs_import_exists_or_has_a_refusal_reason(module):
    for name in IMPORTED[module].split():
        exec(f"from paceline.compat.azureml.{RENAMED.get(module, module)} import {name}", {})
        why = missing(f"azureml.{module}.{name}")
        assert (why is not None) == (name in REFUSED), (name, why)
        assert why is None or why.endswith("."), (name, why)


OTHER_NAMES = """
import paceline.azureml
import azureml.core.compute.compute, azureml.core.compute.remote, azureml.pipeline.steps
from azureml.core.compute.amlcompute import AmlCompute
from azureml.exceptions import UserErrorException
from azureml.exceptions._azureml_exception import UserErrorException as Private
assert Private is UserErrorException
from azureml._restclient.constants import RunStatus
from azureml.core import Run
from azureml.core.run import _OfflineRun, _SubmittedRun
run = Run.get_context()
assert isinstance(run, _OfflineRun) and not isinstance(run, _SubmittedRun)
assert RunStatus.FAILED == "Failed" and len(RunStatus.list()) == 15 and "Queued" in RunStatus.get_running_statuses()
assert RunStatus.COMPLETED not in RunStatus.get_running_statuses()
from azureml.opendatasets import NoaaIsdWeather
from azureml.pipeline.steps.python_script_step import PythonScriptStep
assert PythonScriptStep is azureml.pipeline.steps.PythonScriptStep
assert azureml.core.compute.compute.ComputeTarget is azureml.core.compute.ComputeTarget
assert AmlCompute is azureml.core.compute.AmlCompute
assert azureml.core.compute.remote.RemoteCompute is azureml.core.compute.RemoteCompute
try:
    NoaaIsdWeather.get_tabular_dataset()
except UserErrorException as error:
    print(error)
"""


def test_every_module_in_the_list_of_azureml_aliases_can_be_imported():
    run_python(
        "import importlib, paceline.azureml\n"
        "from paceline.compat.azureml.aliases import RENAMED\n"
        "for name in RENAMED: importlib.import_module(f'azureml.{name}')\n"
        "from azureml.pipeline.core.schedule import Schedule, ScheduleRecurrence, TimeZone\n"
        "from azureml.core.databricks import PyPiLibrary"
    )


def test_each_azureml_authentication_class_is_distinct():
    from paceline.compat.azureml.core import authentication

    login = authentication.InteractiveLoginAuthentication()
    for name in ("ArmTokenAuthentication", "AzureMLTokenAuthentication", "MsiAuthentication", "TokenAuthentication"):
        kind = getattr(authentication, name)
        assert kind.__name__ == name
        assert not isinstance(login, kind)


def test_azureml_classes_are_found_under_each_module_name_of_the_sdk():
    assert "NoaaIsdWeather: Azure's open data service is not available here. " in run_python(OTHER_NAMES)
    for name in (
        *("pipeline.steps.mpi_step.MpiStep", "core.compute.compute.ComputeTarget", "core.compute.aks.AksCompute"),
        *("core.compute.amlcompute.AmlCompute", "core.compute.computeinstance.ComputeInstance"),
        *("core.compute.dsvm.DsvmCompute", "core.compute.kubernetescompute.KubernetesCompute"),
        *("core.compute.remote.RemoteCompute",),
    ):
        assert missing(f"azureml.{name}") is None
    assert missing("azureml.core.Datastore.register_azure_sql_database") is not None


@pytest.mark.promise("programs-import-there-table-code")
def test_table_in_the_docs_has_every_supported_name():
    """`python -m paceline.compat.azureml.check.names` prints it, and the site has it as a page."""
    rows = table().splitlines()[2:]
    for module, names in by_module().items():
        assert f"| `{module}` | {', '.join(f'`{name}`' for name in names)} |" in rows
    assert all(any(f"`azureml.{module}`" in row for row in rows) for module in RENAMED)
    assert sum(map(len, by_module().values())) > 150
