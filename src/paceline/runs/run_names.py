"""Readable names of runs, such as `brave-otter-12`: drawn from the run's id, never twice in an experiment."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path

from paceline.system import locks

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


def take(workspace_dir: Path, experiment: str, run_id: str) -> str:
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
