"""`ray start` and `ray stop`, without what no test asks for, which takes two thirds of the time that the command takes: the
commands of ray.serve, of jobs and of Ray's state are not loaded, and no server for Ray's clients is started."""

import sys
from typing import Any

# Remove this folder from sys.path, because its `ray` folder would hide the package.
del sys.path[0]
for name in ("ray.serve", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli"):
    # Make these imports fail, as if the modules were not installed.
    sys.modules[name] = None  # type: ignore[assignment]

from ray.scripts import scripts  # noqa: E402

commands: Any = scripts
# Pretend that the packages for Ray's clients are not installed.
commands.get_ray_client_dependency_error = lambda: "no clients"
commands.main()
