"""The compute targets of a workspace: a small file each, and a copy of it in every run that uses one.

    <workspace>/compute/<name>.json    {"name": "lab", "kind": "ssh", "settings": {"hosts": "/home/me/hosts.txt"}}
    <run folder>/target.json           the same, as it was when the run was submitted

`local` is always there. So is every kind that needs no settings, under its own name.
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
from paceline.system.names import name_rule
from paceline.targets.base import Examined, Target

if TYPE_CHECKING:
    from paceline.system.registry import Documents
    from paceline.targets.options import Option
    from paceline.targets.status import Status


LOCAL = "local"
_NAME = name_rule("_-", 64)

GROUP = "paceline.targets"
#: kind -> module:class, looked at before any that is installed.
OWN = {
    "local": "paceline.targets.local:ThisMachine",
    "ssh": "paceline.targets.ssh.target:SshTarget",
    "slurm": "paceline.targets.slurm.target:SlurmTarget",
    "ray": "paceline.targets.ray.target:RayTarget",
}


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A compute target as it was described: a name, a kind, and what of the kind's options is set."""

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_target_name(self.name)

    def make(self) -> Target:
        """The target itself, good for one run.

        Raises:
            TargetError: a setting is wrong, or the kind can't be loaded.
        """
        return cast(Target, make_target(self.kind, self.name, self.settings))

    @property
    def type(self) -> str:
        """The kind, by the Azure SDK's word."""
        return self.kind

    def get_status(self) -> Status:
        """Its nodes, what of them is in use, and who waits: one question to its engine, which may take a while.

        Raises:
            TargetError: it can't be reached, or its kind tells nothing of its nodes.
        """
        target: Any = self.make()
        if not isinstance(target, Examined):
            raise TargetError(
                f"compute target {self.name!r} is of kind {self.kind!r}, which tells nothing of its nodes."
            )
        found: Status = target.status()
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str) -> Configured:
        """where: for the message.

        Raises:
            TargetError: the data is no such description.
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
            "Mend it, or remove the file and add the target again."
        )


def check_target_name(name: object) -> str:
    """`name`, if it may name a target: a letter or digit, then letters, digits, `_` and `-`, 64 at most.

    Raises:
        TargetError: it may not.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TargetError(
            f"compute target name {name!r}: a name starts with a letter or digit and goes on with letters, digits, "
            "'_' and '-', at most 64 in all."
        )
    return name


def find_target(name: str, workspace_dir: Path) -> Target:
    """The compute target of this name: one that the workspace has, `local`, or a kind that needs no settings.

    Raises:
        TargetError: there is none, and the known ones are named; or it can't be made of its settings.
    """
    return read(workspace_dir, name).make()


def read(workspace_dir: Path, name: str) -> Configured:
    """The description of the target of this name.

    Raises:
        TargetError: there is none, or its file can't be read.
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        path = _registry(workspace_dir).path(name)
        if path.exists():
            return _read_file(path, name)
        if _stands_alone(name):
            return Configured(name=name, kind=name)
    known = names(workspace_dir)
    import difflib  # slow to load, for a mistake alone

    near = difflib.get_close_matches(str(name), known, n=1)
    meant = f" Is {near[0]!r} meant?" if near else ""
    raise TargetError(
        f"there is no compute target {name!r}.{meant} There are {', '.join(known)}. "
        "`paceline compute add NAME --kind KIND` adds one."
    )


def names(workspace_dir: Path) -> list[str]:
    """`local` first, then what the workspace has, sorted."""
    return [LOCAL, *(name for name in _registry(workspace_dir).names() if name != LOCAL)]


def add(workspace_dir: Path, configured: Configured, *, replace: bool = False) -> Target:
    """Keep the description in the workspace; the target made of it.

    What is kept is the target's own `settings`, where it has some to keep: a kind may put in what it has read from a
    file. replace: one of this name that is there already. Its runs go on with what they were submitted to.

    Raises:
        TargetError: there is one of this name, the name is a kind's and the kind another, a setting is wrong, or the
            file can't be written.
    """
    if configured.name == LOCAL:
        raise TargetError("'local' is this machine and always there. Choose another name.")
    if configured.name in OWN and configured.kind != configured.name:
        raise TargetError(
            f"the name {configured.name!r} is that of a kind, and this target is of kind {configured.kind!r}. "
            "Choose another name."
        )
    # Making it checks the settings, and may replace them: a list of hosts in a file is kept as the hosts.
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
            "--replace (replace=True) changes it; runs that use it go on as they were submitted."
        ) from error
    except OSError as error:
        path = str(registry.path(configured.name))
        raise TargetError(f"compute target {configured.name!r} can't be kept in {path!r}: {error}.") from error
    return target


def remove(workspace_dir: Path, name: str) -> None:
    """Forget a target. Whether runs use it is the caller's to ask; theirs is the copy in their folder.

    Raises:
        TargetError: there is none of this name in the workspace.
    """
    registry = _registry(workspace_dir)
    if not (isinstance(name, str) and _NAME.fullmatch(name)) or not registry.path(name).exists():
        if name == LOCAL:
            raise TargetError("'local' is this machine and always there; it can't be removed.")
        known = names(workspace_dir)[1:]
        there = f"There are {', '.join(known)}." if known else "It has none but 'local'."
        raise TargetError(f"there is no compute target {name!r} in the workspace. {there}")
    registry.remove(name)


def keep_copy(run_dir: Path, configured: Configured) -> None:
    """Leave the description in a run's folder, by which the run is read and canceled from then on."""
    write_json(RunFolder(run_dir).target, configured.to_json(), mode=OWNED)


