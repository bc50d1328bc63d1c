"""package: a model with its server, in a folder that needs neither Paceline nor the workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.cli import service_options
from paceline.cli.common import print_json, warn
from paceline.cli.options import takes
from paceline.cli.service_options import PACKAGE
from paceline.services.asked import asked
from paceline.services.package.write import package as write_package
from paceline.workspace import Workspace


@takes(*PACKAGE)
def package(**given: Any) -> None:
    """Write a folder that serves a model away from here: Dockerfile, exact versions, model, script and server."""
    spec = asked(
        given["models"],
        entry_script=given["entry"],
        source_directory=given["source"],
        environment=service_options.environment(given),
        environment_variables=service_options.variables(given["env"]),
        settings=service_options.settings(given),
    )
    folder = write_package(
        Workspace.from_config(create=False).path,
        spec,
        Path(given["out"]),
        name=given["name"],
        workers=1 if given["workers"] is None else given["workers"],
        base=given["base"],
        overwrite=given["overwrite"],
    )
    if given["json"]:
        print_json({"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())})
        return
    print(folder)
    warn(f"podman build -t {folder.name.lower()} {folder}\nor, by hand: python {folder / 'start.py'} --port 8000")
