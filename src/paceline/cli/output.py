"""Standard output and error that end the program when their reader has gone."""

from __future__ import annotations

import io
import os
import signal
import sys

from paceline import __version__

# Don't import typing, because `paceline --version` loads only this module.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing_extensions import Buffer


def print_version() -> None:
    print(f"paceline {__version__}")


def end_with_the_reader() -> None:
    """Make this program end by SIGPIPE when the reader of its output ends.

    Other pipes do not end the program: after a broken pipe to ssh it must continue.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue  # the parent process has closed the stream, or a test has replaced it
        stream.flush()
        # Don't close the descriptor together with this file, because sys.__stdout__ uses the same descriptor.
        raw = _Output(stream.fileno(), "wb", closefd=False)
        # Python's option -u asks for unbuffered output, so write directly to the file then.
        below = raw if stream.write_through else io.BufferedWriter(raw)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                below,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            ),
        )


class _Output(io.FileIO):
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            # End this process by SIGPIPE, so that a shell with `pipefail` gets exit code 141, as from other programs.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
            raise
