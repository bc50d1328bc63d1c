"""Parameters of the SDK's calls: names, order and defaults, as its public documentation has them."""

from __future__ import annotations

import importlib
import inspect

import pytest

from paceline.compat.azureml.aliases import RENAMED

#: Module -> callable -> its parameters without self. Optional parameters at the end exist only in Paceline.
SIGNATURES = {
    "core.workspace": {
        "Workspace": "subscription_id, resource_group, workspace_name, auth=None",
        "Workspace.from_config": "path=None, auth=None",
        "Workspace.create": "name, auth=None, subscription_id=None, resource_group=None, location=None, "
        "create_resource_group=True, sku='basic'",
        "Workspace.get": "name, auth=None, subscription_id=None, resource_group=None",
        "Workspace.list": "subscription_id, auth=None, resource_group=None",
        "Workspace.write_config": "path=None, file_name=None",
        "Workspace.get_default_compute_target": "type",
        "Workspace.set_default_datastore": "name",
        "Workspace.get_run": "run_id",
        "Workspace.delete": "delete_dependent_resources=False, no_wait=False",
    },
    "core.experiment": {
        "Experiment": "workspace, name",
        "Experiment.submit": "config, tags=None",
        "Experiment.get_runs": "type=None, tags=None, properties=None, include_children=False",
        "Experiment.list": "workspace, experiment_name=None, view_type='ActiveOnly', tags=None",
        "Experiment.delete": "workspace, experiment_id",
        "Experiment.tag": "key, value=None",
        "Experiment.reactivate": "new_name=None",
    },
    "core.run": {
        "Run": "experiment, run_id, outputs=None",
        "get_run": "experiment, run_id, rehydrate=True, clean_up=True",
        "Run.get_context": "allow_offline=True",
        "Run.get": "workspace, run_id",
        "Run.list": "experiment, type=None, tags=None, properties=None, status=None, include_children=False",
        "Run.log": "name, value=..., description='', step=None",
        "Run.log_list": "name, value, description=''",
        "Run.log_row": "name, description=None",
        "Run.log_table": "name, value, description=''",
        "Run.log_image": "name, path=None, plot=None, description=''",
        "Run.log_confusion_matrix": "name, value, description=''",
        "Run.get_metrics": "name=None, recursive=False, run_type=None, populate=False",
        "Run.wait_for_completion": "show_output=False, wait_post_processing=False, raise_on_error=True",
        "Run.fail": "error_details=None, error_code=None",
        "Run.child_run": "name=None, run_id=None, outputs=None",
        "Run.create_children": "count=None, tag_key=None, tag_values=None",
        "Run.get_children": "recursive=False, tags=None, properties=None, type=None, status=None",
        "Run.submit_child": "config, tags=None",
        "Run.tag": "key, value=None",
        "Run.set_tags": "tags",
        "Run.remove_tags": "tags",
        "Run.add_properties": "properties",
        "Run.upload_file": "name, path_or_stream, datastore_name=None",
        "Run.upload_files": "names, paths, return_artifacts=False, timeout_seconds=None, datastore_name=None",
        "Run.upload_folder": "name, path, datastore_name=None",
        "Run.download_file": "name, output_file_path=None",
        "Run.download_files": "prefix=None, output_directory=None, output_paths=None, batch_size=100, append_prefix=True, "
        "timeout_seconds=None",
        "Run.register_model": "model_name, model_path=None, tags=None, properties=None, model_framework=None, "
        "model_framework_version=None, description=None, datasets=None, sample_input_dataset=None, sample_output_dataset=None, "
        "resource_configuration=None",
        "Run.get_all_logs": "destination=None",
        "Run.restore_snapshot": "snapshot_id=None, path=None",
        "Run.take_snapshot": "path",
        "Run.get_secret": "name",
        "Run.get_secrets": "secrets",
        "Run.flush": "timeout_seconds=300",
    },
    "core.script_run_config": {
        "ScriptRunConfig": "source_directory=None, script=None, arguments=None, run_config=None, _telemetry_values=None, "
        "compute_target=None, environment=None, distributed_job_config=None, resume_from=None, "
        "max_run_duration_seconds=2592000, command=None, docker_runtime_config=None",
    },
    "core.runconfig": {
        "RunConfiguration": "script=None, arguments=None, framework=None, communicator=None, conda_dependencies=None",
        "RunConfiguration.save": "path=None, name=None, separate_environment_yaml=False",
        "RunConfiguration.load": "path, name=None",
        "RunConfiguration.delete": "path, name",
        "MpiConfiguration": "process_count_per_node=1, node_count=1",
        "PyTorchConfiguration": "communication_backend='Nccl', process_count=None, node_count=1",
        "TensorflowConfiguration": "worker_count=1, parameter_server_count=1",
        "ParallelTaskConfiguration": "",
        "DataReferenceConfiguration": "datastore_name=None, mode='mount', path_on_datastore=None, path_on_compute=None, "
        "overwrite=False",
    },
    "core.environment": {
        "Environment": "name",
        "Environment.register": "workspace",
        "Environment.get": "workspace, name, version=None, label=None",
        "Environment.list": "workspace",
        "Environment.label": "workspace, name, version, labels",
        "Environment.clone": "new_name",
        "Environment.build": "workspace, image_build_compute=None",
        "Environment.build_local": "workspace, platform=None",
        "Environment.save_to_directory": "path, overwrite=False",
        "Environment.load_from_directory": "path",
        "Environment.from_conda_specification": "name, file_path",
        "Environment.from_pip_requirements": "name, file_path, pip_version=None",
        "Environment.from_existing_conda_environment": "name, conda_environment_name",
        "Environment.from_docker_image": "name, image, container_registry=None, conda_specification=None, pip_requirements=None",
        "Environment.from_dockerfile": "name, dockerfile, conda_specification=None, pip_requirements=None",
        "Environment.add_private_pip_wheel": "workspace, file_path, exist_ok=False",
    },
    "core.conda_dependencies": {
        "CondaDependencies": "conda_dependencies_file_path=None",
        "CondaDependencies.create": "pip_indexurl=None, pip_packages=None, conda_packages=None, python_version='3.10.18', "
        "pin_sdk_version=True",
        "CondaDependencies.add_tensorflow_conda_package": "core_type='cpu', version=None",
        "CondaDependencies.add_tensorflow_pip_package": "core_type='cpu', version=None",
        "CondaDependencies.save": "path=None",
        "CondaDependencies.save_to_file": "base_directory, conda_file_path=None",
    },
    "core.compute": {
        "ComputeTarget": "workspace, name",
        "ComputeTarget.create": "workspace, name, provisioning_configuration",
        "ComputeTarget.attach": "workspace, name, attach_configuration",
        "ComputeTarget.list": "workspace",
        "AmlCompute.provisioning_configuration": "vm_size='', vm_priority='dedicated', min_nodes=0, max_nodes=None, "
        "idle_seconds_before_scaledown=1800, admin_username=None, admin_user_password=None, admin_user_ssh_key=None",
        "AmlCompute.wait_for_completion": "show_output=False, min_node_count=None, timeout_in_minutes=25, "
        "is_delete_operation=False",
        "AmlCompute.update": "min_nodes=None, max_nodes=None, idle_seconds_before_scaledown=None",
        "AmlCompute.supported_vmsizes": "workspace, location=None",
        "RemoteCompute.attach_configuration": "username, subscription_id=None, resource_group=None, vm_name=None, "
        "resource_id=None, address=None, ssh_port=22, password='', private_key_file='', private_key_passphrase=''",
        "RemoteCompute.wait_for_completion": "show_output=False, is_delete_operation=False",
        "DsvmCompute.provisioning_configuration": "vm_size=None, ssh_port=None, location=None",
        "ComputeInstance.provisioning_configuration": "vm_size='', ssh_public_access=False",
        "KubernetesCompute.attach_configuration": "resource_id=None, namespace=None",
    },
    "core.datastore": {
        "Datastore": "workspace, name=None",
        "Datastore.get": "workspace, datastore_name",
        "Datastore.get_default": "workspace",
        "Datastore.register_azure_blob_container": "workspace, datastore_name, container_name, account_name, sas_token=None, "
        "account_key=None, protocol=None, endpoint=None, overwrite=False, create_if_not_exists=False",
        "Datastore.path": "path=None, data_reference_name=None",
        "Datastore.as_download": "path_on_compute=None",
        "Datastore.as_upload": "path_on_compute=None",
        "Datastore.upload": "src_dir, target_path=None, overwrite=False, show_progress=True",
        "Datastore.upload_files": "files, relative_root=None, target_path=None, overwrite=False, show_progress=True",
        "Datastore.download": "target_path, prefix=None, overwrite=False, show_progress=True",
    },
    "core.dataset": {
        "Dataset.get_by_name": "workspace, name, version='latest'",
        "Dataset.get_by_id": "workspace, id",
        "Dataset.get_all": "workspace",
        "Dataset.File.from_files": "path, validate=True, partition_format=None, is_file=False",
        "Dataset.File.upload_directory": "src_dir, target, pattern=None, overwrite=False, show_progress=True",
        "Dataset.Tabular.from_delimited_files": "path, validate=True, include_path=False, infer_column_types=True, "
        "set_column_types=None, separator=',', header=True, partition_format=None, support_multi_line=False, "
        "empty_as_string=False, encoding='utf8'",
        "Dataset.Tabular.from_parquet_files": "path, validate=True, include_path=False, set_column_types=None, "
        "partition_format=None",
        "Dataset.Tabular.from_json_lines_files": "path, validate=True, include_path=False, set_column_types=None, "
        "partition_format=None, invalid_lines='error', encoding='utf8'",
        "Dataset.Tabular.register_pandas_dataframe": "dataframe, target, name, description=None, tags=None, "
        "show_progress=True",
    },
    "data": {
        "FileDataset.register": "workspace, name, description=None, tags=None, create_new_version=False",
        "FileDataset.download": "target_path=None, overwrite=False",
        "FileDataset.mount": "mount_point=None",
        "FileDataset.as_named_input": "name",
        "FileDataset.as_mount": "path_on_compute=None",
        "FileDataset.as_download": "path_on_compute=None",
        "FileDataset.random_split": "percentage, seed=None",
        "FileDataset.take_sample": "probability, seed=None",
        "FileDataset.take": "count",
        "FileDataset.skip": "count",
        "TabularDataset.to_pandas_dataframe": "on_error='null', out_of_range_datetime='null'",
        "TabularDataset.to_csv_files": "separator=','",
        "TabularDataset.keep_columns": "columns, validate=False",
        "TabularDataset.drop_columns": "columns",
        "TabularDataset.partition_by": "partition_keys, target, name=None, show_progress=True, partition_as_file_dataset=False",
        "TabularDataset.time_before": "end_time, include_boundary=True, validate=True",
        "TabularDataset.time_after": "start_time, include_boundary=True, validate=True",
        "TabularDataset.time_between": "start_time, end_time, include_boundary=True, validate=True",
        "TabularDataset.time_recent": "time_delta, include_boundary=True, validate=True",
        "OutputFileDatasetConfig": "name=None, destination=None, source=None, partition_format=None",
        "OutputFileDatasetConfig.as_upload": "overwrite=False, source_globs=None",
        "OutputFileDatasetConfig.register_on_complete": "name, description=None, tags=None",
    },
    "data.data_reference": {
        "DataReference": "datastore, data_reference_name=None, path_on_datastore=None, mode='mount', path_on_compute=None, "
        "overwrite=False",
    },
    "data.datapath": {
        "DataPath": "datastore=None, path_on_datastore=None, name=None",
        "DataPath.create_data_reference": "data_reference_name=None, datapath_compute_binding=None",
        "DataPathComputeBinding": "mode='mount', path_on_compute=None, overwrite=False",
    },
    "data.dataset_consumption_config": {
        "DatasetConsumptionConfig": "name, dataset, mode='direct', path_on_compute=None",
    },
    "train.hyperdrive": {
        "HyperDriveConfig": "hyperparameter_sampling, primary_metric_name, primary_metric_goal, max_total_runs, "
        "max_concurrent_runs=None, max_duration_minutes=10080, policy=None, estimator=None, run_config=None, resume_from=None, "
        "resume_child_runs=None, pipeline=None, debug_flag=None, custom_run_id=None",
        "HyperDriveRunConfig": "estimator, hyperparameter_sampling, primary_metric_name, primary_metric_goal, max_total_runs, "
        "max_concurrent_runs=None, max_duration_minutes=10080, policy=None",
        "BanditPolicy": "evaluation_interval=1, slack_factor=None, slack_amount=None, delay_evaluation=0",
        "MedianStoppingPolicy": "evaluation_interval=1, delay_evaluation=0",
        "TruncationSelectionPolicy": "truncation_percentage, evaluation_interval=1, delay_evaluation=0",
        "NoTerminationPolicy": "",
        "RandomParameterSampling": "parameter_space, properties=None",
        "GridParameterSampling": "parameter_space",
        "BayesianParameterSampling": "parameter_space",
        "randint": "upper",
        "uniform": "min_value, max_value",
        "quniform": "min_value, max_value, q",
        "loguniform": "min_value, max_value",
        "qloguniform": "min_value, max_value, q",
        "normal": "mu, sigma",
        "qnormal": "mu, sigma, q",
        "lognormal": "mu, sigma",
        "qlognormal": "mu, sigma, q",
        "HyperDriveRun.get_best_run_by_primary_metric": "include_failed=True, include_canceled=True, "
        "include_resume_from_runs=True",
        "HyperDriveRun.get_children_sorted_by_primary_metric": "top=0, reverse=False, discard_no_metric=False",
    },
    "core.model": {
        "Model": "workspace, name=None, id=None, tags=None, properties=None, version=None, run_id=None, model_framework=None",
        "Model.register": "workspace, model_path, model_name, tags=None, properties=None, description=None, datasets=None, "
        "model_framework=None, model_framework_version=None, child_paths=None",
        "Model.list": "workspace, name=None, tags=None, properties=None, run_id=None, latest=False",
        "Model.download": "target_dir='.', exist_ok=False",
        "Model.get_model_path": "model_name, version=None",
        "Model.deploy": "workspace, name, models, inference_config=None, deployment_config=None, deployment_target=None, "
        "overwrite=False, show_output=False",
        "Model.package": "workspace, models, inference_config=None, generate_dockerfile=False",
        "InferenceConfig": "entry_script, runtime=None, conda_file=None, extra_docker_file_steps=None, source_directory=None, "
        "enable_gpu=None, description=None, base_image=None, base_image_registry=None, cuda_version=None, environment=None",
    },
    "core.webservice": {
        "Webservice": "workspace, name",
        "Webservice.deploy_from_model": "workspace, name, models, image_config, deployment_config=None, "
        "deployment_target=None, overwrite=False",
        "Webservice.wait_for_deployment": "show_output=False, timeout_sec=None",
        "Webservice.run": "input_data",
        "Webservice.get_logs": "num_lines=5000",
        "AciWebservice.deploy_configuration": "cpu_cores=None, memory_gb=None, tags=None, properties=None, description=None, "
        "location=None, auth_enabled=None, ssl_enabled=None, enable_app_insights=None",
        "LocalWebservice.deploy_configuration": "port=None",
        "LocalWebservice.reload": "wait=False",
    },
    "core.image": {
        "ContainerImage.image_configuration": "execution_script, runtime='python', conda_file=None, docker_file=None, "
        "schema_file=None, dependencies=None, enable_gpu=None, tags=None, properties=None, description=None",
    },
    "core.authentication": {
        "InteractiveLoginAuthentication": "force=False, tenant_id=None, cloud=None",
        "ServicePrincipalAuthentication": "tenant_id, service_principal_id, service_principal_password, cloud='AzureCloud'",
        "AzureCliAuthentication": "cloud=None",
    },
    "core.keyvault": {
        "Keyvault.set_secret": "name, value",
        "Keyvault.get_secret": "name",
        "Keyvault.delete_secret": "name",
    },
    "tensorboard": {"Tensorboard": "runs, local_root=None, port=6006, use_display_name=False"},
    "tensorboard.export": {"export_to_tensorboard": "run_data, logsdir, logger=None, recursive=True"},
    "telemetry": {"set_diagnostics_collection": "send_diagnostics=True"},
}


