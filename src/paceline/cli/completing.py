"""The words with which a shell completes an unfinished word, and the shell's completion script.

The user waits after pressing Tab, so this module reads almost only file names, loads no library, and never raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.job.job import BACKENDS, GPU_VISIBILITIES, ON_FAILURE, ON_HANG, PRIORITIES, WARM
from paceline.job.notify import EVENTS
from paceline.runs import states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import experiment_of
from paceline.targets import configured
from paceline.workspace import Workspace

_MOST = 100


def offer(name: str, incomplete: str, given: Mapping[str, Any]) -> list[str]:
    """Return words that begin with `incomplete`, or [] after any error.

    `name` is the kind of words, such as "run_ids". `given` maps the verb's other parameters to their values.
    """
    try:
        # Don't create the workspace, because pressing the Tab key should leave no folder behind.
        words = _OFFERS[name](Workspace.from_config(create=False), incomplete, given)
        # dict.fromkeys removes duplicates and keeps the order.
        return list(islice((word for word in dict.fromkeys(words) if word.startswith(incomplete)), _MOST))
    except Exception:
        return []


def script(shell: str | None = None) -> str:
    """Return a shell's completion script. Default: the shell in $SHELL."""
    from click import Command
    from click.shell_completion import get_completion_class

    shell = shell or _shell()
    completion = get_completion_class(shell)
    if completion is None:
        raise UserError(f"there is no completion for the shell {shell!r}. Set SHELL to bash, zsh or fish.")
    return completion(Command("paceline"), {}, "paceline", "_PACELINE_COMPLETE").source()


def install() -> str:
    """Set up completion for $SHELL, and return a message on what was done."""
    shell, home = _shell(), Path.home()
    text = script(shell)
    if shell == "fish":
        path, start_file = home / ".config/fish/completions/paceline.fish", None
    else:
        path, start_file = home / f".local/share/paceline/completion.{shell}", home / f".{shell}rc"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if start_file is not None:
        line = f"source '{path}'"
        before = start_file.read_text() if start_file.exists() else ""
        if line not in before.splitlines():
            start_file.write_text(f"{before}\n{line}\n")
    return f"Completion for {shell} is set up in {path}. It works in each shell that you start from now on."


def _shell() -> str:
    return os.path.basename(os.environ.get("SHELL", "")) or "bash"


def _run_ids(workspace: Workspace, *_: object) -> Iterable[str]:
    # `store.ids` returns the newest runs first.
    return store.ids(workspace.runs_dir)


def _experiments(workspace: Workspace, *_: object) -> Iterable[str]:
    # A run's id begins with its experiment's name. Ids are sorted from new to old, so the latest experiments come first.
    found = (experiment_of(run_id) for run_id in store.ids(workspace.runs_dir))
    return (name for name in found if name)


def _targets(workspace: Workspace, *_: object) -> Iterable[str]:
    return configured.names(workspace.path)


def _services(workspace: Workspace, *_: object) -> Iterable[str]:
    from paceline.services.store import all_folders

    return (folder.name for folder in all_folders(workspace.path))


def _tags(workspace: Workspace, *_: object) -> Iterable[str]:
    # Offer the tags of the latest runs: keys, and `key=value` for a tag with a value.
    for run_id in store.ids(workspace.runs_dir)[:_MOST]:
        for key, value in tags_and_properties.read(RunFolder(workspace.runs_dir / run_id).notes).tags.items():
            yield key if value is None else f"{key}={value}"


def _environments(workspace: Workspace, *_: object) -> Iterable[str]:
    return workspace.environments


def _datastores(workspace: Workspace, *_: object) -> Iterable[str]:
    # Read the datastores' names from file names: loading `paceline.data` would take time while the user waits.
    folder = workspace.path / "datastores"
    names = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
    return dict.fromkeys(["default", *names])


def _model_names(workspace: Workspace, *_: object) -> Iterable[str]:
    from paceline.models.registry import versions_of

    return versions_of(workspace.path).names()


def _models(workspace: Workspace, *_: object) -> Iterable[str]:
    from paceline.models import aliases
    from paceline.models.registry import versions_of

    versions = versions_of(workspace.path)
    names = versions.names()
    # Offer the models' names first, then their versions (latest first), then their aliases.
    yield from names
    for name in names:
        yield from (f"{name}:{version}" for version in reversed(versions.versions(name)))
        yield from (f"{name}@{alias}" for alias in aliases.current(versions, name))


def _variables(workspace: Workspace, *_: object) -> Iterable[str]:
    # Offer the names of the shell's variables: without a value, `--env NAME` takes the variable's value from the shell.
    return sorted(os.environ)


def _run_states(workspace: Workspace, incomplete: str, *_: object) -> Iterable[str]:
    # The option `--status` ignores case. Offer the states in lower case if the user has begun in lower case.
    return [state.lower() for state in states.ALL] if incomplete[:1].islower() else states.ALL


def _templates(workspace: Workspace, *_: object) -> Iterable[str]:
    return workspace.templates


def _schedules(workspace: Workspace, *_: object) -> Iterable[str]:
    return workspace.schedules


def _topics(*_: object) -> Iterable[str]:
    from paceline.cli.verb_help import page_files

    return (path.stem for path in page_files())


def _examples(*_: object) -> Iterable[str]:
    from paceline.cli.verb_help import installed

    return sorted(path.name for path in installed("examples").iterdir())


def _file_names(workspace: Workspace, incomplete: str, given: Mapping[str, Any]) -> Iterable[str]:
    from paceline.cli.common import folder_of
    from paceline.runs import downloads

    return (file.name for file in downloads.files(folder_of(given.get("run_id"))))


_OFFERS: dict[str, Callable[[Workspace, str, Mapping[str, Any]], Iterable[str]]] = {
    "backends": lambda *_: BACKENDS,
    "gpu_visibilities": lambda *_: GPU_VISIBILITIES,
    "priorities": lambda *_: PRIORITIES,
    "on_failure": lambda *_: ON_FAILURE,
    "on_hang": lambda *_: ON_HANG,
    "notify_on": lambda *_: EVENTS,
    "warm": lambda *_: WARM,
    "run_ids": _run_ids,
    "examples": _examples,
    "experiments": _experiments,
    "targets": _targets,
    "services": _services,
    "tags": _tags,
    "templates": _templates,
    "schedules": _schedules,
    "topics": _topics,
    "environments": _environments,
    "datastores": _datastores,
    "model_names": _model_names,
    "models": _models,
    "variables": _variables,
    "run_states": _run_states,
    "file_names": _file_names,
}
