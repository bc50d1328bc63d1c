"""The entry point: calls a verb, and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import os
import signal
import sys

from paceline.cli.output import end_with_the_reader, print_version

EXIT_WRONG_CALL = 2
EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE in sysexits.h
EXIT_INTERNAL = 70  # EX_SOFTWARE in sysexits.h
EXIT_INTERRUPTED = 128 + signal.SIGINT
#: Error numbers of a folder that this user can't write. They show no bug of Paceline.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def main() -> None:
    """Run the command line and exit.

    Exit codes: 0, the run's exit code, 2 for wrong usage, 69 if an engine does not answer, 128+n after signal n.
    """
    # If the program that reads the output has ended, exit quietly. click would exit with code 1.
    end_with_the_reader()
    if sys.argv[1:] == ["--version"]:
        # Print the version without loading click's parser, which takes five times as long as Python's own start.
        print_version()
        sys.exit(0)
    try:
        code = _exit_code()
    except KeyboardInterrupt:
        # Use exit code 130, as shells do after Ctrl-C.
        code = EXIT_INTERRUPTED
    if "paceline.cli.quick" in sys.modules:
        from paceline.system.processes import leave

        leave(code)
    sys.exit(code)


def _log_to_standard_error() -> None:
    import logging

    from paceline.runs.visible import visible

    # Escape control characters: a warning may quote foreign text, such as a file's name.
    class Visible(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return visible(super().format(record), lines=True)

    logs_to = logging.StreamHandler()
    logs_to.setFormatter(Visible("paceline: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[logs_to])
    logging.addLevelName(logging.WARNING, "warning")


def _exit_code() -> int:
    import click

    from paceline.cli.parser import call, options_of
    from paceline.errors import (
        EngineError,
        EnvironmentBuildError,
        PacelineError,
        RunStateError,
        ServiceFailedError,
        TransferError,
    )

    _log_to_standard_error()
    try:
        result = call()
        # Flush here, so that a write error becomes a short message. At exit, Python would print a traceback instead.
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except PacelineError as error:
        from paceline.cli.hints import in_options

        # The message may name a Python parameter, such as overwrite=True. Replace it by its option, such as --overwrite.
        _print_error(in_options(str(error), sys.argv[1:], options_of(sys.argv[1:])))
        if isinstance(error, EngineError):
            return EXIT_UNAVAILABLE
        failed = (RunStateError, EnvironmentBuildError, TransferError, ServiceFailedError)
        return 1 if isinstance(error, failed) else EXIT_WRONG_CALL
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return EXIT_WRONG_CALL
    except click.UsageError as error:
        from paceline.cli.hints import usage_message

        command = error.ctx.command_path if error.ctx is not None else "paceline"
        _print_error(f"{usage_message(error, command, sys.argv[1:])} See `{command} --help`.")
        return EXIT_WRONG_CALL
    except Exception as error:
        if os.environ.get("PACELINE_DEBUG"):
            raise
        from paceline.system.files import is_full

        if isinstance(error, OSError) and (is_full(error) or (error.filename and error.errno in _REFUSED)):
            # When a disk gets full in the middle of a file, the error has no name.
            _print_error(f"{error.filename or 'a file'!r} can't be used: {error.strerror}. Change that, and try again.")
            return 1
        _print_error(
            f"Paceline has a bug: {type(error).__name__}: {error}. PACELINE_DEBUG=1 shows where; please report it."
        )
        return EXIT_INTERNAL


def _print_error(text: str) -> None:
    from paceline.job.secret_values import credentials_in, hidden
    from paceline.runs.visible import visible

    # Hide passwords, because the message quotes the user's values, which may contain a password.
    passwords = [password for word in sys.argv[1:] for password in credentials_in(word)]
    print(f"paceline: error: {hidden(visible(text, lines=True), passwords)}", file=sys.stderr)