def parameters(function: object) -> list[inspect.Parameter]:
    if isinstance(function, type) and function.__new__ is not object.__new__:
        function = function.__new__
    found = [*inspect.signature(function).parameters.values()]  # type: ignore[arg-type]
    return [one for one in found if one.name not in ("self", "cls")]


@pytest.mark.promise("parameters-members-sdk-s-drivers")
@pytest.mark.parametrize("module", SIGNATURES)
def test_functions_and_methods_of_the_azureml_modules_have_the_sdks_parameters_and_defaults(module: str) -> None:
    there = importlib.import_module(f"paceline.compat.azureml.{RENAMED.get(module, module)}")
    for call, text in SIGNATURES[module].items():
        target = there
        for part in call.split("."):
            target = getattr(target, part)
        wanted = parameters(eval(f"lambda {text}: None"))
        ours = parameters(target)
        assert [(one.name, one.default) for one in ours[: len(wanted)]] == [
            (one.name, one.default) for one in wanted
        ], call
        assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in ours[: len(wanted)]), call
        for one in ours[len(wanted) :]:
            assert one.default is not one.empty or one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL), (call, one)


#: Class -> attributes that drivers and scripts use, but that `paceline azureml check` can't see.
MEMBERS = {
    "core.workspace.Workspace": "name location subscription_id resource_group compute_targets datastores datasets experiments "
    "environments images models webservices linked_services get_default_datastore set_default_datastore get_default_keyvault "
    "get_default_compute_target get_run get_details get_mlflow_tracking_uri write_config delete update sync_keys",
    "core.experiment.Experiment": "name workspace id tags submit start_logging get_runs archive reactivate tag set_tags refresh",
    "core.run.Run": "id name display_name description type number parent status experiment tags properties input_datasets "
    "output_datasets get_status get_detailed_status get_details get_details_with_logs get_all_logs wait_for_completion start "
    "complete fail cancel flush clean get_environment get_portal_url child_run create_children get_children submit_child tag "
    "set_tags get_tags remove_tags add_properties get_properties log log_list log_row log_table log_image "
    "log_confusion_matrix log_accuracy_table log_residuals log_predictions get_metrics upload_file upload_files upload_folder "
    "get_file_names download_file download_files take_snapshot get_snapshot_id restore_snapshot register_model get_secret "
    "get_secrets get_submitted_run _get_outputs_datapath __enter__ __exit__ _repr_html_",
    "core.run._OfflineRun": "id log log_list log_row log_table log_image tag set_tags add_properties upload_file upload_folder "
    "child_run complete fail cancel flush __enter__ __exit__",
    "train.hyperdrive.HyperDriveRun": "hyperdrive_config get_best_run_by_primary_metric get_hyperparameters get_metrics "
    "get_children_sorted_by_primary_metric get_children cancel fail get_diagnostics",
    "core.compute.AmlCompute": "name type provisioning_state provisioning_errors location tags cluster_resource_id status "
    "get_status wait_for_completion update list_nodes delete detach refresh_state serialize",
    "core.datastore.Datastore": "name datastore_type account_name container_name account_key sas_token path as_mount "
    "as_download as_upload upload upload_files download set_as_default unregister",
    "data.FileDataset": "id name version tags description register to_path download mount as_mount as_download as_named_input "
    "take skip take_sample random_split add_tags update unregister_all_versions",
    "data.TabularDataset": "id name version tags to_pandas_dataframe take skip take_sample random_split keep_columns "
    "drop_columns filter with_timestamp_columns time_before time_after time_between time_recent to_csv_files as_named_input "
    "register",
    "core.environment.Environment": "register clone build build_local save_to_directory get_image_details",
    "core.conda_dependencies.CondaDependencies": "add_conda_package remove_conda_package add_pip_package remove_pip_package "
    "add_channel remove_channel set_python_version get_python_version set_pip_option remove_pip_option set_pip_index_url "
    "set_pip_requirements serialize_to_string save_to_file save conda_packages pip_packages pip_options conda_channels as_dict",
    "core.model.Model": "id version url description tags properties created_time run_id run experiment_name workspace download "
    "delete add_tags remove_tags add_properties update serialize",
    "core.webservice.AciWebservice": "name state error scoring_uri swagger_uri compute_type tags wait_for_deployment run "
    "get_logs get_keys regen_key get_token update delete serialize update_deployment_state",
    "core.webservice.LocalWebservice": "port reload run state update delete get_logs",
    "core.image.Image": "wait_for_creation delete",
    "core.keyvault.Keyvault": "set_secret set_secrets get_secret get_secrets delete_secret list_secrets",
    "data.data_reference.SdkDataReference": "path as_mount as_download as_upload to_config",
    "data.OutputFileDatasetConfig": "as_upload as_mount register_on_complete",
    "tensorboard.Tensorboard": "start stop",
    "widgets.RunDetails": "show get_widget_data",
}


