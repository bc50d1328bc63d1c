"""What a model process serves, from the setup that the front has sent it."""

from __future__ import annotations

import os
import sys
from typing import Any

from paceline.serving.model.servable import Servable


def load(setup: dict[str, Any]) -> Servable:
    """Load the script or the model.

    setup: "name", "models" (as in the configuration), "entry_script", "source_dir", "working_dir", "max_batch", "shared": a
        folder for what the model processes of this machine share.

    Raises:
        PacelineError: it can't be served, and the message says why.
        BaseException: whatever the user's code raises.
    """
    folder = setup["working_dir"] or setup["source_dir"]
    if folder is not None:
        os.chdir(folder)
    # `python -m` has put the folder first from which the server was started: its files are none of the script's.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", setup["started_in"])]
    if setup["entry_script"] is not None:
        from paceline.serving.model.script import load_script

        return load_script(setup)
    from paceline.serving.model.builtin import load_builtin

    return load_builtin(setup)
