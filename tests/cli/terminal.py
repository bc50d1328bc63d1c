"""A terminal for a command, on which keys are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time

from tests.cli.conftest import Cli


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Under nohup this signal is ignored, and processes that the tests start would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Terminal:
    """A command whose standard streams are a terminal of its own, on which keys can be pressed."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self._master, slave = pty.openpty()
        # Keep printed text at each Ctrl-C. By default the terminal discards printed text that was not read yet.
        modes = termios.tcgetattr(slave)
        modes[3] |= termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self.process = subprocess.Popen(
            cli.argv(*words),
            env=cli.environment,
            cwd=cli.folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509 - there are no threads
        )
        os.close(slave)
        self.text = ""

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read_until(self, text: str) -> None:
        """Read until this text appears behind the text that was read before."""
        seen, deadline = len(self.text), time.monotonic() + 90
        while text not in self.text[seen:]:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} never came: {self.text!r}"
            self.text += self._read()

    def exit_code(self) -> int:
        try:
            while data := self._read():
                self.text += data
        except OSError:
            pass  # on Linux, reading fails once the command has closed its side of the terminal
        return self.process.wait(timeout=180)

    def hang_up(self) -> None:
        os.close(self._master)

    def close(self) -> None:
        self.hang_up()
        self.process.kill()
        self.process.wait()

    def _read(self) -> str:
        return os.read(self._master, 65536).decode(errors="replace")
