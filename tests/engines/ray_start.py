"""`ray start` and `ray stop`, without what no test asks for, which takes two thirds of the time that the command takes: the
commands of ray.serve, of jobs and of Ray's state are not loaded, and no server for Ray's clients is started."""

import sys
from typing import Any

# This folder has a `ray` of its own.
del sys.path[0]
for name in ("ray.serve", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli"):
    # Importing it fails, as if it were not installed.
    sys.modules[name] = None  # type: ignore[assignment]

from ray.scripts import scripts  # noqa: E402

commands: Any = scripts
# As where what a client needs is not installed.
commands.get_ray_client_dependency_error = lambda: "no clients"
commands.main()
