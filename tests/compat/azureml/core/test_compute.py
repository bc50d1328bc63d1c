from __future__ import annotations

import pytest

from paceline.compat.azureml.core.compute import (
    AmlCompute,
    BatchAiCompute,
    ComputeTarget,
    ComputeTargetException,
    DatabricksCompute,
    RemoteCompute,
    resolve,
)
from paceline.compat.azureml.policy import SubmissionNotes
from paceline.targets import configured


def test_looking_up_a_missing_azureml_compute_target_raises_until_it_is_created(ws):
    with pytest.raises(ComputeTargetException, match=r"^ComputeTargetNotFound"):
        ComputeTarget(workspace=ws, name="cluster")
    config = AmlCompute.provisioning_configuration(vm_size="STANDARD_NC6", max_nodes=4)
    made = ComputeTarget.create(ws, "cluster", config)
    made.wait_for_completion(show_output=True, min_node_count=None, timeout_in_minutes=20)
    again = ComputeTarget(ws, "cluster")
    assert (type(again), again.name, again.type, again.provisioning_state) == (
        AmlCompute,
        "cluster",
        "AmlCompute",
        "Succeeded",
    )
    status = again.get_status().serialize()
    assert (status["vmSize"], status["scaleSettings"]["maxNodeCount"]) == ("STANDARD_NC6", 4)
    assert [*ws.compute_targets] == ["cluster"]
    again.delete()
    assert ws.compute_targets == {}


def test_batch_ai_cluster_configuration_is_accepted(ws):
    config = BatchAiCompute.provisioning_configuration(
        vm_size="STANDARD_NC6",
        vm_priority="lowpriority",
        autoscale_enabled=True,
        cluster_min_nodes=0,
        cluster_max_nodes=4,
    )
    made = ComputeTarget.create(ws, name="gpucluster", provisioning_configuration=config)
    assert made.status.serialize()["vmPriority"] == "LowPriority"
    assert type(ws.compute_targets()["gpucluster"]) is BatchAiCompute


@pytest.mark.promise("can-t-had-replaced-sentence")
def test_job_for_an_azure_cluster_created_by_the_sdk_runs_on_the_local_machine_with_a_note(ws):
    ComputeTarget.create(ws, "cluster", AmlCompute.provisioning_configuration(vm_size="STANDARD_NC6"))
    notes = SubmissionNotes()
    assert resolve("cluster", ws, notes) == "local"
    assert "cluster (STANDARD_NC6) is this machine" in notes.all()[0]


def test_azureml_target_uses_the_configured_paceline_target_of_the_same_name(ws):
    configured.add(ws.path, configured.Configured(name="lab", kind="ssh", settings={"hosts": ["me@lab0"]}))
    assert ComputeTarget(ws, "lab").type == "VirtualMachine"
    made = ComputeTarget.create(ws, "lab", AmlCompute.provisioning_configuration())
    notes = SubmissionNotes()
    assert resolve(made, ws, notes) == "lab"
    assert notes.all() == ()


def test_remote_machine_attached_by_either_sdk_call_is_stored_as_an_ssh_target_without_its_password(ws):
    RemoteCompute.attach(ws, "old", username="me", address="lab0", ssh_port=2222, password="never kept")
    (ws.path / "id").write_text("a key")
    config = RemoteCompute.attach_configuration(address="lab1", username="me", private_key_file=str(ws.path / "id"))
    ComputeTarget.attach(ws, "new", config)
    old, new = configured.read(ws.path, "old"), configured.read(ws.path, "new")
    assert (old.kind, old.settings["hosts"], old.settings["port"]) == ("ssh", ["me@lab0"], 2222)
    assert new.settings["identity"] == str(ws.path / "id")
    assert not [file for file in ws.path.rglob("*.json") if "never kept" in file.read_text()]


@pytest.mark.parametrize("name", ["local", "AmlCompute", "../x", "", None])
def test_invalid_target_name_is_refused(ws, name):
    with pytest.raises(ComputeTargetException, match="can't be a compute target's name"):
        ComputeTarget.create(ws, name, AmlCompute.provisioning_configuration())


def test_databricks_compute_is_refused_with_the_alternative():
    with pytest.raises(ComputeTargetException, match="AmlCompute"):
        DatabricksCompute.attach_configuration()


def test_job_for_an_azure_cluster_that_does_not_exist_here_runs_on_the_local_machine_with_a_note(ws):
    notes = SubmissionNotes()
    assert resolve("cpus", ws, notes) == "local"
    (said,) = notes.all()
    assert said.startswith("The compute target cpus is this machine. To train elsewhere: paceline compute add cpus")
    # Reading a cluster by its name returns it, as if an administrator had created it. But `in` says that it does not
    # exist, because programs use that to create missing clusters.
    assert (ws.compute_targets["cpus"].name, ws.compute_targets["cpus"].type) == ("cpus", "AmlCompute")
    assert "cpus" not in ws.compute_targets
    assert ws.get_default_compute_target("CPU").name == "cpu-cluster"
    with pytest.raises(ComputeTargetException, match="ComputeTargetNotFound"):
        ComputeTarget(ws, "cpus")
    with pytest.raises(ComputeTargetException, match="can't be a target's name"):
        resolve("no name!", ws, notes)
