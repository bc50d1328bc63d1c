"""A run in a notebook: one output that is replaced while the run goes on, and stays in the saved notebook as it was at the end.

By IPython's display handle, which needs no widget library. The state of a widget would go with the kernel.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

#: Between two looks. Each update goes over the network to a browser, and into the saved notebook.
_PAUSE_S = 0.5


def is_here() -> bool:
    """Whether this program is a notebook's kernel, which has imported IPython by then."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython on a terminal has none, and shows HTML as `<IPython.core.display.HTML object>`.
    return getattr(shell, "kernel", None) is not None


def show(html: Callable[[], str], is_over: Callable[[], bool]) -> threading.Thread:
    """Display what `html` gives, and replace it as that changes, until `is_over`; returns at once.

    The thread ends with the run, or with the program.
    """
    from IPython.display import HTML, display

    before = html()
    handle = display(HTML(before), display_id=True)

    def follow() -> None:
        last, over = before, False
        while not over:
            # Looked at first: what is shown last is from after the end.
            over = is_over()
            now = html()
            if now != last:
                handle.update(HTML(now))
                last = now
            if not over:
                time.sleep(_PAUSE_S)

    thread = threading.Thread(target=follow, name="paceline-notebook", daemon=True)
    thread.start()
    return thread
