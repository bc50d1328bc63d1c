"""Options and arguments of verbs as tables, and the two ways to read a command line by one.

    table ──┬── takes(table)(verb)   the parser's: help, completion, and a message for whatever is wrong (`declare`)
            └── read(table, words)   at once, without the parser; None for all that is not plainly right

The parser takes longer to import than a worker takes to start. So `paceline run` asks `read` first, and leaves to the parser
what `read` does not take. A test gives both the same words and compares what they make of them.
"""

from __future__ import annotations

# Not typing's, which takes longer to load than to read a command line by the table.
TYPE_CHECKING = False

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Sequence
    from typing import Any


class VerbOption:
    """An option of a verb, or one of its arguments.

    words: as they are written, "-j --nodes", with "/" before the word for no, "--gpu/--no-gpu"; one word without a dash is
        an argument, which may be left out unless it is `needed`.
    type: of its value: str, int, Path, bool, float (a duration, in seconds), or list for texts where it may be repeated.
    key: its name in a job file (`paceline.cli.job_file`), where its value goes there as it is.
    complete: the function of `paceline.cli.completing` that offers values.
    section: title in `--help` above this option and those that follow it.
    """

    # No dataclass: loading that module takes as long as all else that comes before the supervisor's start.
    def __init__(
        self,
        words: str,
        help: str,
        metavar: str | None = None,
        type: type = str,
        *,
        key: str | None = None,
        complete: str | None = None,
        needed: bool = False,
        section: str | None = None,
    ) -> None:
        self.words, self.help, self.metavar, self.type = words, help, metavar, type
        self.key, self.complete, self.needed, self.section = key, complete, needed, section

    @property
    def name(self) -> str:
        """The name of the verb's parameter: that of the first long word."""
        # Of `--gpu/--no-gpu` the word that switches on is the name.
        words = self.words.split("/")[0].split()
        return next((word[2:] for word in words if word[:2] == "--"), words[0]).replace("-", "_")

    @property
    def is_argument(self) -> bool:
        return not self.words.startswith("-")

    @property
    def default(self) -> bool | None:
        """The value where it is left out: False for a word that can only switch on, else None."""
        return False if self.type is bool and "/" not in self.words else None

    def parameter(self) -> inspect.Parameter:
        """The parameter by which typer makes its own option."""
        import inspect
        from typing import Annotated

        import typer

        from paceline.cli import completing
        from paceline.cli.durations import duration_option

        value: Any = list[str] if self.type is list else self.type
        offered: Any = getattr(completing, self.complete) if self.complete else None
        words = self.words.split(" ")
        if self.type is float:
            said = duration_option(*words, help=self.help)
        elif self.is_argument:
            said = typer.Argument(
                metavar=self.metavar, help=self.help, autocompletion=offered, show_default=self.type is list
            )
        else:
            said = typer.Option(
                *words, metavar=self.metavar, help=self.help, autocompletion=offered, show_default=self.default is False
            )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if self.needed else self.default,
            annotation=Annotated[value if self.needed or self.default is False else value | None, said],
        )

    def value(self, text: str) -> Any:
        """The value that this text stands for.

        Raises:
            ValueError: it stands for none.
        """
        if self.type is float:
            from paceline.system import units

            return units.seconds(text)
        return text if self.type is list else self.type(text)


def takes(*options: VerbOption) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Let the parser know a verb `def verb(**given)` as one with these options, once it asks (`declare`)."""

    def keep(verb: Callable[..., int | None]) -> Callable[..., int | None]:
        verb.options = options  # type: ignore[attr-defined]
        return verb

    return keep


def declare(verb: Any) -> None:
    """Give a verb that `takes` options the signature by which typer makes them; any other has its own."""
    if options := getattr(verb, "options", ()):
        import inspect

        parameters = [option.parameter() for option in options]
        # typer reads both.
        verb.__signature__ = inspect.Signature(parameters)
        verb.__annotations__ = {one.name: one.annotation for one in parameters}


def read(options: Sequence[VerbOption], words: Sequence[str]) -> dict[str, Any] | None:
    """Read the words as arguments of a verb with these options: name -> value.

    Return None where the parser has to look at them: they ask for help, have a mistake, or are written in a way that is not
    known here, such as `-qd` or a value that begins with a dash.
    """
    given: dict[str, Any] = {option.name: option.default for option in options}
    known = {word: (option, on) for option in options for word, on in _spelled(option)}
    plain: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            plain += rest
            break
        # A dash alone is an argument: by custom, standard input.
        if word.strip() and (word[:1] != "-" or word == "-"):
            plain.append(word)
            continue
        name, equals, text = word.partition("=")
        option, on = known.get(name, (None, None))
        # A flag takes no value, and `-j=2` gives the parser the value "=2".
        if option is None or (equals and (option.type is bool or name[:2] != "--")):
            return None
        if option.type is bool:
            given[option.name] = on
            continue
        text = text if equals else next(rest, "")
        # The parser may take the next word for a value or refuse it; which of the two is its business.
        if not text.strip() or text[0] == "-":
            return None
        try:
            value = option.value(text)
        except ValueError:
            return None
        given[option.name] = [*(given[option.name] or ()), value] if option.type is list else value
    # Arguments are given out last, for options may stand between them.
    for option in options:
        if option.is_argument:
            if option.type is list:
                given[option.name], plain = plain, []
            elif plain:
                given[option.name] = option.value(plain.pop(0))
            elif option.needed:
                return None
    return None if plain else given


def _spelled(option: VerbOption) -> list[tuple[str, bool]]:
    """The option's words, each with the value that it switches to where the option has no other."""
    on, _, off = option.words.partition("/")
    return (
        [] if option.is_argument else [*((word, True) for word in on.split()), *((word, False) for word in off.split())]
    )


#: Of several verbs.
JSON = VerbOption("--json", "Print JSON.", type=bool)
DETACH = VerbOption("-d --detach", "Return at once.", type=bool)
TLS = (
    VerbOption("--tls-cert", "Certificate (PEM), for https.", "FILE"),
    VerbOption("--tls-key", "Its key (PEM).", "FILE"),
)
