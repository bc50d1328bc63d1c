"""The entry point: a verb is called, and an error becomes one message and an exit code."""

from __future__ import annotations

import os
import signal
import sys

from paceline.cli.output import end_with_the_reader, print_version

# Not typing's, as in `paceline`: whoever asks for the version waits for nothing else.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

EXIT_WRONG_CALL = 2
EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE
EXIT_INTERNAL = 70  # EX_SOFTWARE


def main() -> None:
    """Run the command line and exit: 0, the run's own code, 2 for a wrong call, 69 where nobody answers, 128+n for signal n."""
    # When whoever reads our output has gone; click would exit with 1.
    end_with_the_reader()
    if sys.argv[1:] == ["--version"]:
        # The parser, which says the same, takes five times as long to import as Python takes to start.
        print_version()
        sys.exit(0)
    code = _exit_code()
    if "paceline.cli.quick" in sys.modules:
        from paceline.system.processes import leave

        leave(code)
    sys.exit(code)


def _log_to_standard_error() -> None:
    import logging

    from paceline.runs.visible import visible

    # A warning may have other people's text in it, a file's name for one.
    class Visible(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return visible(super().format(record), lines=True)

    logs_to = logging.StreamHandler()
    logs_to.setFormatter(Visible("paceline: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[logs_to])
    logging.addLevelName(logging.WARNING, "warning")


def _exit_code() -> int:
    from paceline.errors import (
        EngineError,
        EnvironmentBuildError,
        PacelineError,
        RunStateError,
        ServiceFailedError,
        TransferError,
    )

    try:
        result = _call(sys.argv[1:])
        # Now, for what fails here is told in a sentence; at the interpreter's end it would be a traceback, and exit code 120.
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    # As a shell counts it for a program that SIGINT has ended.
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except PacelineError as error:
        # A mistake may have been made in an option whose name in Python is another.
        from paceline.cli.hints import in_options
        from paceline.cli.verb_group import options_of

        _say(in_options(str(error), sys.argv[1:], options_of(sys.argv[1:])))
        if isinstance(error, EngineError):
            return EXIT_UNAVAILABLE
        failed = (RunStateError, EnvironmentBuildError, TransferError, ServiceFailedError)
        return 1 if isinstance(error, failed) else EXIT_WRONG_CALL
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


def _call(words: list[str]) -> Any:
    go_on: Any = None
    # A shell that wants words to offer sets this variable, and the parser has to answer it.
    if words[:1] in (["run"], ["submit"]) and "_PACELINE_COMPLETE" not in os.environ:
        from paceline.cli import quick

        go_on = quick.reading(words[0], words[1:])
    # After that, for a supervisor may be loading by now, and logging is imported beside it.
    _log_to_standard_error()
    if go_on is None:
        from paceline.cli.verb_group import call

        return call()
    return go_on()


def _usage_error(error: Exception) -> int | None:
    """The exit code of an error of the command line's parser, which is shown; None for any other error."""
    # By their attributes: newer versions of typer carry click within, so its classes have no one place to import from.
    code = getattr(error, "exit_code", None)
    if not isinstance(code, int):
        return None
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text)
        return EXIT_WRONG_CALL
    if text:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else _command()
        _say(f"{_explained(error, text, context, command)} See `{command} --help`.")
    return code if type(error).__name__ == "Exit" else EXIT_WRONG_CALL


def _explained(error: Exception, text: str, context: Any, command: str) -> str:
    """The parser's words, and for those who come from another launcher what to write instead."""
    import re

    from paceline.cli.hints import option_message, sentence, verb_hint

    if type(error).__name__ == "NoSuchOption" and command.endswith((" run", " submit", " logs")):
        return sentence(option_message(getattr(error, "option_name", ""), text, sys.argv[1:]))
    if command.endswith(" exec") and text.startswith("Missing argument"):
        return "Name a run and what to run beside its worker: paceline exec RUN -- COMMAND."
    if (unknown := re.match(r"No such command '(.+?)'\.", text)) and context is not None:
        # In place of the parser's own suggestions.
        hint = verb_hint(unknown[1], context.command.list_commands(context), in_group=context.parent is not None)
        return f"{unknown[0]} {hint}".rstrip()
    # The parser's name of its own type.
    return sentence(text.replace(" is not a valid int range.", " is not a whole number."))


def _command() -> str:
    """Return the command whose `--help` to name for an error without a context: an option whose value is missing."""
    from paceline.cli.verbs import VERBS

    verb, word = [*sys.argv[1:3], "", ""][:2]
    if verb not in VERBS:
        return "paceline"
    # A verb whose entry names a module alone has verbs below it.
    below = word if "." not in VERBS[verb][0] and not word.startswith("-") else ""
    return f"paceline {verb} {below}".rstrip()


def _say(text: str) -> None:
    from paceline.job.secret_values import credentials_in, hidden
    from paceline.runs.visible import visible

    # A wrong value is shown as it was given, and may have a password.
    given = [one for word in sys.argv[1:] for one in credentials_in(word)]
    print(f"paceline: error: {hidden(visible(text, lines=True), given)}", file=sys.stderr)
