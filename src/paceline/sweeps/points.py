"""Ways to pass a trial's values to its script: arguments, environment variables or a file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.errors import SweepError
from paceline.job.job import Job
from paceline.sweeps.expressions import Choice, Fixed
from paceline.sweeps.space import Dimension, Space, argument
from paceline.system.names import did_you_mean

#: Ways to pass values, or the path of a JSON file. Examples in this order: `--lr 0.1`, `--lr=0.1`, `--sizes 1 2`,
#: `--size=1 --size=2`, `--sizes=1,2`, `lr=0.1`, `+lr=0.1`, a variable lr.
ARGUMENTS, EQUALS, WORDS, REPEATED, COMMAS, ASSIGNMENTS, ADDITIONS, ENVIRONMENT = WAYS = (
    *("arguments", "equals", "words", "repeated", "commas", "assignments", "additions", "environment"),
)
#: Spelling of a way to pass values, which users may write -> name of the way.
_FORMS = {
    "--name value": ARGUMENTS,
    "--name=value": EQUALS,
    "--name value value": WORDS,
    "--name=value --name=value": REPEATED,
    "--name=value,value": COMMAS,
    "name=value": ASSIGNMENTS,
    "+name=value": ADDITIONS,
}
#: Ways to pass values that begin with dashes. Only with these can a switch (an option without a value) be passed.
_DASHED = (ARGUMENTS, EQUALS, WORDS, REPEATED, COMMAS)

#: Way to pass values that has a form for lists -> function that returns the command-line words for a list.
_LISTS: dict[str, Callable[[str, Sequence[object]], list[str]]] = {
    WORDS: lambda word, items: [word, *map(text_of, items)],
    REPEATED: lambda word, items: [f"{word}={text_of(item)}" for item in items if item is not None],
    COMMAS: lambda word, items: [f"{word}={','.join(map(text_of, items))}"],
}

#: Pattern by which argparse recognizes negative numbers.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def job_of(
    job: Job,
    values: Mapping[str, object],
    pass_as: str = ARGUMENTS,
    source: Path | None = None,
    switches: Sequence[str] = (),
) -> Job:
    """Return the sweep's job with a trial's values for the script.

    The values' arguments follow the job's arguments, and replace arguments of the same names, as in the Azure SDK. If
    `pass_as` is the name of a JSON file, the values are merged into the file of this name in `source`.

    `source`: The folder of the sweep's snapshot.
    `switches`: Arguments without a value, such as `--amp` or `--amp/--no-amp`.

    Raises:
        SweepError: The file is not a JSON object, or has a number "a" although a hyperparameter is named "a.b".
        JobError: A hyperparameter has the name of an environment variable that a job may not set.
    """
    if pass_as in _DASHED:
        own = without(job.arguments, [argument(name) for name in values], switches)
        return dataclasses.replace(job, arguments=(*own, *words(values, switches, pass_as)))
    plain = {name.lstrip("-"): value for name, value in values.items()}
    if pass_as in (ASSIGNMENTS, ADDITIONS):
        said = [word for word in job.arguments if "=" not in word or word.partition("=")[0].lstrip("+") not in plain]
        plus = "+" if pass_as == ADDITIONS else ""
        words_of_values = [f"{plus}{name}={text_of(value)}" for name, value in plain.items() if value is not None]
        return dataclasses.replace(job, arguments=(*said, *words_of_values))
    if pass_as == ENVIRONMENT:
        variables = {variable(name): text_of(value) for name, value in plain.items() if value is not None}
        return dataclasses.replace(job, environment_variables={**job.environment_variables, **variables})
    text = json.dumps(_nested(plain, _there(pass_as, source), pass_as), indent=2)
    return dataclasses.replace(job, files={**job.files, pass_as: f"{text}\n"})


def way(given: object) -> str:
    """Convert a form such as "--name=value" to its name, "equals". Return names unchanged."""
    return _FORMS.get(given, given) if isinstance(given, str) else given  # type: ignore[return-value]


def check_way(pass_as: object, space: Space) -> None:
    """Raise SweepError unless `pass_as` is valid and can pass the space's names."""
    if not isinstance(pass_as, str) or (pass_as not in WAYS and not pass_as.endswith(".json")):
        raise SweepError(
            f"pass_as={pass_as!r}: write one of {', '.join(WAYS)}, a form such as '--name=value', or the name of "
            f"a JSON file, such as 'parameters.json'.{did_you_mean(str(pass_as), WAYS)}"
        )
    names = list(dict.fromkeys(name.lstrip("-") for name in space.names))
    if pass_as == ENVIRONMENT:
        seen: dict[str, str] = {}
        for name in names:
            if not re.fullmatch(r"[A-Za-z_]\w*", variable(name), re.ASCII):
                raise SweepError(f"{name!r} can be no variable of an environment. Begin it with a letter.")
            if (other := seen.setdefault(variable(name), name)) != name:
                raise SweepError(f"{other!r} and {name!r} are one variable of the environment, {variable(name)}.")
    elif pass_as not in WAYS:
        path = PurePosixPath(pass_as)
        if path.is_absolute() or ".." in path.parts or str(path) != pass_as or path.parts[0] == "outputs":
            raise SweepError(f"pass_as={pass_as!r} is not a path below the script's working directory.")
        for name in names:
            if above := next((other for other in names if name.startswith(f"{other}.")), None):
                raise SweepError(f"{above!r} and {name!r}: in a file {above!r} can't be both a value and an object.")


