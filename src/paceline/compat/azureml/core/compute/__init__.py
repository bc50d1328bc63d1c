"""Compute targets (`azureml.core.compute`)."""

from paceline.compat.azureml.core.compute.targets import (
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
    RemoteCompute,
    SynapseCompute,
)

__all__ = [
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
    "RemoteCompute",
    "SynapseCompute",
]
