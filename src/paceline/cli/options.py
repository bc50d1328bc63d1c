"""Options of verbs, declared once in tables, and the parser's parameters made from them.

    @takes(VerbOption("-n --limit", "Most runs to list.", "N", int, least=1, default=25), JSON)
    def list_runs(*, limit: int, as_json: bool) -> None: ...

`paceline.cli.parser` makes a verb's help, completion and error messages from its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
from click.shell_completion import CompletionItem

from paceline.errors import UserError
from paceline.system import units

Verb = TypeVar("Verb", bound=Callable[..., int | None])
#: Parameter name of a command's function -> the value of its option.
Given: TypeAlias = "Mapping[str, Any]"

#: Function of a command -> its options, in the order in which `--help` shows them.
OPTIONS_OF: dict[Callable[..., int | None], tuple[VerbOption, ...]] = {}


def takes(*options: VerbOption) -> Callable[[Verb], Verb]:
    """Declare the options of a subcommand, whose function gets each as a keyword argument."""

    def keep(verb: Verb) -> Verb:
        OPTIONS_OF[verb] = options
        return verb

    return keep


@dataclass(frozen=True)
class VerbOption:
    """An option of a subcommand, or one of its arguments.

    Attributes:
        words: The option on a command line: "-j --nodes" or "--gpu/--no-gpu". A word without a dash is an argument.
        type: Type of the value: str, int, float, bool, Path, `Duration()`, or a function that parses a text. It is list for
            an option that may be repeated.
        name: Name of the parameter of the subcommand's function. Default: made from the first long word.
        key: Key in a job file (`paceline.job_files.job_file`) that gets the value unchanged.
        complete: Function that offers values when the user presses Tab. By default names of files are offered.
        needed: Whether the argument is required.
        least: Lower bound of a number, or None.
        most: Upper bound of a number, or None.
        section: Title in `--help` above this option and the options that follow it.
        may_be_empty: Whether the option accepts an empty text.
    """

    words: str
    help: str
    metavar: str | None = None
    type: Any = str
    name: str = ""
    default: Any = None
    key: str | None = None
    complete: str | None = None
    needed: bool = False
    least: float | None = None
    most: float | None = None
    section: str | None = None
    may_be_empty: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            # `--gpu/--no-gpu` switches a setting on or off. Take the parameter's name from the first option.
            words = self.words.split("/")[0].split()
            long = next((word[2:] for word in words if word[:2] == "--"), words[0])
            object.__setattr__(self, "name", long.replace("-", "_"))
        if self.type is bool and "/" not in self.words:
            object.__setattr__(self, "default", False)

    @property
    def is_argument(self) -> bool:
        return not self.words.startswith("-")

    @property
    def long_word(self) -> str:
        """Return the option's long form, such as "--nodes", or else its short form."""
        words = self.words.split("/")[0].split()
        return next((word for word in words if word[:2] == "--"), words[0])

    def parameter(self) -> click.Parameter:
        """Return the parameter that the parser (click) needs for this option."""
        common: dict[str, Any] = {
            "type": self._click_type(),
            "metavar": self.metavar or ("N" if self.type in (int, float) and not self.is_argument else None),
            "required": self.needed,
            "callback": self._checked,
            "shell_complete": self._offer,
        }
        # Set no default for a required argument, because click treats an argument with any default, even None, as optional.
        if not self.needed and self.type is not list:
            common["default"] = self.default
        if self.is_argument:
            if self.type is list:
                common["nargs"] = -1
            return _Argument(self, common)
        if self.type is bool:
            del common["type"], common["metavar"], common["shell_complete"]
            common["is_flag"] = True
        shown = self.default is not None and self.default is not False and not isinstance(self.type, Duration)
        return click.Option(
            [*self.words.split(" "), self.name],
            help=self.help,
            multiple=self.type is list,
            show_default=shown,
            **common,
        )

    def _click_type(self) -> Any:
        if self.type is Path:
            return click.Path(path_type=Path)
        if self.type is list:
            return str
        if self.least is None and self.most is None:
            return self.type
        bounds: Any = (self.least, self.most)
        number = click.IntRange(*bounds) if self.type is int else click.FloatRange(*bounds)
        number.name = number.name.replace(" range", "")  # in the error "'x' is not a valid integer range"
        return number

    def _checked(self, context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        """Return the option's value. Raise UserError for an empty text, such as "$UNSET"."""
        value = list(value) if isinstance(value, tuple) else value
        texts = value if isinstance(value, list) else [value]
        if self.is_argument or self.may_be_empty or all(str(text).strip() for text in texts):
            return value
        name = self.long_word
        raise UserError(f"{name} {texts[-1]!r} is empty. Give a value, or leave {name} out.")

    def _offer(self, context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self.complete is None:
            return [CompletionItem(incomplete, type="file")]
        from paceline.cli import completing

        return [CompletionItem(word) for word in completing.offer(self.complete, incomplete, context.params)]


class _Argument(click.Argument):
    """An argument that `--help` describes in the same way as options."""

    def __init__(self, option: VerbOption, settings: dict[str, Any]) -> None:
        super().__init__([option.name], **settings)
        # Don't name this attribute `help`, because newer versions of click would print it in a separate section.
        self.text = option.help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.text


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A duration such as 90s or 1h30m, converted to seconds.

    `unit` (w, d, h, m or s) applies to a number alone, such as "90". Durations below `least` seconds are refused.
    """

    name = "duration"

    def __init__(self, *, unit: str = "s", least: float = 0.0) -> None:
        self._unit, self._least = unit, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):  # the default, a float, is in seconds already
            return value
        try:
            seconds = units.seconds(value, unit=self._unit)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds < self._least:
            self.fail(f"{value!r} is too short; it has to be {self._least:g} s or more.", param, ctx)
        return seconds


JSON = VerbOption("--json", "Print JSON.", type=bool, name="as_json")
DETACH = VerbOption("-d --detach", "Return at once.", type=bool)
YES = VerbOption("-y --yes", "Do not ask.", type=bool)
DRY_RUN = VerbOption("--dry-run", "Only print what would be removed, and its size.", type=bool)
RUNS = VerbOption(
    "run_ids",
    "Runs: their ids, the beginnings of these, or their names; default: the latest.",
    "[RUN]...",
    list,
    complete="run_ids",
)
NAMED_RUNS = VerbOption(
    "run_ids",
    "Runs: their ids, the beginnings of these, or their names.",
    "RUN...",
    list,
    complete="run_ids",
    needed=True,
)
NAMED_RUN = VerbOption(
    "run_id", "Run: its id, the beginning of it, or its name.", "RUN", complete="run_ids", needed=True
)
LATEST_RUN = VerbOption(
    "run_id", "Run: its id, the beginning of it, or its name; default: the latest.", "[RUN]", complete="run_ids"
)
TLS = (
    VerbOption("--tls-cert", "Certificate (PEM), for https.", "FILE"),
    VerbOption("--tls-key", "Key of the certificate (PEM).", "FILE"),
)
