"""Names of experiments and ids of runs: what they may be, and new ones.

Loads little: `paceline run` makes a run's id before it loads anything else of a run.
"""

from __future__ import annotations

import itertools
import os
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import FileNameError, WorkspaceError
from paceline.system import locks

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_EXPERIMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,254}")
#: The time in an id: seconds, and their fraction. A sweep's trials and a pipeline's steps have a number after it; trials one more
#: from their second run on, and those of a sweep that is a step another one.
_AGE = re.compile(r"_([0-9]+)_([0-9a-f]{8})(?:_([0-9]+)(?:_([0-9]{1,6}))?(?:_([0-9]{1,6}))?)?$")
#: Longest file name that the usual file systems take is 255 bytes; an id adds 20 to the experiment's name.
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
#: Names are taken in moments.
_PATIENCE_S = 5.0


def check_experiment_name(name: object) -> str:
    """`name`, if it may name an experiment: a letter or digit, then letters, digits, `_` and `-`, 200 at most.

    Raises:
        WorkspaceError: it may not.
    """
    if not isinstance(name, str) or not _EXPERIMENT.fullmatch(name) or len(name) > _EXPERIMENT_LENGTH:
        raise WorkspaceError(
            f"experiment name {name!r}: a name starts with a letter or digit and goes on with letters, digits, "
            f"'_' and '-', at most {_EXPERIMENT_LENGTH} in all."
        )
    return name


def check_run_id(run_id: object) -> str:
    """`run_id`, if it has the form of a run's id, so that it can't name anything outside the folder of runs.

    Raises:
        FileNameError: it has not.
    """
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise FileNameError(
            f"run id {run_id!r}: an id is letters, digits, '_', '-' and '.', and starts with a letter or digit. "
            "`paceline list` shows the ids there are."
        )
    return run_id


def new_run_id(experiment: str) -> str:
    """A fresh id, `<experiment>_<unix seconds>_<8 hex>`.

    The first five of the hexadecimal digits are the fraction of the second, so that ids sort in the order in which
    they were made; the last three are random.
    """
    now = time.time()
    # Five hexadecimal digits count to 2**20, which makes each step about a microsecond.
    return f"{experiment}_{int(now)}_{int(now % 1 * (1 << 20)):05x}{os.urandom(2).hex()[1:]}"


def age_key(run_id: str) -> tuple[int, str, int, int, int]:
    """Sorts ids by the time in them, children by their numbers; ids that were given by hand, without one, come first."""
    found = _AGE.search(run_id)
    # A sweep has no number behind its time, and stands before its trial 0.
    if not found:
        return 0, run_id, -1, -1, -1
    return int(found[1]), found[2], int(found[3] or -1), int(found[4] or -1), int(found[5] or -1)


def experiment_of(run_id: str) -> str | None:
    """The experiment whose name the id begins with; None of one that was given by hand."""
    found = _AGE.search(run_id)
    return run_id[: found.start()] if found else None


def is_trial(run_id: str) -> bool:
    """Whether this is the id of a sweep's trial or a pipeline's step, which has a number behind its parent's."""
    found = _AGE.search(run_id)
    return bool(found and found[3])


def take_name(workspace_dir: Path, experiment: str, run_id: str) -> str:
    """Return a name for the run that no run of the experiment has had, and note that it is taken."""
    candidates = _candidates(run_id)
    folder = workspace_dir / "names"
    try:
        folder.mkdir(exist_ok=True)
        # Names of removed runs stay: a name in a notebook or a mail means one run for good.
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
        # Another user's folder, or a file system without locks: a long number makes the name unique.
        return f"{next(candidates).rpartition('-')[0]}-{zlib.crc32(run_id.encode())}"


def _candidates(run_id: str) -> Iterator[str]:
    """Yield names that follow from the id, with numbers that grow once many are taken."""
    adjectives, animals = _ADJECTIVES.split(), _ANIMALS.split()
    for draw in itertools.count():
        chance = zlib.crc32(f"{run_id} {draw}".encode())
        chance, adjective = divmod(chance, len(adjectives))
        chance, animal = divmod(chance, len(animals))
        yield f"{adjectives[adjective]}-{animals[animal]}-{1 + chance % (99 if draw < 20 else 99_999)}"
