"""The parser of the command line. It knows each verb's name and imports the verb's module when the verb is called: one
process that runs `paceline status` has no use for what `paceline compute add` imports."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from paceline import workspace_dir
from paceline.cli.options import declare
from paceline.cli.output import print_version
from paceline.cli.verbs import SECTIONS, SHOWING, VERBS


class VerbGroup(typer.core.TyperGroup):
    """The verbs of `VERBS`.

    `commands` holds a stand-in for each, which has its name and its help: enough to list verbs and to complete their names.
    The verb itself takes the stand-in's place when it is called, or when its own words are completed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (_, text) in VERBS.items():
            self.add_command(typer.core.TyperCommand(name, help=text, rich_markup_mode=None))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs in sections, each with the whole first sentence of its help."""
        rows: list[tuple[str, str]] = []
        sections: list[tuple[str, list[tuple[str, str]]]] = []
        for name, (_, text) in VERBS.items():
            if name in SECTIONS:
                rows = []
                sections.append((SECTIONS[name], rows))
            rows.append((name, text.partition(". ")[0].removesuffix(".") + "."))
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
            part.add_typer(found.verbs, name=name, help=text)
        for one in (part if function else found.verbs).registered_commands:
            declare(one.callback)
        # A callback, which does nothing, makes it a group also where it has one verb alone.
        part.callback()(lambda: None)
        self.commands[name] = typer.main.get_group(part).commands[name]
        return self.commands[name]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        workspace_dir.only_shows = name in SHOWING or " ".join((str(name), *rest[:1])) in SHOWING
        return name, self.load(name) if command is not None and name in VERBS else command, rest


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
