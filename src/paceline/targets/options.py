"""Settings of a kind of compute target, declared once for Python, JSON and the command line.

class SshTarget:
    OPTIONS = (Option("hosts", "file of lines `host slots=N`", type=Path, is_required=True),
               Option("folder", "on the hosts, for runs and snapshots"))

    def __init__(self, name="ssh", settings={}):
        values = check_settings("ssh", self.OPTIONS, settings, name)     # has a value for every option
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import TargetError
from paceline.job.secret_values import credentials_in
from paceline.remote.wire import LEAST_SILENCE_S, SILENCE_S

#: Types of an option: str, int, float, bool, list (of str), or Path (a local file, stored as its absolute path, a str).
OptionType: TypeAlias = "type[str] | type[int] | type[float] | type[bool] | type[list[str]] | type[Path]"

_NAME = re.compile(r"[a-z][a-z0-9_]*")
#: Settings of a target as read from JSON, a command line or Python: option -> value, not yet checked.
SettingValues: TypeAlias = "Mapping[str, Any]"

#: Characters that no setting may have: a line break, for example, would add a line to an sbatch script.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_METAVARS = {str: "TEXT", int: "N", float: "X", list: "TEXT", Path: "FILE"}


#: Type of an option -> (function that checks a value, words for the type in error messages).
_VALUES: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda value: isinstance(value, str), "a text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    float: (lambda value: isinstance(value, (int, float)) and not isinstance(value, bool), "a number"),
    Path: (lambda value: isinstance(value, str) and bool(value), "the path of a file, as text"),
    list: (
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value),
        'a list of texts, such as ["NAME1", "NAME2"]',
    ),
}


@dataclass(frozen=True)
class Option:
    """A setting of a kind of compute target.

    Attributes:
        name: The name in Python and JSON; `time_limit` is `--time-limit` on the command line.
        help: A short description without a full stop.
        choices: The allowed values; empty if all values are allowed.
        least: The smallest allowed number; None for no limit.
    """

    name: str
    help: str
    type: OptionType = str
    default: Any = None
    is_required: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"option {self.name!r}: lower-case letters, digits and '_'"
        assert self.type is bool or self.type in _METAVARS, f"option {self.name!r} has no type of an option"

    @property
    def word(self) -> str:
        """The command-line option, such as `--time-limit`."""
        return f"--{self.name.replace('_', '-')}"


def setting(help: str, type: OptionType = str, default: object = None, **rules: object) -> Any:
    """Return a dataclass field that is also an `Option` with values `rules`."""
    default = () if type is list else default
    return field(default=default, metadata={"help": help, "type": type, "default": default, **rules})


def options_of(settings: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares by `setting`."""
    return tuple(Option(each.name, **each.metadata) for each in fields(settings) if each.metadata)


#: An option of each kind of target whose nodes are other machines.
SILENCE = Option(
    "silence_s",
    "seconds without a word after which a node counts as lost, and to a node its supervisor",
    float,
    SILENCE_S,
    least=LEAST_SILENCE_S,
)
#: Options for prices, which every kind of target with settings accepts. `paceline usage --goodput` and a run's page show costs.
PRICES = (
    Option("core_price", "price of a core-hour, in a currency of your own", float, least=0),
    Option("gpu_price", "price of a GPU-hour, in the same currency", float, least=0),
)


def check_settings(
    kind: str, options: Sequence[Option], settings: SettingValues, name: str | None = None
) -> dict[str, Any]:
    """Return a value for each option: the setting, else its default.

    name: The target's name, for error messages.
    settings: The value of each option by name. The value None counts as not set.

    Raises:
        TargetError: A name is unknown, a value has the wrong type, or a required option is missing.
    """
    title = f"compute target {name!r}" if name not in (None, kind) else f"a compute target of kind {kind!r}"
    known = {option.name: option for option in options}
    for given in settings:
        if given not in known:
            raise TargetError(f"{title} has no setting {given!r}{_instead(str(given), list(known))}")
    values: dict[str, Any] = {}
    for option in options:
        value = settings.get(option.name)
        if value is None:
            if option.is_required:
                raise TargetError(f"{title} needs {option.name} ({option.word} {_metavar(option)}): {option.help}.")
            value = option.default
        else:
            _check(title, option, value)
        # Copy lists, so that callers who change a value don't change the option's default.
        values[option.name] = list(value) if option.type is list and value is not None else value
    return values


