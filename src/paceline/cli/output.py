"""Standard output and error that end the program when their reader has gone."""

from __future__ import annotations

import io
import os
import signal
import sys

from paceline import __version__

# Don't import TYPE_CHECKING from typing: `paceline --version` loads only this module, and typing loads slowly.
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
        # Keep the descriptor open when this file object is closed, because sys.__stdout__ uses the same descriptor.
        raw = _Output(stream.fileno(), "wb", closefd=False)
        # With Python's option -u, the output must not be buffered. Then write to the file directly.
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
            # End this process by SIGPIPE, as other programs do. A shell with `pipefail` then reports exit code 141.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
            raise
