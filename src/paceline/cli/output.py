"""Standard output and error whose reader may go away, and the one line that is printed before anything else is loaded."""

from __future__ import annotations

import io
import os
import signal
import sys

from paceline import __version__

# Not typing's: `paceline --version` loads this module and little else.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing_extensions import Buffer


def print_version() -> None:
    print(f"paceline {__version__}")


def end_with_the_reader() -> None:
    """From now on, end as every program in a pipeline does when whoever reads the output has gone: by SIGPIPE.

    Not by its default action for any pipe: an ssh that dies while it is written to must not take this program with it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue  # closed by whoever started us, or a test's
        stream.flush()
        # Not closed with this stream: sys.__stdout__ has the same descriptor.
        raw = _Output(stream.fileno(), "wb", closefd=False)
        # Unbuffered output (python -u) writes to the file itself.
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
            # By the signal itself: a shell with `pipefail` sees 141, as from every other program.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
            raise
