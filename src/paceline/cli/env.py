"""env list, show, build, prune: built environments, and registered ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.common import age, print_fields, print_json, print_table
from paceline.cli.options import JSON, Duration, VerbOption, takes
from paceline.cli.run_options import ISOLATED, PACKAGES, PYTHON
from paceline.cli.service_options import environment_of
from paceline.containers import KeptLayer, all_layers, prune_layers
from paceline.doctor.examination import size_text
from paceline.environments import registry
from paceline.environments.built import Built
from paceline.environments.environment import Environment
from paceline.environments.store import EnvironmentStore
from paceline.errors import EnvironmentSpecError
from paceline.job.environment import EnvironmentSpec
from paceline.pruning.environments import free_keys
from paceline.runs.record import utc_at
from paceline.runs.visible import visible, visible_line
from paceline.system.names import counted, some
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import ImageEnvironment

_KEY_SHOWN = 12
_PACKAGES_SHOWN = 4


@takes(JSON)
def list_environments(*, as_json: bool) -> None:
    """List built environments, last used first, and registered ones."""
    workspace = Workspace.from_config(create=False)
    found = _store(workspace).all()
    on_images = all_layers(_images_dir(workspace))
    registered = Environment.list(workspace)
    if as_json:
        print_json(
            {
                "environments": [built.to_json() for built in found],
                "on_images": [_image_json(kept) for kept in on_images],
                "registered": {name: environment.to_json() for name, environment in registered.items()},
            }
        )
        return
    if not found and not registered and not on_images:
        print(f"No environments in {workspace.path}. A run makes those it needs, and so does `paceline env build`.")
        return
    if found or on_images:
        rows = [_row(built) for built in found] + [_image_row(kept) for kept in on_images]
        print_table(("KEY", "KIND", "SIZE", "USED", "PACKAGES"), rows)
    if registered:
        print("\nRegistered:" if found or on_images else "Registered:")
        for name, environment in registered.items():
            print(f"  {name}, version {environment.version}: {visible(_wanted(environment))}")


@takes(
    VerbOption(
        "key_or_name", "Key or its beginning, or the name of a registered environment.", "KEY_OR_NAME", needed=True
    ),
    JSON,
)
def show(*, key_or_name: str, as_json: bool) -> None:
    """Show what an environment was made of, and its packages."""
    workspace = Workspace.from_config(create=False)
    store = _store(workspace)
    registered = Environment.list(workspace).get(key_or_name)
    # The user may give a name or the beginning of a key. If both match, the registered name has priority.
    built = _find(store, registered) if registered is not None else store.get(key_or_name)
    if as_json:
        print_json(
            {
                "registered": registered.to_json() if registered is not None else None,
                "built": built.to_json() if built is not None else None,
            }
        )
        return
    lines: list[tuple[str, str]] = []
    if registered is not None:
        lines += [("Name", f"{registered.name}, version {registered.version}"), ("Asked for", _wanted(registered))]
    if built is not None:
        lines += [
            ("Key", built.key),
            ("Kind", _kind(built)),
            ("Asked for", "" if registered is not None else _wanted(built.environment)),
            ("Made from", built.base_python),
            ("Python", str(built.python)),
            ("Built", f"{built.created_utc}, in {built.build_s:.1f} s"),
            ("Last used", built.last_used_utc),
            ("Size", size_text(built.size_bytes)),
        ]
    elif registered is not None and registered.needs_build:
        lines.append(("Built", f"not with {_base(registered)} yet: paceline env build {registered.name}"))
    print_fields(lines)
    for title, packages in (("pip", built.pip if built else ()), ("conda", built.conda if built else ())):
        if packages:
            print(f"\nInstalled by {title}:")
            for package in packages:
                print(f"  {visible(package)}")


_BUILD = (
    VerbOption("registered", "Name of a registered environment.", "[NAME]"),
    *PACKAGES,
    PYTHON,
    ISOLATED,
    VerbOption("--name", "Register the environment under this name.", "NAME"),
    JSON,
)


@takes(*_BUILD)
def build(**given: Any) -> None:
    """Build an environment now, so that the next run finds it. Prints its interpreter's path."""
    workspace = Workspace.from_config()
    registered, name = given["registered"], given["name"]
    if registered is not None:
        if any(given[option.name] for option in _BUILD if option.name not in ("registered", "as_json")):
            raise EnvironmentSpecError(
                f"{registered!r} is registered with its packages. Leave the options out, or leave the name out and give --name."
            )
        environment: EnvironmentSpec = Environment.get(workspace, registered)
    else:
        environment = environment_of(given, Path.cwd())
        if not environment.needs_build:
            raise EnvironmentSpecError(
                "there is nothing to build. Give --pip, --requirements, --conda or --conda-file, or a registered name."
            )
        if name is not None:
            environment = replace(environment, name=name)
    built = None
    # Build the environment before registering it, because a registered environment that can't be built would be useless.
    if environment.needs_build:
        built = _store(workspace).ensure(environment, _base(environment), _say)
    if name is not None:
        environment = registry.register(environment, workspace.path)
        _say(f"registered as {name!r}, version {environment.version}")
    if given["as_json"]:
        print_json({"environment": environment.to_json(), "built": built.to_json() if built is not None else None})
    elif built is None:
        print(_base(environment))
    else:
        _say(f"environment {built.key} is ready")
        # Print only the path on standard output, for $(paceline env build ...).
        print(built.python)


