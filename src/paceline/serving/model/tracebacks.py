"""What the service's log has of an exception in the user's code: from that code on, without what has called it."""

from __future__ import annotations

import os
import sys
import traceback

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def show(error: BaseException) -> None:
    """Write the exception to standard error."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith((_OURS, "<frozen")):
        at = at.tb_next
    # Of one that no other code has raised all is shown, but for what can't be parsed, whose place is in its message.
    whole = None if isinstance(error, SyntaxError) else error.__traceback__
    traceback.print_exception(type(error), error, at or whole)
    sys.stderr.flush()
