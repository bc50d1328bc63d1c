"""A shell command whose output is returned."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Mapping, Sequence

from paceline.compat.horovod.runner.common.util import safe_shell_exec


def execute(command: str | Sequence[str], env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return a command's output and exit code, or None if it can't start."""
    output = io.StringIO()
    try:
        code = safe_shell_exec.execute(command, env=env, stdout=output, stderr=output)
    except Exception:
        print(traceback.format_exc(), file=sys.stderr)
        return None
    return output.getvalue(), code
