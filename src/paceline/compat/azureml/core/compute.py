"""Compute targets (`azureml.core.compute`): this machine, or Paceline's targets.

https://learn.microsoft.com/python/api/azureml-core/azureml.core.compute.computetarget
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.compat.azureml import records
from paceline.compat.azureml.exceptions import ComputeTargetException, sdk_class
from paceline.compat.azureml.policy import SubmissionNotes
from paceline.compat.azureml.records import NamedObjects
from paceline.compat.azureml.strict import Strict, camel_case

if TYPE_CHECKING:
    from paceline import Workspace
    from paceline.compat.azureml.records import Document

#: Kinds of compute targets that exist only in Azure, such as Data Lake Analytics and Batch.
_CLOUD = (
    *("AdlaCompute", "BatchCompute", "DataFactoryCompute", "DatabricksCompute", "HDInsightCompute", "KustoCompute"),
    "SynapseCompute",
)

__all__ = [  # noqa: PLE0604 - the names are strings
    *("AksCompute", "AmlCompute", "BatchAiCompute", "ComputeInstance", "ComputeTarget", "ComputeTargetException"),
    *("DsvmCompute", "KubernetesCompute", "RemoteCompute", *_CLOUD),
]

#: With `__path__`, this module counts as a package: in the SDK it is divided into modules.
__path__: list[str] = []


_RESERVED = ("local", "amlcompute", "containerinstance")


class Provisioning(Strict):
    """Settings of a new compute target, from `provisioning_configuration` or `attach_configuration`."""

    def __init__(self, kind: str, **values: Any) -> None:
        self.kind = kind
        self.values = values
        self.location = values.get("location")


@sdk_class
class ComputeTarget:
    """An existing compute target. The instance's class is a subclass such as AmlCompute.

    Raises:
        ComputeTargetException: No target of this name was created or added. The message begins with ComputeTargetNotFound.
    """

    _type = "AmlCompute"

    def __new__(cls, workspace: Workspace, name: str, *others: object, **named: object) -> ComputeTarget:
        data = _kept(workspace, name)
        if data is None:
            known = ", ".join(target.name for target in ComputeTarget.list(workspace)) or "none"
            raise ComputeTargetException(
                f"ComputeTargetNotFound: Compute Target with name {name} not found in provided workspace. There are: {known}. "
                f"Create it, or add one: paceline compute add {name} --kind ssh ..."
            )
        kind = _CLASSES.get(data["type"], ComputeTarget) if cls is ComputeTarget else cls
        made = object.__new__(kind)
        made._set(workspace, name, data)
        return made

    def _set(self, workspace: Workspace, name: str, data: Document) -> None:
        self.workspace, self.name, self._data = workspace, name, data

    @staticmethod
    def create(workspace: Workspace, name: str, provisioning_configuration: Provisioning) -> ComputeTarget:
        """Create a compute target and return it.

        The target is this machine, unless a target of this name was added to Paceline.

        Raises:
            ComputeTargetException: The name is not valid.
        """
        _check_name(name)
        config = provisioning_configuration
        if not isinstance(config, Provisioning):
            raise ComputeTargetException(f"{config!r} is not a provisioning configuration. Create it with AmlCompute.")
        if name not in workspace_targets(workspace):
            values = {key: value for key, value in config.values.items() if key not in _SECRET}
            created = {"type": config.kind, "created": _now(), **values}
            records.documents(workspace, "compute").put(name, created)
            _add_ssh(workspace, name, config)
        return ComputeTarget(workspace, name)

    @staticmethod
    def attach(workspace: Workspace, name: str, attach_configuration: Provisioning) -> ComputeTarget:
        """Create and return a target. A RemoteCompute's SSH host is added to Paceline."""
        return ComputeTarget.create(workspace, name, attach_configuration)

    @staticmethod
    def list(workspace: Workspace) -> list[ComputeTarget]:
        """Return all targets of the workspace except `local`."""
        names = [*(name for name in workspace_targets(workspace) if name != "local")]
        names += [name for name in records.documents(workspace, "compute").names() if name not in names]
        return [ComputeTarget(workspace, name) for name in names]

    @classmethod
    def _made_elsewhere(cls, workspace: Workspace, name: str) -> ComputeTarget:
        """Return this machine under the name of a target that may exist in Azure."""
        made: ComputeTarget = object.__new__(AmlCompute)
        made._set(workspace, name, {"type": "AmlCompute"})
        return made

    # --- properties of a compute target

    @property
    def type(self) -> str:
        return str(self._data["type"])

    @property
    def provisioning_state(self) -> str:
        return "Succeeded"

    @property
    def provisioning_errors(self) -> None:
        return None

    @property
    def location(self) -> str:
        return str(self._data.get("location") or "local")

    @property
    def tags(self) -> dict[str, str]:
        return dict(self._data.get("tags") or {})

    @property
    def description(self) -> str | None:
        return self._data.get("description")

    @property
    def vm_size(self) -> str:
        return str(self._data.get("vm_size") or "")

    @property
    def cluster_resource_id(self) -> str | None:
        return None

    @property
    def status(self) -> ComputeStatus:
        return ComputeStatus(self._data)

    def get_status(self) -> ComputeStatus:
        """Return the target's status, with the requested number of nodes."""
        return self.status

    def refresh_state(self) -> None:
        """Do nothing: every read of a target fetches its current state."""

    def wait_for_completion(
        self, show_output: bool = False, is_delete_operation: bool = False, **others: object
    ) -> None:
        """Return immediately: there is nothing to provision."""
        if show_output:
            print(
                "Succeeded\nAmlCompute wait for completion finished\n\nMinimum number of nodes requested have been provisioned"
            )

    def serialize(self) -> dict[str, object]:
        return {
            "name": self.name,
            "computeType": self.type,
            "location": self.location,
            "tags": self.tags,
            "provisioningState": "Succeeded",
            "status": self.get_status().serialize(),
        }

    def update(
        self,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        idle_seconds_before_scaledown: int | None = None,
    ) -> None:
        """Record new node counts of a target, which do not change this machine."""
        counts = {
            "min_nodes": min_nodes,
            "max_nodes": max_nodes,
            "idle_seconds_before_scaledown": idle_seconds_before_scaledown,
        }
        self._data |= {key: value for key, value in counts.items() if value is not None}
        if records.documents(self.workspace, "compute").read(self.name) is not None:
            records.documents(self.workspace, "compute").put(self.name, self._data)

    def list_nodes(self) -> Sequence[dict[str, object]]:
        return [{"nodeId": "local", "address": "127.0.0.1", "port": None, "nodeState": "idle", "runId": None}]

    def delete(self) -> None:
        """Remove a target made by `create`. `paceline compute remove` removes other targets."""
        records.documents(self.workspace, "compute").remove(self.name)

    detach = delete

    def start(self, wait_for_completion: bool = False, show_output: bool = False) -> None:
        """Do nothing, like `stop` and `restart`: the target's machine always runs."""

    stop = restart = start

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workspace={self.workspace!r}, name={self.name!r}, type={self.type!r})"


