"""Acts as a reader who types a page, block after block, in a separate folder.

page ── blocks ──> kind_of ──┬─ FILE ───── written
                             ├─ PYTHON ─── executed in this process, one namespace for the page
                             ├─ CONSOLE ── a shell for each command, whose variables and folder the next one takes over
                             └─ CHECKED ── parsed, bound; `compute add` and the plan of `run` are made all the same
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paceline
from tests.docs import checking
from tests.docs.kinds import Kind, exit_code, kind_of, name_of, stays, typed
from tests.docs.pages import Block, blocks
from tests.docs.printed import assert_printed

_TIMEOUT_S = 300
#: This shell code runs one command and stores the working directory and the environment for the next command.
_SHELL = 'eval "$1"; code=$?; { pwd; env -0; } > "$2"; exit $code'


@dataclass
class Scene:
    """The state that a page requires before its first block.

    names: for its Python blocks.
    instead: text in its blocks -> its replacement here, such as a folder of the test.
    elsewhere: text in a block -> the test that runs this block in place of the page's test.
    by: for a page whose Python blocks are one script, the command that runs it: `python`, or `paceline run -j 2 --backend gloo`.
    before: lines before that script.
    later: beginnings of commands that are checked and not run.
    """

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    by: str = ""
    before: str = ""
    later: tuple[str, ...] = ()


class Reader:
    """Types the blocks of one page."""

    def __init__(self, page: Path, scene: Scene) -> None:
        self._page = page
        self._scene = scene
        self._names = {"__name__": "__main__", **scene.names}
        self._directory = str(scene.folder)
        # The reader of a page has the programs that are installed beside this interpreter.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path}
        #: The output of each command in a console block.
        self.printed: list[str] = []
        #: The number of failed runs that the page shows.
        self.failures = 0

    def read(self) -> None:
        """Run every block, in the page's order.

        Raises:
            AssertionError: a block is wrong; the message has its place and the reason.
        """
        found = [self._put_instead(block) for block in blocks(self._page)]
        found = [block for block in found if not any(word in block.text for word in self._scene.elsewhere)]
        if self._scene.by:
            text = [block.text for block in found if kind_of(block) is Kind.PYTHON]
            script = self._scene.folder / "blocks_of_the_page.py"
            script.write_text("\n".join([self._scene.before, *text]))
            self._type(f"{self._scene.by} {script.name}", [], 0)
        with _nothing_stays_imported(self._scene.folder):
            for block in found:
                try:
                    self._read(block)
                except Exception as error:
                    why = error if isinstance(error, AssertionError) else traceback.format_exc()
                    raise AssertionError(f"{self._page.name}, the block at line {block.line}: {why}") from None

    def _put_instead(self, block: Block) -> Block:
        text = block.text
        for word, other in self._scene.instead.items():
            text = text.replace(word, other)
        return Block(block.language, text, block.note, block.line)

    def _read(self, block: Block) -> None:
        kind = kind_of(block)
        if kind is Kind.FILE:
            path = self._scene.folder / str(name_of(block))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif kind is Kind.PYTHON and not self._scene.by:
            self._execute(block)
        elif kind is Kind.CONSOLE:
            self.failures += "Failed in" in block.text
            for command, said in typed(block):
                if command.startswith(self._scene.later):
                    self._check(command)
                elif stays(block):
                    self.printed.append(interrupted(command, said, self._directory, self._environment))
                else:
                    self._type(command, said, exit_code(block))
        elif kind is Kind.CHECKED and block.language == "python":
            checking.check_python(block.text, dict(self._names))
        elif kind is Kind.CHECKED:
            for command, _ in typed(block):
                self._check(command)

    def _execute(self, block: Block) -> None:
        """Execute it statement by statement; a comment behind a `print` is the expected output."""
        # Add empty lines, so that a traceback has the line numbers of the page.
        lines = ["", *[""] * block.line, *block.text.splitlines()]
        for statement in ast.increment_lineno(ast.parse(block.text), block.line).body:
            code = compile(ast.Module([statement], []), str(self._page), "exec", dont_inherit=True)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, self._names)
            _, hash_sign, said = lines[statement.end_lineno or 0].partition("  # ")
            if hash_sign and ast.unparse(statement).startswith("print("):
                assert_printed([said], printed.getvalue())

    def _type(self, command: str, said: list[str], code: int) -> None:
        state = self._scene.folder / ".state_of_the_shell"
        done = subprocess.run(
            ["bash", "-c", _SHELL, "bash", command, str(state)],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == code, f"$ {command}\nexit code {done.returncode}\n{done.stdout}"
        self._directory, _, variables = state.read_text().partition("\n")
        self._environment = dict(one.split("=", 1) for one in variables.split("\0") if one)
        assert_printed(said, done.stdout)
        self.printed.append(done.stdout)

    def _check(self, command: str) -> None:
        """Parse it; add the target that it adds, and make the plan of the run that it starts, as if it were for this machine; the
        plan of a sweep or of a pipeline that is here."""
        words = checking.parse_command(command)
        if words[:3] == ["paceline", "compute", "add"] and "--help" not in words:
            self._type(shlex.join([*words, "--no-check"]), [], 0)
        elif words[:2] in (["paceline", "run"], ["paceline", "submit"]):
            for place, word in enumerate(words):
                if word == "--compute":
                    words[place + 1] = "local"
            gpus = "PACELINE_GPUS=0,1,2,3,4,5,6,7 " if "--gpu" in words else ""
            self._type(gpus + shlex.join([*words[:2], "--dry-run", *words[2:]]), [], 0)
        elif words[1:3] in (["sweep", "run"], ["pipeline", "run"]) and command.startswith(self._scene.later):
            self._type(shlex.join([*words, "--dry-run"]), [], 0)


def interrupted(command: str, said: list[str], folder: str, environment: dict[str, str]) -> str:
    """Return the output of a command that stays in the foreground. It gets Ctrl-C once it has printed `said`."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        ends_at = time.monotonic() + _TIMEOUT_S
        try:
            while True:
                output.seek(0)
                printed = output.read()
                try:
                    assert_printed(said, printed)
                    break
                except AssertionError:
                    if process.poll() is not None or time.monotonic() > ends_at:
                        raise
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            code = process.wait(_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
    # For a shell, a program that is ended by SIGINT has the exit code 130. Python returns the negative signal number.
    assert code in (130, -signal.SIGINT), f"$ {command}\nexit code {code} after Ctrl-C\n{printed}"
    return printed


@contextlib.contextmanager
def _nothing_stays_imported(folder: Path) -> Iterator[None]:
    """What a page does to this process ends with it: imports, variables, and the run of `paceline.init`."""
    modules, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    variables = dict(os.environ)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        paceline.finish()
        sys.path[:] = path
        # Remove only the import hooks of Paceline's packages. TensorFlow stays loaded and needs the hook of `six`.
        ours = ("paceline", "azureml", "horovod")
        sys.meta_path[:] = [
            one for one in sys.meta_path if one in finders or type(one).__module__.partition(".")[0] not in ours
        ]
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if name.partition(".")[0] in ("azureml", "horovod") or file.startswith(str(folder)):
                del sys.modules[name]
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update(variables)
