"""Standard output and error that end the program when their reader has gone."""

from __future__ import annotations

import io
import os
import signal
import sys

from paceline import __version__

# Not typing's: `paceline --version` loads only this module.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing_extensions import Buffer


def print_version() -> None:
    print(f"paceline {__version__}")


def end_with_the_reader() -> None:
    """End by SIGPIPE once the reader of the output has gone, as programs in a pipeline do.

    SIGPIPE's default action would apply to any pipe, but a dying ssh must not end this program.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue  # closed by the parent process, or replaced by a test
        stream.flush()
        # closefd: sys.__stdout__ has the same descriptor.
        raw = _Output(stream.fileno(), "wb", closefd=False)
        # Unbuffered output (python -u) writes directly to the file.
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
            # By the signal itself: a shell with `pipefail` sees 141, as for other programs.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
            raise