class WorkspaceTargets(NamedObjects[ComputeTarget]):
    """The workspace's compute targets by name.

    `ws.compute_targets[name]` returns a target for any name. `in` and `get` know only targets that exist.
    """

    def __init__(self, workspace: Workspace) -> None:
        super().__init__({target.name: target for target in ComputeTarget.list(workspace)})
        self._workspace = workspace

    def __missing__(self, name: str) -> ComputeTarget:
        _check_name(name)
        return ComputeTarget._made_elsewhere(self._workspace, name)


class ComputeStatus:
    """The status of a compute target.

    `serialize()` returns the status as a dict with names such as `vmSize`. Each value is also an attribute (`vm_size`).
    """

    def __init__(self, data: Document) -> None:
        least, most = int(data.get("min_nodes") or 0), int(data.get("max_nodes") or 1)
        count, created = max(1, least), data.get("created") or _now()
        self.current_node_count = self.target_node_count = count
        self.node_state_counts = {
            "preparingNodeCount": 0,
            "runningNodeCount": 0,
            "idleNodeCount": count,
            "unusableNodeCount": 0,
            "leavingNodeCount": 0,
            "preemptedNodeCount": 0,
        }
        self.allocation_state = "Steady"
        self.allocation_state_transition_time = created
        self.errors = None
        self.creation_time = self.modified_time = created
        self.provisioning_state = "Succeeded"
        self.provisioning_state_transition_time = None
        idle = int(data.get("idle_seconds_before_scaledown") or 1800)
        self.scale_settings = {"minNodeCount": least, "maxNodeCount": most, "nodeIdleTimeBeforeScaleDown": f"PT{idle}S"}
        self.vm_priority = "Dedicated" if data.get("vm_priority", "dedicated") == "dedicated" else "LowPriority"
        self.vm_size = data.get("vm_size") or "local"

    def serialize(self) -> dict[str, object]:
        return {camel_case(name): value for name, value in vars(self).items()}

    def __repr__(self) -> str:
        return f"AmlComputeStatus({self.serialize()})"