@takes(
    VerbOption(
        "--unused-for",
        "Only environments that were unused for this time: 12h; a number alone is days.",
        type=Duration(unit="d"),
        name="unused_for_s",
        default=0.0,
    ),
    VerbOption("--dry-run", "Only print what would be removed.", type=bool),
    JSON,
)
def prune(*, unused_for_s: float, dry_run: bool, as_json: bool) -> None:
    """Remove environments that no run uses now. Runs build them again if needed."""
    workspace = Workspace.from_config(create=False)
    # Also keep environments of queued runs, which hold no lock on their environment yet.
    only = free_keys(workspace.path)
    gone = _store(workspace).prune(unused_for_s=unused_for_s, only=only, dry_run=dry_run)
    on_images = prune_layers(_images_dir(workspace), unused_for_s=unused_for_s, only=only, dry_run=dry_run)
    if as_json:
        print_json([*(built.to_json() for built in gone), *map(_image_json, on_images)])
        return
    for built in gone:
        print(f"{built.key[:_KEY_SHOWN]}  {size_text(built.size_bytes)}  {visible(_installed(built))}")
    for kept in on_images:
        print(f"{kept.key[:_KEY_SHOWN]}  on an image  {visible(some(kept.layer.packages, _PACKAGES_SHOWN))}")
    total = sum(built.size_bytes for built in gone)
    count = counted(len(gone) + len(on_images), "environment")
    print(f"{'Would remove' if dry_run else 'Removed'} {count}, {size_text(total)}.")


def _store(workspace: Workspace) -> EnvironmentStore:
    return EnvironmentStore(workspace.path / "environments")


def _images_dir(workspace: Workspace) -> Path:
    return workspace.path / "environments" / "images"


def _image_json(kept: KeptLayer) -> ImageEnvironment:
    return {"key": kept.key, "prefix": kept.layer.prefix, "pip": list(kept.layer.packages)}


def _image_row(kept: KeptLayer) -> tuple[str, ...]:
    used = utc_at(kept.used_at)
    return kept.key[:_KEY_SHOWN], "pip, on an image", "", age(used), some(kept.layer.packages, _PACKAGES_SHOWN)


def _base(environment: EnvironmentSpec) -> str:
    return environment.python or sys.executable


def _find(store: EnvironmentStore, environment: EnvironmentSpec) -> Built | None:
    return store.find(environment, _base(environment)) if environment.needs_build else None


def _say(line: str) -> None:
    print(visible_line(line), file=sys.stderr, flush=True)


def _row(built: Built) -> tuple[str, ...]:
    return (
        built.key[:_KEY_SHOWN],
        _kind(built),
        size_text(built.size_bytes),
        age(built.last_used_utc),
        _installed(built),
    )


def _kind(built: Built) -> str:
    return f"{'conda' if built.conda else 'pip'}, {'layered' if built.is_layered else 'whole'}"


def _installed(built: Built) -> str:
    return some([*built.conda, *built.pip], _PACKAGES_SHOWN) or "nothing beside the base's"


def _wanted(environment: EnvironmentSpec) -> str:
    lines = [line for line in (environment.pip_requirements or "").splitlines() if line.strip()]
    text = some([*environment.conda_packages, *environment.pip_packages, *lines], _PACKAGES_SHOWN)
    return text or (f"the interpreter {environment.python}" if environment.python else "the submitting interpreter")


verbs = {"list": list_environments, "show": show, "build": build, "prune": prune}