def check_switches(switches: Sequence[str], pass_as: str, space: Space) -> None:
    """Raise SweepError unless all switches are true-or-false arguments."""
    if switches and pass_as not in _DASHED:
        raise SweepError(f"switches={list(switches)!r} with pass_as={pass_as!r}: leave them out; they are arguments.")
    for switch in switches:
        word, slash, off = switch.partition("/")
        if bool(slash) != bool(off) or (off and not off.startswith("-")):
            raise SweepError(f"the switch {switch!r} is neither --name nor --name/--no-name.")
        meant = [dimension for dimension in space.parameters if argument(dimension.name) == word]
        if not meant:
            raise SweepError(
                f"the switch {switch!r} is not a hyperparameter. Give one of the space's: {', '.join(space.names)}."
            )
        if wrong := next((dimension for dimension in meant if not is_of_switch(dimension)), None):
            raise SweepError(f"the switch {switch!r} has values beside true and false: {wrong.expression.to_json()}.")


def as_switch(name: object) -> str:
    """Return a switch with its dashes: `--amp`, or `--amp/--no-amp` for amp/no-amp.

    Raises:
        SweepError: The name is not a string.
    """
    if not isinstance(name, str):
        raise SweepError(f"switches: {name!r} is not a name of a hyperparameter. Give '--amp' or '--amp/--no-amp'.")
    word, slash, off = name.partition("/")
    return f"{argument(word)}/{argument(off)}" if slash and off else f"{argument(word)}{slash}"


def is_of_switch(dimension: Dimension) -> bool:
    """Return whether a hyperparameter's values are only True, False or None."""
    count = dimension.expression.count
    if count is None or not isinstance(dimension.expression, (Choice, Fixed)):
        return False
    values = [dimension.expression.value(index) for index in range(count)]
    return all(value is None or isinstance(value, bool) for value in values) and any(v is not None for v in values)


def variable(name: str) -> str:
    """Return a hyperparameter's name as an environment variable, with `_` for other characters."""
    return re.sub(r"\W", "_", name.lstrip("-"), flags=re.ASCII)


def words(values: Mapping[str, object], switches: Sequence[str] = (), pass_as: str = ARGUMENTS) -> list[str]:
    """Return a trial's values as command-line words.

    Omit arguments with the value None. A true argument in `switches` becomes one word, without a value.
    """
    opposites = {switch.partition("/")[0]: switch.partition("/")[2] for switch in switches}
    command_words: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        word, text = argument(name), text_of(value)
        if word in opposites:
            command_words += filter(None, [word if value else opposites[word]])
        elif pass_as in _LISTS and isinstance(value, (list, tuple)):
            command_words += _LISTS[pass_as](word, value)
        # Use `=` for values that argparse would parse as options, such as -1e-05 or -a, but not -0.5.
        elif pass_as in (EQUALS, REPEATED, COMMAS) or (text.startswith("-") and not _NEGATIVE.fullmatch(text)):
            command_words.append(f"{word}={text}")
        else:
            command_words += [word, text]
    return command_words


def text_of(value: object) -> str:
    """Return a value as text for the script. Lists and mappings become JSON."""
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else str(value)


def without(arguments: Sequence[str], names: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """Return the arguments without these options and their values."""
    alone = {word for switch in switches for word in switch.split("/")}
    left: list[str] = []
    skipping = False
    for word in arguments:
        # Skip an option's value. If a name follows instead, the option is a switch, which has no value.
        if skipping and not _is_name(word):
            skipping = False
            continue
        # A value follows the word `--lr`, but not the word `--lr=0.1`.
        skipping = word in names and word not in alone
        if not skipping and word not in alone and word.partition("=")[0] not in names:
            left.append(word)
    return left


def _is_name(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _there(name: str, source: Path | None) -> dict[str, object]:
    try:
        content = json.loads((source / name).read_text()) if source is not None else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SweepError(f"{name!r} of the source, which the values replace in part, must be JSON: {error}.") from None
    if not isinstance(content, dict):
        raise SweepError(f"{name!r} of the source, which the values replace in part, must be a JSON object.")
    return content


def _nested(values: Mapping[str, object], over: dict[str, Any], file: str) -> dict[str, object]:
    for name, value in values.items():
        *parts, last = name.split(".")
        inner = over
        for part in parts:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SweepError(f"{name!r}: {part!r} in {file!r} of the source is not an object.")
        inner[last] = value
    return over