class AmlCompute(ComputeTarget):
    """A cluster: this machine, or the target that was added under its name."""

    @staticmethod
    def provisioning_configuration(
        vm_size: str = "",
        vm_priority: str = "dedicated",
        min_nodes: int = 0,
        max_nodes: int | None = None,
        idle_seconds_before_scaledown: int | None = 1800,
        admin_username: str | None = None,
        admin_user_password: str | None = None,
        admin_user_ssh_key: str | None = None,
        *settings: object,
        tags: dict[str, str] | None = None,
        description: str | None = None,
        location: str | None = None,
        **others: object,
    ) -> Provisioning:
        """Return settings for `ComputeTarget.create`.

        Machine sizes and priorities are recorded, but have no effect.
        """
        for name, value in (("min_nodes", min_nodes), ("max_nodes", max_nodes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ComputeTargetException(f"{name}={value!r} must be a number of nodes, 0 or more.")
        return Provisioning(
            "AmlCompute",
            vm_size=vm_size,
            vm_priority=vm_priority,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            idle_seconds_before_scaledown=idle_seconds_before_scaledown,
            tags=tags,
            description=description,
            location=location,
        )

    @staticmethod
    def supported_vmsizes(workspace: Workspace, location: str | None = None) -> list[dict[str, object]]:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return [
            {
                "name": "local",
                "vCPUs": os.cpu_count(),
                "gpus": 0,
                "memoryGB": round(memory, 1),
                "maxResourceVolumeMB": 0,
            }
        ]

    def wait_for_completion(  # type: ignore[override]
        self,
        show_output: bool = False,
        min_node_count: int | None = None,
        timeout_in_minutes: float = 25,
        is_delete_operation: bool = False,
        **others: object,
    ) -> None:
        """Return immediately: there is nothing to provision."""
        super().wait_for_completion(show_output)


class BatchAiCompute(ComputeTarget):
    """A cluster of Batch AI, the SDK's compute service of 2018."""

    @staticmethod
    def provisioning_configuration(
        vm_size: str = "",
        vm_priority: str = "dedicated",
        autoscale_enabled: bool = False,
        cluster_min_nodes: int | None = None,
        cluster_max_nodes: int | None = None,
        **others: object,
    ) -> Provisioning:
        return Provisioning(
            "BatchAI",
            vm_size=vm_size,
            vm_priority=vm_priority,
            min_nodes=cluster_min_nodes or 0,
            max_nodes=cluster_max_nodes,
            location=others.get("location"),
        )


class RemoteCompute(ComputeTarget):
    """A machine that is reached by SSH."""

    @staticmethod
    def attach_configuration(
        username: str,
        subscription_id: str | None = None,
        resource_group: str | None = None,
        vm_name: str | None = None,
        resource_id: str | None = None,
        address: str | None = None,
        ssh_port: int = 22,
        password: str = "",
        private_key_file: str = "",
        private_key_passphrase: str = "",
    ) -> Provisioning:
        """Return settings for `ComputeTarget.attach`.

        Paceline ignores the password: ssh logs in with a key.

        Raises:
            ComputeTargetException: The address is missing.
        """
        if not address:
            raise ComputeTargetException("address is missing: give the host name for ssh.")
        return Provisioning(
            "VirtualMachine", address=address, username=username, ssh_port=ssh_port, private_key_file=private_key_file
        )

    @staticmethod
    def attach(workspace: Workspace, name: str, *arguments: Any, **named: Any) -> ComputeTarget:
        """Attach a machine and return it as a target.

        The arguments are an attach configuration, or (as in the SDK of 2018) a user name, an address and an SSH port.
        """
        given = arguments[0] if arguments else named.get("attach_configuration")
        if not isinstance(given, Provisioning):
            words = ("username", "address", "ssh_port")
            values = {**dict(zip(words, arguments, strict=False)), **named}
            known = {key: values[key] for key in (*words, "private_key_file") if values.get(key)}
            given = RemoteCompute.attach_configuration(**known)
        return ComputeTarget.create(workspace, name, given)


class _Cloud(ComputeTarget):
    """A kind of compute target that exists only in Azure."""

    #: Text of the exception that this class raises. `paceline azureml check` prints this text, too.
    refused = "it is a service of Azure and not available here. Train on AmlCompute, or on a target added to Paceline."

    @classmethod
    def _refuse(cls, *arguments: object, **named: object) -> NoReturn:
        raise ComputeTargetException(f"{cls.__name__}: {cls.refused}")

    provisioning_configuration = attach_configuration = _refuse


def __getattr__(name: str) -> type[_Cloud]:
    if name not in _CLOUD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind = type(name, (_Cloud,), {"__doc__": _Cloud.__doc__, "__module__": __name__})
    globals()[name] = kind
    return kind


class ComputeInstance(AmlCompute):
    """Azure's single machine, replaced by the local machine."""

    @staticmethod
    def provisioning_configuration(  # type: ignore[override]
        vm_size: str = "", ssh_public_access: bool = False, **others: object
    ) -> Provisioning:
        return Provisioning("ComputeInstance", vm_size=vm_size, min_nodes=1, max_nodes=1)


class DsvmCompute(AmlCompute):
    """Azure's virtual machine, replaced by the local machine."""

    @staticmethod
    def provisioning_configuration(  # type: ignore[override]
        vm_size: str | None = None, ssh_port: int | None = None, location: str | None = None
    ) -> Provisioning:
        return Provisioning("VirtualMachine", vm_size=vm_size or "", min_nodes=1, max_nodes=1, location=location)


class AksCompute(AmlCompute):
    """Azure's cluster for web services, replaced by the local machine."""

    @staticmethod
    def provisioning_configuration(  # type: ignore[override]
        agent_count: int | None = None, vm_size: str | None = None, **others: object
    ) -> Provisioning:
        return Provisioning("AKS", vm_size=vm_size or "", min_nodes=agent_count or 1, max_nodes=agent_count)

    @staticmethod
    def attach_configuration(**others: object) -> Provisioning:
        return Provisioning("AKS")

    class ClusterPurpose:
        DEV_TEST = "DevTest"
        FAST_PROD = "FastProd"


class KubernetesCompute(AmlCompute):
    """A cluster: this machine, or the target that was added under its name."""

    @staticmethod
    def attach_configuration(resource_id: object = None, namespace: object = None, **others: object) -> Provisioning:
        return Provisioning("Kubernetes")


_CLASSES: dict[str, type[ComputeTarget]] = {
    "AmlCompute": AmlCompute,
    "BatchAI": BatchAiCompute,
    "VirtualMachine": RemoteCompute,
    "ComputeInstance": ComputeInstance,
    "Kubernetes": KubernetesCompute,
    "AKS": AksCompute,
}
_SECRET = ("password", "private_key_passphrase", "admin_user_password")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not records.RULE.fullmatch(name) or name.lower() in _RESERVED:
        raise ComputeTargetException(
            f"{name!r} can't be a compute target's name: letters, digits, '-', '_' and '.', and none of {', '.join(_RESERVED)}."
        )


def _kept(workspace: Workspace, name: object) -> Document | None:
    if not isinstance(name, str) or not records.RULE.fullmatch(name):
        return None
    kept = records.documents(workspace, "compute").read(name)
    if name in workspace_targets(workspace):
        from paceline.targets import ComputeTargets

        kind = ComputeTargets(workspace.path)[name].kind
        return {"type": "VirtualMachine" if kind == "ssh" else "AmlCompute", **(kept or {})}
    return kept if isinstance(kept, dict) else None


def _add_ssh(workspace: Workspace, name: str, config: Provisioning) -> None:
    if config.kind != "VirtualMachine" or not config.values.get("address"):
        return
    from paceline.targets import Configured, add

    values = config.values
    user = f"{values['username']}@" if values.get("username") else ""
    settings: dict[str, Any] = {"hosts": [f"{user}{values['address']}"]}
    if values.get("ssh_port", 22) != 22:
        settings["port"] = int(values["ssh_port"])
    if values.get("private_key_file"):
        settings["identity"] = str(values["private_key_file"])
    add(workspace.path, Configured(name=name, kind="ssh", settings=settings))


def _now() -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat()


def resolve(name: object, workspace: Workspace, notes: SubmissionNotes) -> str:
    """Return the name of the compute target that a job uses.

    The result is the name of a target that was added to Paceline. For any other name, such as a cluster's in Azure, the
    result is "local". Then `notes` gets a note, unless the name is reserved for this machine.

    Raises:
        ComputeTargetException: The value is not a valid target name.
    """
    name = getattr(name, "name", name) or "local"
    if not isinstance(name, str):
        raise ComputeTargetException(f"compute_target={name!r} must be a target or a target's name.")
    if name in workspace_targets(workspace):
        return name
    created = records.documents(workspace, "compute")
    if name.lower() in _RESERVED:
        return "local"
    if not created.rule.fullmatch(name):
        raise ComputeTargetException(
            f"compute_target={name!r} can't be a target's name: letters, digits, '-', '_' and '.'."
        )
    size = (created.read(name) or {}).get("vm_size")
    notes.add(
        f"The compute target {name}{f' ({size})' if size else ''} is this machine. To train elsewhere: "
        f"paceline compute add {name} --kind ssh ..."
    )
    return "local"


def workspace_targets(workspace: Workspace) -> list[str]:
    """Return the names of Paceline's targets in the workspace."""
    from paceline.targets import ComputeTargets

    return list(ComputeTargets(workspace.path))
