"""What shells and `man` read of the command line, below share/, from where the wheel takes it.

    .venv/bin/python .ci/shell_files.py            write the files
    .venv/bin/python .ci/shell_files.py --check    end with 1 if one of them is not what the command line would make today

The page has every verb with its options, as `--help` shows them. The completions ask the program itself at each key, so
they stay as they are when options change.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from paceline.cli.parser import app
from paceline.cli.verb_help import EXAMPLES
from paceline.cli.verbs import VERBS

SHARE = Path(__file__).resolve().parents[1] / "share"
COMPLETIONS = {
    "bash": "bash-completion/completions/paceline",
    "zsh": "zsh/site-functions/_paceline",
    "fish": "fish/vendor_completions.d/paceline.fish",
}
EXITS = (
    ("0", "All went well."),
    ("the code of the run", "A run that was waited for has failed."),
    ("1", "A run, an environment, a transfer or a service has failed."),
    ("2", "The call is wrong; nothing was started."),
    ("69", "A scheduler, a host or a store does not answer."),
    ("70", "An error of Paceline's own. PACELINE_DEBUG=1 shows where."),
    ("128+N", "Signal N has ended it."),
)


def main() -> int:
    made = dict(files())
    if sys.argv[1:] == ["--check"]:
        old = [
            path for path, text in made.items() if not (SHARE / path).is_file() or (SHARE / path).read_text() != text
        ]
        for path in old:
            print(f"share/{path} is not what the command line makes: run .venv/bin/python .ci/shell_files.py")
        return 1 if old else 0
    for path, text in made.items():
        (SHARE / path).parent.mkdir(parents=True, exist_ok=True)
        (SHARE / path).write_text(text)
    return 0


def files() -> Iterator[tuple[str, str]]:
    """Each file's place below share/, and its text."""
    yield "man/man1/paceline.1", page()
    program = Path(sys.executable).with_name("paceline")
    for shell, path in COMPLETIONS.items():
        environment = {**os.environ, "_PACELINE_COMPLETE": f"{shell}_source"}
        done = subprocess.run([program], env=environment, capture_output=True, text=True, check=True)
        # The program by its name: the one that the shell finds, and not the one of whoever made the file.
        yield path, done.stdout.replace(str(program), "paceline").strip() + "\n"


def page() -> str:
    """The manual's page, in the macros of man(7)."""
    lines = [
        # Without a date, which would make each day's page another one.
        '.TH PACELINE 1 "" "Paceline" "User Commands"',
        *(".SH NAME", f"paceline \\- {_text(app.help).rstrip('.').lower()}"),
        *(".SH SYNOPSIS", ".B paceline", ".I verb", "[options] ..."),
        *(".SH VERBS", "Each verb tells its options with", ".BR \\-\\-help ."),
    ]
    for name in VERBS:
        lines += _verb(app.load(name), f"paceline {name}")
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXITS:
        lines += [".TP", f".B {_text(code)}", _text(meaning)]
    lines += [".SH SEE ALSO", ".BR mpirun (1),", ".BR sbatch (1),", ".BR ssh (1)"]
    return "\n".join(lines) + "\n"


def _verb(command: Any, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f".SS {_text(path)} {_text(usage)}"
    for paragraph in re.split(r"\n\s*\n", (command.help or "").replace("\b", "").strip()):
        yield from (_text(paragraph), ".PP")
    if example := EXAMPLES.get(path.removeprefix("paceline ")):
        yield from (f"Example: {_text(example)}", ".PP")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            yield from (".TP", f".B {_text(record[0])}", _text(record[1]) or "\\&")
    for name, below in getattr(command, "commands", {}).items():
        yield from _verb(below, f"{path} {name}")


def _text(text: str) -> str:
    """As roff takes it: no backslash and no dash of its own, no line that begins with a dot or an apostrophe."""
    plain = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain


if __name__ == "__main__":
    sys.exit(main())
