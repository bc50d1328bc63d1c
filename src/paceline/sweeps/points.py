"""A point, as the script gets it: words on its command line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.job.job import Job
from paceline.sweeps.space import argument

#: What argparse takes for a negative number, by `ArgumentParser._negative_number_matcher` up to Python 3.13.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def job_of(job: Job, values: Mapping[str, Any]) -> Job:
    """The sweep's job with a trial's values after its own arguments, so that argparse, for which the last one counts, takes them.

    A word that sets the same argument among the job's own is taken out, as the Azure SDK does it.
    """
    own = without(job.arguments, [argument(name) for name in values])
    return dataclasses.replace(job, arguments=(*own, *words(values)))


def words(values: Mapping[str, Any]) -> list[str]:
    """`--name value` for each value. None leaves an argument out."""
    found: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        word, text = argument(name), text_of(value)
        # To argparse, -1e-05 and -a are options of their own where they stand alone; -0.5 is a value.
        if text.startswith("-") and not _NEGATIVE.fullmatch(text):
            found.append(f"{word}={text}")
        else:
            found += [word, text]
    return found


def text_of(value: Any) -> str:
    """A value as the script gets it: what `str` makes of it, lists and mappings as JSON."""
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else str(value)


def without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """The arguments less those of these names, with their values: `--lr 0.1` and `--lr=0.1`."""
    left: list[str] = []
    skipping = False
    for word in arguments:
        # A name straight after a name is no value: the one before it was a switch.
        if skipping and not _is_name(word):
            skipping = False
            continue
        # `--lr` alone: the word after it is its value; `--lr=0.1` is one word, and the next one is kept.
        skipping = word in names
        if not skipping and word.partition("=")[0] not in names:
            left.append(word)
    return left


def _is_name(word: str) -> bool:
    """Whether a word is an argument's name, not a value: -0.5 is a value."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False
