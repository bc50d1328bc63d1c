"""Names of experiments, ids of runs, and readable run names such as `brave-otter-12`.

This module imports little, since `paceline run` needs an id before anything else.
"""

from __future__ import annotations

import itertools
import os
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from paceline.errors import FileNameError, WorkspaceError
from paceline.system import locks

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_EXPERIMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,254}")
#: The end of an id: time of creation (seconds and fraction), then the number of a trial or of a pipeline's step. A second number
#: follows for a repeated trial, and for a trial of a sweep that is itself a step of a pipeline.
_AGE = re.compile(r"_([0-9]+)_([0-9a-f]{8})(?:_([0-9]+)(?:_([0-9]{1,6}))?(?:_([0-9]{1,6}))?)?$")
#: Most file systems allow names of at most 255 bytes, and an id adds about 20 bytes to the experiment's name.
_EXPERIMENT_LENGTH = 200

_ADJECTIVES = (
    "agile amber apt bold brave bright brisk calm clear clever cosy crisp deft eager early fair fast fine fleet fond free "
    "fresh gentle glad golden grand happy hardy honest jolly keen kind light lively loyal lucky lunar mellow merry mild "
    "neat nimble noble patient plucky polite proud quick quiet rapid ready royal sharp shiny silver sleek smart snug solar "
    "solid spry steady stout sunny sure swift tidy upbeat vivid warm wise witty young zesty"
)
_ANIMALS = (
    "alpaca badger bear beaver bee bison boar camel cat cheetah cobra condor coyote crane cricket crow deer dingo dolphin "
    "dove duck eagle egret elk falcon ferret finch fox frog gazelle gecko goose hare hawk heron horse hyena ibex ibis "
    "jackal jaguar koala lark lemur leopard lion llama lynx magpie marten mole moose moth newt ocelot okapi orca osprey "
    "otter owl panda panther parrot pelican puffin puma quail rabbit raven robin salmon seal shark sparrow squid stork swan "
    "tapir tiger toad trout turtle viper vole walrus weasel whale wolf wombat yak zebra"
)
#: Seconds to wait for the lock of the list of names. Processes hold this lock only for milliseconds.
_PATIENCE_S = 5.0


def check_experiment_name(name: object) -> str:
    """Return `name` if it is a valid experiment name.

    Raises:
        WorkspaceError: The name does not start with a letter or digit, has characters besides letters, digits, `_` and
            `-`, or has more than 200 characters.
    """
    if not isinstance(name, str) or not _EXPERIMENT.fullmatch(name) or len(name) > _EXPERIMENT_LENGTH:
        raise WorkspaceError(
            f"experiment name {name!r}: a name starts with a letter or digit and goes on with letters, digits, "
            f"'_' and '-', at most {_EXPERIMENT_LENGTH} in all."
        )
    return name


def experiment_name(directory: str | Path) -> str:
    """Return the default name of an experiment, made from the source folder's name."""
    return plain_experiment_name(os.path.basename(directory))[:100]


def plain_experiment_name(name: object) -> str:
    """Return a valid experiment name for any name, with dashes for other characters."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", str(name)).strip("-_")[:_EXPERIMENT_LENGTH] or "default"


def is_run_id(text: object) -> TypeGuard[str]:
    """Return whether a text is a valid run id, and not a path."""
    return isinstance(text, str) and _RUN_ID.fullmatch(text) is not None


def check_run_id(run_id: object) -> str:
    """Return `run_id` if it is a valid run id.

    Raises:
        FileNameError: `run_id` is not a valid run id.
    """
    if not is_run_id(run_id):
        raise FileNameError(
            f"run id {run_id!r}: an id is letters, digits, '_', '-' and '.', and starts with a letter or digit. "
            "`paceline list` shows the ids there are."
        )
    return run_id


def new_run_id(experiment: str) -> str:
    """Return a new id, `<experiment>_<unix seconds>_<8 hex>`.

    The first five hexadecimal digits are the fraction of the second, so ids sort by time; the last three are random.
    """
    now = time.time()
    # Write the fraction of the second as five hexadecimal digits, which resolve a microsecond.
    return f"{experiment}_{int(now)}_{int(now % 1 * (1 << 20)):05x}{os.urandom(2).hex()[1:]}"


def age_key(run_id: str) -> tuple[int, str, int, int, int]:
    """Return a run id's sort key: its time, then the numbers of a child run."""
    found = _AGE.search(run_id)
    # Use -1 for a number that the id lacks. So a sweep, whose id has no trial number, sorts before its trial 0.
    if not found:
        return 0, run_id, -1, -1, -1
    return int(found[1]), found[2], int(found[3] or -1), int(found[4] or -1), int(found[5] or -1)


def experiment_of(run_id: str) -> str | None:
    """Return a run id's experiment, or None if a user chose the id."""
    found = _AGE.search(run_id)
    return run_id[: found.start()] if found else None


def is_trial(run_id: str) -> bool:
    """Return whether a run id belongs to a trial or pipeline step."""
    found = _AGE.search(run_id)
    return bool(found and found[3])


def take_name(workspace_dir: Path, experiment: str, run_id: str) -> str:
    """Reserve and return a readable name that is new in the experiment."""
    candidates = _candidates(run_id)
    folder = workspace_dir / "names"
    try:
        folder.mkdir(exist_ok=True)
        # Names of removed runs stay reserved, so that a name in a notebook or an e-mail never refers to a different run.
        with (
            locks.locked(folder / f"{experiment}.lock", patience_s=_PATIENCE_S),
            open(folder / experiment, "a+") as file,
        ):
            file.seek(0)
            taken = set(file.read().split())
            name = next(one for one in candidates if one not in taken)
            file.write(f"{name}\n")
        return name
    except OSError:
        # The list of names can't be locked: another user owns it, or the file system has no locks. A long number avoids clashes.
        return f"{next(candidates).rpartition('-')[0]}-{zlib.crc32(run_id.encode())}"


def _candidates(run_id: str) -> Iterator[str]:
    adjectives, animals = _ADJECTIVES.split(), _ANIMALS.split()
    for draw in itertools.count():
        chance = zlib.crc32(f"{run_id} {draw}".encode())
        chance, adjective = divmod(chance, len(adjectives))
        chance, animal = divmod(chance, len(animals))
        yield f"{adjectives[adjective]}-{animals[animal]}-{1 + chance % (99 if draw < 20 else 99_999)}"
