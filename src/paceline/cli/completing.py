"""Words that a shell offers for one that is not whole yet. Somebody waits for it at a key: names of files are read, little else,
and no library is loaded for it. Whatever goes wrong, nothing is offered: a traceback in a prompt helps nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import islice

from paceline.job.job import BACKENDS, GPU_VISIBILITIES, ON_HANG
from paceline.runs import states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import experiment_of
from paceline.targets import configured
from paceline.workspace import Workspace

_MOST = 100


def _quietly(offered: Callable[[Workspace], Iterable[str]]) -> Callable[[str], list[str]]:
    @wraps(offered)
    def complete(incomplete: str) -> list[str]:
        try:
            # Never made here: a key that is pressed must not leave a folder behind.
            words = offered(Workspace.from_config(create=False))
            # By a dictionary: in order, and each once.
            return list(islice((word for word in dict.fromkeys(words) if word.startswith(incomplete)), _MOST))
        except Exception:
            return []

    # typer goes by annotations: of the function itself, not of the one that it wraps.
    del complete.__wrapped__
    complete.__annotations__ = {"incomplete": str, "return": list[str]}
    return complete


@_quietly
def run_ids(workspace: Workspace) -> Iterable[str]:
    """Newest first."""
    return store.ids(workspace.runs_dir)


@_quietly
def experiments(workspace: Workspace) -> Iterable[str]:
    """Offer the experiments that have a run, the latest used first: an id begins with its experiment's name."""
    found = (experiment_of(run_id) for run_id in store.ids(workspace.runs_dir))
    return (name for name in found if name)


@_quietly
def targets(workspace: Workspace) -> Iterable[str]:
    return configured.names(workspace.path)


@_quietly
def services(workspace: Workspace) -> Iterable[str]:
    from paceline.services.store import all_folders

    return (folder.name for folder in all_folders(workspace.path))


def _of(words: Iterable[str]) -> Callable[[str], list[str]]:
    return _quietly(lambda workspace: words)


backends, gpu_visibilities, on_hang = _of(BACKENDS), _of(GPU_VISIBILITIES), _of(ON_HANG)


@_quietly
def tags(workspace: Workspace) -> Iterable[str]:
    """Of the latest runs: keys, and `key=value` for those that have one."""
    for run_id in store.ids(workspace.runs_dir)[:_MOST]:
        for key, value in tags_and_properties.read(RunFolder(workspace.runs_dir / run_id).notes).tags.items():
            yield key if value is None else f"{key}={value}"


@_quietly
def environments(workspace: Workspace) -> Iterable[str]:
    return workspace.environments


@_quietly
def datastores(workspace: Workspace) -> Iterable[str]:
    # By the names of their files: to open a store would load `paceline.data` while somebody waits at a key.
    folder = workspace.path / "datastores"
    names = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
    return dict.fromkeys(["default", *names])


@_quietly
def model_names(workspace: Workspace) -> Iterable[str]:
    from paceline.models.registry import versions_of

    return versions_of(workspace.path).names()


@_quietly
def models(workspace: Workspace) -> Iterable[str]:
    """Names, then versions, the latest first, then aliases."""
    from paceline.models import aliases
    from paceline.models.registry import versions_of

    versions = versions_of(workspace.path)
    names = versions.names()
    yield from names
    for name in names:
        yield from (f"{name}:{version}" for version in reversed(versions.versions(name)))
        yield from (f"{name}@{alias}" for alias in aliases.current(versions, name))


@_quietly
def variables(workspace: Workspace) -> Iterable[str]:
    """Of the shell: `--env NAME` takes one's value."""
    return sorted(os.environ)


def run_states(incomplete: str) -> list[str]:
    """In small letters for who begins so: `--status` takes any."""
    known = [state.lower() for state in states.ALL] if incomplete[:1].islower() else states.ALL
    return [state for state in known if state.startswith(incomplete)]
