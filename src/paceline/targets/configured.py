"""The compute targets of a workspace, each described by a small file.

    <workspace>/compute/<name>.json    {"name": "lab", "kind": "ssh", "settings": {"hosts": "/home/me/hosts.txt"}}
    <run folder>/target.json           a copy from the time of submission

The target `local` always exists. Every kind that needs no settings is also a target, with the kind's name. Kinds are
built in, or installed packages add them as entry points. If a package can't be imported, the other kinds still work.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from dataclasses import replace as replace_field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import TargetError
from paceline.runs.folder import RunFolder
from paceline.system import plugins
from paceline.system.files import OWNED, read_json, write_json
from paceline.system.names import did_you_mean, name_rule
from paceline.targets.base import Examined, Target
from paceline.targets.options import SettingValues

if TYPE_CHECKING:
    from paceline.system.registry import Documents
    from paceline.targets.options import Option
    from paceline.targets.status import Status


LOCAL = "local"
_NAME = name_rule("_-", 64)

GROUP = "paceline.targets"
#: Kind of a built-in target -> module:class. A built-in kind takes precedence over an installed plug-in of the same name.
OWN = {
    "local": "paceline.targets.local:ThisMachine",
    "ssh": "paceline.targets.ssh.target:SshTarget",
    "slurm": "paceline.targets.slurm.target:SlurmTarget",
    "ray": "paceline.targets.ray.target:RayTarget",
    "kubernetes": "paceline.targets.kubernetes.target:KubernetesTarget",
    # The kind "sim" stands for simulated nodes, which the package `paceline.testing` implements.
    "sim": "paceline.testing.sim.target:SimTarget",
}


@dataclass(frozen=True, kw_only=True)
class Configured:
    """The description of a compute target: its name, kind and settings."""

    name: str
    kind: str
    settings: SettingValues = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_target_name(self.name)

    def make(self) -> Target:
        """Create the target object, which serves one run.

        Raises:
            TargetError: A setting is wrong, or the kind can't be loaded.
        """
        return cast(Target, make_target(self.kind, self.name, self.settings))

    @property
    def type(self) -> str:
        """The target's kind, such as "ssh", which the Azure SDK calls `type`."""
        return self.kind

    def get_status(self) -> Status:
        """Query the engine, perhaps slowly, for nodes, their use and the queue.

        Raises:
            EngineError, TargetError: The engine does not answer, or the target's kind reports no status.
        """
        target: Any = self.make()
        if not isinstance(target, Examined):
            raise TargetError(f"compute target {self.name!r} is of kind {self.kind!r}, which reports no nodes.")
        found: Status = target.status()
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str) -> Configured:
        """Parse the description of a target. The error message names `where`.

        Raises:
            TargetError: The data is invalid.
        """
        if (
            isinstance(data, dict)
            and isinstance(data.get("name"), str)
            and isinstance(data.get("kind"), str)
            and isinstance(data.get("settings", {}), dict)
        ):
            return cls(name=data["name"], kind=data["kind"], settings=data.get("settings", {}))
        raise TargetError(
            f'{where} is not the description of a compute target, {{"name": ..., "kind": ..., "settings": {{...}}}}. '
            "Fix it, or remove the file and add the target again."
        )


def check_target_name(name: object) -> str:
    """Return `name` if it is a valid name of a target.

    Raises:
        TargetError: The name does not start with a letter or digit, has other characters than letters, digits, `_` and
            `-`, or has more than 64 characters.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TargetError(
            f"compute target name {name!r}: a name starts with a letter or digit and goes on with letters, digits, "
            "'_' and '-', at most 64 in all."
        )
    return name


def find_target(name: str, workspace_dir: Path) -> Target:
    """Return a target of the workspace, or a kind without settings, by name.

    Raises:
        TargetError: The target does not exist (the message lists the known targets), or its settings are wrong.
    """
    return read(workspace_dir, name).make()


def read(workspace_dir: Path, name: str) -> Configured:
    """Read the description of a workspace's target, by name.

    Raises:
        TargetError: The target does not exist, or its file can't be read.
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        path = _registry(workspace_dir).path(name)
        if path.exists():
            return _read_file(path, name)
        if _stands_alone(name):
            return Configured(name=name, kind=name)
    known = names(workspace_dir)
    raise TargetError(
        f"there is no compute target {name!r}.{did_you_mean(str(name), known)} There are {', '.join(known)}. "
        "`paceline compute add NAME --kind KIND` adds one."
    )


def names(workspace_dir: Path) -> list[str]:
    """Return the names of all targets: `local`, then the workspace's targets, sorted."""
    return [LOCAL, *(name for name in _registry(workspace_dir).names() if name != LOCAL)]


def add(workspace_dir: Path, configured: Configured, *, replace: bool = False) -> Target:
    """Store a target's description in the workspace, and return the target.

    The target's class may convert settings, such as a file of hosts to the hosts. Existing runs keep the old settings.

    replace: Whether to replace an existing target of this name; otherwise it is an error.

    Raises:
        TargetError: The name exists or is another kind's name, a setting is wrong, or the file can't be written.
    """
    if configured.name == LOCAL:
        raise TargetError("'local' is this machine and always there. Choose another name.")
    if configured.name in OWN and configured.kind != configured.name:
        raise TargetError(
            f"the name {configured.name!r} is that of a kind, and this target is of kind {configured.kind!r}. "
            "Choose another name."
        )
    # Creating the target checks the settings. The target may also convert them, so store the settings that it keeps.
    target = configured.make()
    kept = getattr(target, "settings", None)
    if isinstance(kept, Mapping):
        configured = replace_field(configured, settings=dict(kept))
    registry = _registry(workspace_dir)
    try:
        (registry.put if replace else registry.add)(configured.name, configured.to_json())
    except FileExistsError as error:
        raise TargetError(
            f"there is a compute target {configured.name!r} already. "
            "--replace (replace=True) changes it; runs that use it go on with the old settings."
        ) from error
    except OSError as error:
        path = str(registry.path(configured.name))
        raise TargetError(f"compute target {configured.name!r} can't be kept in {path!r}: {error}.") from error
    return target


