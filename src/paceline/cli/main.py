"""The entry point: the verbs put together, and errors turned into one message and an exit code."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.cli import cancel, compute, data, env, execute, files, logs, metrics, read, remove, run
from paceline.cli.output import end_with_the_reader
from paceline.errors import EnvironmentBuildError, PacelineError, RunStateError, TransferError
from paceline.runs.visible import visible

EXIT_WRONG_CALL = 2
EXIT_INTERNAL = 70  # EX_SOFTWARE

app = typer.Typer(
    name="paceline",
    help="Run training scripts, on one process or many, on machines you already have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
run.add_to(app)
read.add_to(app)
logs.add_to(app)
metrics.add_to(app)
files.add_to(app)
remove.add_to(app)
cancel.add_to(app)
execute.add_to(app)
env.add_to(app)
data.add_to(app)
compute.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit: 0, the run's own code, 2 for a wrong call, 128+n for signal n."""
    # When whoever reads our output has gone; click would exit with 1.
    end_with_the_reader()
    logs_to = logging.StreamHandler()
    logs_to.setFormatter(_VisibleFormatter("paceline: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[logs_to])
    logging.addLevelName(logging.WARNING, "warning")
    sys.exit(_exit_code())


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), lines=True)


def _exit_code() -> int:
    try:
        result = app(standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except PacelineError as error:
        _say(str(error))
        return 1 if isinstance(error, (RunStateError, EnvironmentBuildError, TransferError)) else EXIT_WRONG_CALL
    except Exception as error:
        code = _usage_error(error)
        if code is not None:
            return code
        if os.environ.get("PACELINE_DEBUG"):
            raise
        _say(
            f"an error of Paceline's own: {type(error).__name__}: {error}. PACELINE_DEBUG=1 shows where; please report it."
        )
        return EXIT_INTERNAL


def _usage_error(error: Exception) -> int | None:
    """The exit code of an error of the command line's parser, which is shown; None for any other error."""
    code = getattr(error, "exit_code", None)
    if not isinstance(code, int):
        return None
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text)
        return EXIT_WRONG_CALL
    if text:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "paceline"
        _say(f"{_explained(error, text, context, command)} See `{command} --help`.")
    return code if type(error).__name__ == "Exit" else EXIT_WRONG_CALL


def _explained(error: Exception, text: str, context: Any, command: str) -> str:
    """The parser's words, and for those who come from another launcher what to write instead."""
    from paceline.cli.hints import option_message, verb_hint

    if type(error).__name__ == "NoSuchOption" and command.endswith((" run", " submit", " logs")):
        return option_message(getattr(error, "option_name", ""), text, sys.argv[1:])
    if command.endswith(" exec") and text.startswith("Missing argument"):
        return "Name a run and what to run beside its worker: paceline exec RUN -- COMMAND."
    if (unknown := re.match(r"No such command '(.+?)'\.", text)) and context is not None:
        # In place of the parser's own suggestions.
        hint = verb_hint(unknown[1], context.command.list_commands(context), in_group=context.parent is not None)
        return f"{unknown[0]} {hint}".rstrip()
    return text


def _say(text: str) -> None:
    print(f"paceline: error: {visible(text, lines=True)}", file=sys.stderr)