def target_of_run(run_dir: Path) -> Target:
    """The target that a run was submitted to, as it was then.

    A run without a copy (of an older version) has that of its record's name.

    Raises:
        TargetError: the copy can't be read, or the kind can't be loaded any more.
    """
    path = RunFolder(run_dir).target
    if path.exists():
        return Configured.from_json(read_json(path), str(path)).make()
    record = read_json(RunFolder(run_dir).record)
    name = record.get("target") if isinstance(record, dict) else None
    return find_target(name if isinstance(name, str) else LOCAL, run_dir.parent.parent)


def _registry(workspace_dir: Path) -> Documents:
    # Not above: whoever looks after a run reads the copy in its folder.
    from paceline.system.registry import Documents

    return Documents(workspace_dir / "compute", _NAME)


def _read_file(path: Path, name: str) -> Configured:
    found = Configured.from_json(read_json(path), str(path))
    if found.name != name:
        raise TargetError(f"{str(path)!r} names itself {found.name!r}. Give the file and the name in it the same name.")
    return found


def _stands_alone(kind: str) -> bool:
    """True if there is such a kind, and one of it can be had without settings."""
    try:
        options = getattr(kind_class(kind), "OPTIONS", ())
    except TargetError:
        return kind in OWN  # making it says what is wrong with it
    return not any(option.is_required for option in options)


def kind_names() -> list[str]:
    """The names of all kinds, sorted."""
    return plugins.names(GROUP, OWN)


def kind_class(kind: str) -> Any:
    """The class of this kind: has OPTIONS, and makes targets of (name, settings).

    Raises:
        TargetError: there is no such kind, or its module can't be loaded; the message says which.
    """
    place = OWN.get(kind) or plugins.installed(GROUP).get(kind)
    if place is None:
        import difflib  # slow to load, for a mistake alone

        near = difflib.get_close_matches(kind, kind_names(), n=1)
        meant = f" Is {near[0]!r} meant?" if near else ""
        raise TargetError(f"there is no kind {kind!r} of compute target.{meant} There are {', '.join(kind_names())}.")
    return _load(kind, place)


def kind_options(kind: str) -> tuple[Option, ...]:
    """The settings that a target of this kind takes.

    Raises:
        TargetError: as `kind_class`.
    """
    return tuple(getattr(kind_class(kind), "OPTIONS", ()))


def load_errors() -> dict[str, str]:
    """Installed kind -> why it can't be loaded, for each that can't."""
    errors = {}
    for kind, place in plugins.installed(GROUP).items():
        if kind not in OWN:
            try:
                _load(kind, place)
            except TargetError as error:
                errors[kind] = str(error)
    return errors


def make_target(kind: str, name: str, settings: Mapping[str, Any]) -> Any:
    """A target of this kind.

    Raises:
        TargetError: as `kind_class`; or a setting is wrong.
    """
    made = kind_class(kind)
    if not hasattr(made, "OPTIONS"):
        # The plainest kind of plug-in: nothing to set, nothing to tell.
        if settings:
            raise TargetError(f"kind {kind!r} has no settings; found {', '.join(settings)}. Leave them out.")
        return made()
    return made(name, settings)


def _load(kind: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an installed package may raise anything at import
        raise TargetError(
            f"compute targets of kind {kind!r} can't be used: {place} can't be loaded "
            f"({type(error).__name__}: {error}). Mend or remove the package that brings it."
        ) from error


class ComputeTargets(Mapping[str, Configured]):
    """Name -> compute target: `local`, and those that the workspace has now. To be read; `paceline compute` changes them.

    `[name]` raises KeyError for a name that there is not, and TargetError for a description that can't be read.
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
