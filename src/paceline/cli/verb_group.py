"""The parser of the command line. It knows each verb's name and imports the verb's module when the verb is called: one
process that runs `paceline status` has no use for what `paceline compute add` imports.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from paceline import workspace_dir
from paceline.cli.options import declare
from paceline.cli.output import print_version
from paceline.cli.verbs import SECTIONS, SHOWING, VERBS
from paceline.errors import UserError


class _Group(typer.core.TyperGroup):
    """A group whose `--help` has the whole first sentence of each verb."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(one.help or "")) for name, one in self.commands.items()])


class _Verb(typer.core.TyperCommand):
    """A verb whose `--help` has its options in the sections of its table (`VerbOption.section`)."""

    def invoke(self, ctx: Any) -> Any:
        """Call the verb, unless an option has no text: `--name "$NAME"` of a variable that is not set, for one."""
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            texts = value if isinstance(value, (list, tuple)) else [value]
            if (
                option_word(parameter) != _SAMPLE
                and option_word(parameter)[:1] == "-"
                and any(isinstance(text, str) and not text.strip() for text in texts)
            ):
                name = option_word(parameter)
                raise UserError(f"{name} {texts[-1]!r} is empty. Give a value, or leave {name} out.")
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options section by section."""
        titles = {one.name: one.section for one in getattr(self.callback, "options", ()) if one.section}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        title = "Options"
        for parameter in self.get_params(ctx):
            title = titles.get(parameter.name or "", title)
            if row := parameter.get_help_record(ctx):
                in_section = "Arguments" if parameter.param_type_name == "argument" else title
                sections.setdefault(in_section, []).append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    # In a narrow terminal each option has a line to itself, for two columns would be one word wide.
                    formatter.write_dl(rows, col_max=30 if formatter.width > _NARROW else 6)


class VerbGroup(_Group):
    """The verbs of `VERBS`.

    `commands` holds a stand-in for each, which has its name and its help: enough to list verbs and to complete their names.
    The verb itself takes the stand-in's place when it is called, or when its own words are completed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (_, text) in VERBS.items():
            self.add_command(typer.core.TyperCommand(name, help=text, rich_markup_mode=None))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs in sections."""
        rows: list[tuple[str, str]] = []
        sections: list[tuple[str, list[tuple[str, str]]]] = []
        for name, (_, text) in VERBS.items():
            if name in SECTIONS:
                rows = []
                sections.append((SECTIONS[name], rows))
            rows.append((name, first_sentence(text)))
        width = max(map(len, VERBS))
        for title, rows in sections:
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])

    def load(self, name: str) -> Any:
        """The verb of this name with its options, its module imported. It takes its stand-in's place."""
        place, text = VERBS[name]
        module, _, function = place.partition(".")
        found = import_module(f"paceline.cli.{module}")
        part = typer.Typer(rich_markup_mode=None)
        if function:
            part.command(name)(getattr(found, function))
        else:
            part.add_typer(found.verbs, name=name, help=text, cls=_Group)
        for one in (part if function else found.verbs).registered_commands:
            declare(one.callback)
            one.cls = _Verb
        # A callback, which does nothing, makes it a group also where it has one verb alone.
        part.callback()(lambda: None)
        self.commands[name] = typer.main.get_group(part).commands[name]
        return self.commands[name]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        workspace_dir.only_shows = name in SHOWING or " ".join((str(name), *rest[:1])) in SHOWING
        return name, self.load(name) if command is not None and name in VERBS else command, rest


#: Of `serve`: a request, which may be empty.
_SAMPLE = "--check"
#: The widest output whose options stand above their descriptions, not beside them.
_NARROW = 58


def call() -> Any:
    """Parse the command line and call its verb; return what the verb returned."""
    columns = shutil.get_terminal_size().columns
    # The parser's own least width is 50.
    width = max(30, columns - 2) if columns <= _NARROW else None
    return app(standalone_mode=False, terminal_width=width)


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Return name -> option, "--dry-run", for each option of the verb that these words of a command line call."""
    group: Any = typer.main.get_command(app)
    command = group.load(words[0]) if words and words[0] in VERBS else None
    if isinstance(command, _Group):
        command = command.commands.get(words[1]) if len(words) > 1 else None
    return {str(one.name): option_word(one) for one in command.params if one.opts[0][:1] == "-"} if command else {}


def option_word(parameter: Any) -> str:
    """Return an option's long form."""
    words: list[str] = parameter.opts
    return next((word for word in words if word[:2] == "--"), words[0])


def first_sentence(text: str) -> str:
    """Return the first sentence of a verb's help."""
    return " ".join(text.split("\n\n", maxsplit=1)[0].split()).partition(". ")[0].removesuffix(".") + "."


app = typer.Typer(
    name="paceline",
    help="Run training scripts, on one process or many, on machines you already have.",
    cls=VerbGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
