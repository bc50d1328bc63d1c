"""`--env-file`: variables in a file, as python-dotenv reads it (https://saurabh-kumar.com/python-dotenv/#file-format)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import JobError


def read_env_files(paths: Sequence[Path]) -> tuple[dict[str, str], list[str]]:
    """Name -> value of the files' lines, later files over earlier ones, and the names that stand there without a value: those
    have the submitting shell's.

    Quotes, `export`, comments and values of several lines are python-dotenv's. A `${NAME}` in a value is not filled in: a
    password may have one.

    Raises:
        JobError: a file that can't be read, or a line that is no NAME=VALUE; file and line are named, the line is not shown.
    """
    values: dict[str, str] = {}
    bare: dict[str, None] = {}
    for path in paths:
        for name, value in _lines(path):
            # A name has what its last line says: a value, or none, and never something of both.
            values.pop(name, None)
            bare.pop(name, None)
            if value is None:
                bare[name] = None
            else:
                values[name] = value
    return values, list(bare)


def _lines(path: Path) -> list[tuple[str, str | None]]:
    # Its parser and not its reader, which fills in `${NAME}` and passes over lines that it can't read.
    from dotenv.parser import parse_stream

    try:
        # Editors on Windows put a mark in front, which would become a part of the first name.
        with open(path, encoding="utf-8-sig") as file:
            bindings = list(parse_stream(file))
    except OSError as error:
        raise JobError(f"--env-file {str(path)!r} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise JobError(f"--env-file {str(path)!r} is no text in UTF-8. Write it as such.") from None
    found = []
    for binding in bindings:
        if binding.error:
            raise JobError(
                f"--env-file {str(path)!r}, line {binding.original.line}: this is no NAME=VALUE. Quote values with blanks or "
                "quotes in them, and begin comments with #."
            )
        # Comments and empty lines are bindings as well, without a name.
        if binding.key is not None:
            found.append((binding.key, binding.value))
    return found