@pytest.mark.promise("parameters-members-sdk-s-drivers")
@pytest.mark.parametrize("name", MEMBERS)
def test_azureml_classes_have_the_attributes_that_collected_programs_use(name: str) -> None:
    module, _, kind = name.rpartition(".")
    there = dir(getattr(importlib.import_module(f"paceline.compat.azureml.{module}"), kind))
    # These attributes exist only on instances.
    made = (
        ["id", "error", "name", "tags"]
        if kind in ("_OfflineRun", "AmlCompute", "Image", "FileDataset", "TabularDataset")
        else []
    )
    assert [member for member in MEMBERS[name].split() if member not in (*there, *made)] == []


#: Keyword parameters of every estimator.
ESTIMATOR = (
    "compute_target=None vm_size=None vm_priority=None entry_script=None script_params=None node_count=1 "
    "process_count_per_node=1 distributed_backend=None distributed_training=None use_gpu=False use_docker=True "
    "custom_docker_base_image=None custom_docker_image=None image_registry_details=None user_managed=False conda_packages=None "
    "pip_packages=None conda_dependencies_file_path=None pip_requirements_file_path=None conda_dependencies_file=None "
    "pip_requirements_file=None environment_variables=None environment_definition=None inputs=None "
    "source_directory_data_store=None shm_size=None resume_from=None max_run_duration_seconds=None framework_version=None"
)


@pytest.mark.parametrize("name", ["Estimator", "PyTorch", "TensorFlow", "Chainer", "SKLearn"])
def test_estimators_have_the_sdks_parameters(name: str) -> None:
    kind = getattr(importlib.import_module("paceline.compat.azureml.train.estimator"), name)
    first, *ours = parameters(kind)
    assert (first.name, first.kind) == ("source_directory", first.POSITIONAL_OR_KEYWORD)
    known = {one.name: one.default for one in ours if one.kind is one.KEYWORD_ONLY}
    wanted = dict(word.split("=") for word in ESTIMATOR.split())
    assert {name: repr(known[name]) for name in wanted} == wanted
