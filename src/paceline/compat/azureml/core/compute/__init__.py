"""Compute targets (`azureml.core.compute`)."""

from paceline.compat.azureml.core.compute.targets import (
    AdlaCompute,
    AksCompute,
    AmlCompute,
    BatchAiCompute,
    BatchCompute,
    ComputeInstance,
    ComputeTarget,
    DatabricksCompute,
    DataFactoryCompute,
    DsvmCompute,
    HDInsightCompute,
    KubernetesCompute,
    KustoCompute,
    RemoteCompute,
    SynapseCompute,
)

__all__ = [
    "AdlaCompute",
    "AksCompute",
    "AmlCompute",
    "BatchAiCompute",
    "BatchCompute",
    "ComputeInstance",
    "ComputeTarget",
    "DataFactoryCompute",
    "DatabricksCompute",
    "DsvmCompute",
    "HDInsightCompute",
    "KubernetesCompute",
    "KustoCompute",
    "RemoteCompute",
    "SynapseCompute",
]