def remove(workspace_dir: Path, name: str) -> None:
    """Remove a target from the workspace. Its runs keep a record of its settings.

    Raises:
        TargetError: The workspace has no target of this name.
    """
    registry = _registry(workspace_dir)
    if not (isinstance(name, str) and _NAME.fullmatch(name)) or not registry.path(name).exists():
        if name == LOCAL:
            raise TargetError("'local' is this machine and always there; it can't be removed.")
        known = names(workspace_dir)[1:]
        there = f"There are {', '.join(known)}." if known else "It has none but 'local'."
        raise TargetError(f"no compute target {name!r} in the workspace.{did_you_mean(str(name), known)} {there}")
    registry.remove(name)


def keep_copy(run_dir: Path, configured: Configured) -> None:
    """Write a target's description into a run's folder, for programs that read the run."""
    write_json(RunFolder(run_dir).target, configured.to_json(), mode=OWNED)


def target_of_run(run_dir: Path) -> Target:
    """Return the target of a run, with the settings at its submission.

    If the run's folder has no copy of the settings, return the workspace's target of the recorded name.

    Raises:
        TargetError: The settings can't be read, or the target does not exist or can't be loaded.
    """
    path = RunFolder(run_dir).target
    if path.exists():
        return Configured.from_json(read_json(path), str(path)).make()
    record = read_json(RunFolder(run_dir).job)
    name = record.get("target") if isinstance(record, dict) else None
    return find_target(name if isinstance(name, str) else LOCAL, run_dir.parent.parent)


def _registry(workspace_dir: Path) -> Documents:
    # Import this module here: a supervisor reads its target's description from the run's folder, so it never needs this module.
    from paceline.system.registry import Documents

    return Documents(workspace_dir / "compute", _NAME)


def _read_file(path: Path, name: str) -> Configured:
    found = Configured.from_json(read_json(path), str(path))
    if found.name != name:
        raise TargetError(f"{str(path)!r} names itself {found.name!r}. Give the file and the name in it the same name.")
    return found


def _stands_alone(kind: str) -> bool:
    try:
        options = getattr(kind_class(kind), "OPTIONS", ())
    except TargetError:
        return kind in OWN  # don't raise the error here, because creating the target raises it, too
    return not any(option.is_required for option in options)


def kind_names() -> list[str]:
    """Return the names of all kinds of target, sorted."""
    return plugins.names(GROUP, OWN)


def kind_class(kind: str) -> Any:
    """Return the class of a kind, to be called with (name, settings).

    Raises:
        TargetError: The kind does not exist, or its module can't be loaded.
    """
    place = OWN.get(kind) or plugins.installed(GROUP).get(kind)
    if place is None:
        meant = did_you_mean(kind, kind_names())
        raise TargetError(f"there is no kind {kind!r} of compute target.{meant} There are {', '.join(kind_names())}.")
    return _load(kind, place)


def kind_options(kind: str) -> tuple[Option, ...]:
    """Return the settings that a kind of target accepts.

    Raises:
        TargetError: The kind does not exist, or its module can't be loaded.
    """
    return tuple(getattr(kind_class(kind), "OPTIONS", ()))


def load_errors() -> dict[str, str]:
    """Return {kind: error} of the installed kinds that can't be loaded."""
    errors = {}
    for kind, place in plugins.installed(GROUP).items():
        if kind not in OWN:
            try:
                _load(kind, place)
            except TargetError as error:
                errors[kind] = str(error)
    return errors


def make_target(kind: str, name: str, settings: SettingValues) -> Any:
    """Create a target object of a kind, such as `ssh`, from its settings.

    Raises:
        TargetError: The kind does not exist or can't be loaded, or a setting is wrong.
    """
    made = kind_class(kind)
    if not hasattr(made, "OPTIONS"):
        # This kind is a plug-in without settings: its class has no OPTIONS, and its constructor takes no arguments.
        if settings:
            raise TargetError(f"kind {kind!r} has no settings; found {', '.join(settings)}. Leave them out.")
        return made()
    return made(name, settings)


def _load(kind: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the installed package of a plug-in may raise any exception when it is imported
        raise TargetError(
            f"compute targets of kind {kind!r} can't be used: {place} can't be loaded "
            f"({type(error).__name__}: {error}). Fix or remove the package that brings it."
        ) from error


class ComputeTargets(Mapping[str, Configured]):
    """A read-only mapping of names to the compute targets of a workspace.

    `[name]` raises KeyError for an unknown name, and TargetError for an invalid description.
    """

    def __init__(self, workspace_dir: Path) -> None:
        self._workspace_dir = workspace_dir

    def __getitem__(self, name: str) -> Configured:
        if name not in names(self._workspace_dir):
            try:
                read(self._workspace_dir, name)
            except TargetError as error:
                raise KeyError(str(error)) from None
        return read(self._workspace_dir, name)

    def __iter__(self) -> Iterator[str]:
        return iter(names(self._workspace_dir))

    def __len__(self) -> int:
        return len(names(self._workspace_dir))

    def __repr__(self) -> str:
        return f"ComputeTargets({', '.join(self)})"