def parse_words(kind: str, options: Sequence[Option], words: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Parse command-line words such as `--partition gpu --requeue`.

    Return the settings and the positional words, which include everything after `--`. Paths become absolute. The
    function does not report missing required settings; `check_settings` does.

    Raises:
        TargetError: An option is unknown, lacks its value or has a wrong value; the message lists the kind's options.
    """
    known = {option.word: option for option in options}
    settings: dict[str, Any] = {}
    alone: list[str] = []
    left = list(words)
    while left:
        if left[0] == "--":
            alone += left[1:]
            break
        if not left[0].startswith("-"):
            alone.append(left.pop(0))
            continue
        word, equals, value = left.pop(0).partition("=")
        plain = word.replace("_", "-")
        negated = known.get(f"--{plain[5:]}") if plain.startswith("--no-") and plain not in known else None
        option = negated or known.get(plain)
        if option is None:
            raise TargetError(f"kind {kind!r} has no option {word}{_instead(plain, list(known))}")
        if option.type is bool and (negated is None or not equals):
            settings[option.name] = _truth(word, value) if equals else negated is None
            continue
        if negated is not None:
            raise TargetError(f"kind {kind!r} has no option {word}{_instead(plain, list(known))}")
        if not equals:
            if not left or left[0].startswith("--"):
                found = f"; {left[0]!r} is the next option" if left else ""
                raise TargetError(
                    f"{word} needs a value ({_metavar(option)}): {option.help}{found}. "
                    f"One that begins with a dash is given as {word}=VALUE."
                )
            value = left.pop(0)
        parsed = _parsed(word, option, value)
        if option.type is list:
            settings[option.name] = [*settings.get(option.name, []), parsed]
        else:
            settings[option.name] = parsed
    return settings, alone


def help_lines(options: Sequence[Option]) -> list[tuple[str, str]]:
    """Return (`--partition TEXT`, help) of each option, required options first."""
    lines = []
    for option in sorted(options, key=lambda option: not option.is_required):
        word = option.word if option.type is bool else f"{option.word} {_metavar(option)}"
        notes = [
            *(["required"] if option.is_required else []),
            *(["may be repeated"] if option.type is list else []),
            *([f"default: {option.default}"] if option.default not in (None, False, [], ()) else []),
        ]
        lines.append((word, option.help + (f" ({', '.join(notes)})" if notes else "")))
    return lines


def _check(title: str, option: Option, value: object) -> None:
    is_one, words = _VALUES[option.type]
    wanted = None if is_one(value) else words.replace("NAME", option.name)
    if wanted is None and option.choices and value not in option.choices:
        wanted = f"one of {', '.join(option.choices)}"
    if wanted is None and isinstance(value, (int, float)) and not math.isfinite(value):
        wanted = "a finite number"
    if wanted is None and option.least is not None and not value >= option.least:  # type: ignore[operator]
        wanted = f"{option.least:g} or more"
    if wanted is not None:
        raise TargetError(f"{title}: {option.name}={value!r} is not {wanted}. It is: {option.help}.")
    for text in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(text, str) and option.type is not Path and credentials_in(text):
            raise TargetError(
                f"{title}: {option.name} has a password in it, which is not shown. Settings are written down: leave it out. ssh "
                "logs in with keys, and Ray with --token-file."
            )
        if isinstance(text, str) and _CONTROL.search(text):
            raise TargetError(f"{title}: {option.name}={text!r} has a line break or control character. Leave it out.")


def _parsed(word: str, option: Option, value: str) -> Any:
    if option.type in (int, float):
        try:
            return option.type(value)
        except ValueError:
            what = "a whole number" if option.type is int else "a number"
            raise TargetError(f"{word} {value!r} is not {what}. It is: {option.help}.") from None
    if option.type is Path:
        return os.path.abspath(os.path.expanduser(value))
    return value


def _truth(word: str, value: str) -> bool:
    if value.lower() in ("true", "yes", "on", "1"):
        return True
    if value.lower() in ("false", "no", "off", "0"):
        return False
    raise TargetError(f"{word}={value!r} is neither true nor false. Write {word} or {word}=false.")


def _metavar(option: Option) -> str:
    return "|".join(option.choices) if option.choices else _METAVARS.get(option.type, "")


def _instead(given: str, known: Sequence[str]) -> str:
    if not known:
        return "; it has none at all."
    import difflib  # this module is slow to load, and only this error needs it

    near = difflib.get_close_matches(given, known, n=1)
    meant = f". Did you mean {near[0]}?" if near else "."
    return f"{meant} There are: {', '.join(known)}."
