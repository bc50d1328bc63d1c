"""The parser of the command line, made from the verbs' tables of options.

The parser imports a verb's module only when the verb is called.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

import click
from click.shell_completion import shell_complete

from paceline import workspace_dir
from paceline.cli.options import OPTIONS_OF
from paceline.cli.output import print_version
from paceline.cli.verbs import SECTIONS, SHOWING, VERBS

#: In a terminal of at most this many columns, help texts show an option's description below the option instead of beside it.
_NARROW = 58


class _Command(click.Command):
    """A subcommand or a group of subcommands. Errors about its options contain its name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            # If an option has no value, click's error lacks the context that the error message needs. Add the context.
            error.ctx = error.ctx or ctx
            raise

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from paceline.cli.verb_help import EXAMPLES

        super().format_help_text(ctx, formatter)
        if example := EXAMPLES.get(_words_of(ctx)):
            with formatter.section("Example"):
                formatter.write(_shell_lines(example, formatter.width) + "\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from paceline.cli.verb_help import topic_of

        formatter.write(f"\nMore: paceline docs {topic_of(_words_of(ctx))}".rstrip() + "\n")


class VerbCommand(_Command):
    """A subcommand whose `--help` groups its options by the sections of its option table."""

    def __init__(self, name: str, verb: Callable[..., int | None]) -> None:
        self.options = OPTIONS_OF.get(verb, ())
        super().__init__(name, callback=verb, help=verb.__doc__, params=[option.parameter() for option in self.options])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a subcommand's arguments and options into its help."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        title = "Options"
        # get_params also returns `--help`, which is not in `self.options`. Append None, so that both lists have equal lengths.
        for parameter, option in zip(self.get_params(ctx), (*self.options, None), strict=True):
            title = option.section if option and option.section else title
            if row := parameter.get_help_record(ctx):
                sections.setdefault("Arguments" if option and option.is_argument else title, []).append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    # In a narrow terminal, write each description below its option: a second column would be only one word wide.
                    formatter.write_dl(rows, col_max=30 if formatter.width > _NARROW else 6)


class RawCommand(click.Command):
    """A subcommand that parses its own words, including `--help`."""

    def __init__(self, name: str, verb: Callable[..., int | None]) -> None:
        words = [option.parameter() for option in OPTIONS_OF[verb]]
        super().__init__(name, callback=verb, help=verb.__doc__, params=words, add_help_option=False)
        self.context_settings = {
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
            "help_option_names": [],
        }


class VerbGroup(_Command, click.Group):
    """A group of subcommands, whose `--help` shows each subcommand's first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands' names in their order in `--help`."""
        return [*self.commands]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a group's subcommands, then its options, into its help."""
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, first_sentence(command.help or "")) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class TopLevel(VerbGroup):
    """The command `paceline`, which loads a subcommand's module when first used."""

    def __init__(self) -> None:
        super().__init__(
            "paceline",
            commands={name: click.Command(name, help=text) for name, (_, text) in VERBS.items()},
            help="Run training scripts, on one process or many, on machines you already have.",
            context_settings={"help_option_names": ["-h", "--help"]},
            params=[
                _early("--version", "Print the version.", print_version),
                _early("--install-completion", "Set up completion for your shell.", _install_completion),
                _early("--show-completion", "Print the completion script of your shell.", _show_completion),
            ],
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands into the help, by section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        title = ""
        width = max(map(len, VERBS))
        for name, (_, text) in VERBS.items():
            title = SECTIONS.get(name, title)
            sections.setdefault(title, []).append((name.ljust(width), first_sentence(text)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def load(self, name: str) -> click.Command:
        """Import the module of a subcommand, and return the subcommand."""
        place, text = VERBS[name]
        module, _, function = place.partition(".")
        found = import_module(f"paceline.cli.{module}")
        if function:
            self.commands[name] = VerbCommand(name, getattr(found, function))
        else:
            self.commands[name] = VerbGroup(name, help=text, commands=_commands(found.verbs, getattr(found, "raw", ())))
        return self.commands[name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        workspace_dir.only_shows = name in SHOWING or " ".join((str(name), *rest[:1])) in SHOWING
        return name, self.load(name) if command is not None and name in VERBS else command, rest


def call() -> int | None:
    """Parse the command line, call its subcommand, and return the exit code."""
    # A shell's completion script sets this variable and calls the program.
    if instruction := os.environ.get("_PACELINE_COMPLETE"):
        return shell_complete(app, {}, "paceline", "_PACELINE_COMPLETE", instruction)
    columns = shutil.get_terminal_size().columns
    # Pass the width of a narrow terminal to click, because click assumes at least 50 columns.
    width = max(30, columns - 2) if columns <= _NARROW else None
    # Don't call `app.main`, because it would print an empty line after Ctrl-C.
    try:
        with app.make_context("paceline", sys.argv[1:], terminal_width=width) as context:
            code: int | None = app.invoke(context)
            return code
    except click.exceptions.Exit as exit:
        return exit.exit_code


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Return the options of the subcommand in `words` by parameter: {"dry_run": "--dry-run"}."""
    command = app.load(words[0]) if words and words[0] in VERBS else None
    if isinstance(command, VerbGroup):
        command = command.commands.get(words[1]) if len(words) > 1 else None
    options = command.options if isinstance(command, VerbCommand) else ()
    return {option.name: option.long_word for option in options if not option.is_argument}


def first_sentence(text: str) -> str:
    """Return the first sentence of a subcommand's help."""
    return " ".join(text.split("\n\n", maxsplit=1)[0].split()).partition(". ")[0].removesuffix(".") + "."


def _words_of(ctx: click.Context) -> str:
    return ctx.command_path.partition(" ")[2]


def _shell_lines(command: str, width: int) -> str:
    import textwrap

    lines = textwrap.wrap(command, width - 6, break_long_words=False, break_on_hyphens=False)
    return "  " + " \\\n    ".join(lines)


def _commands(verbs: Mapping[str, Callable[..., int | None]], raw: Iterable[str]) -> dict[str, click.Command]:
    return {name: (RawCommand if name in raw else VerbCommand)(name, verb) for name, verb in verbs.items()}


def _early(word: str, help: str, act: Callable[[], None]) -> click.Option:
    def callback(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and not context.resilient_parsing:
            act()
            context.exit()

    return click.Option([word], is_flag=True, is_eager=True, expose_value=False, help=help, callback=callback)


def _install_completion() -> None:
    from paceline.cli import completing

    print(completing.install())


def _show_completion() -> None:
    from paceline.cli import completing

    print(completing.script())


app = TopLevel()
