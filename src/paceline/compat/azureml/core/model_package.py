"""A folder from which to build a container image with models and a script (`Model.package`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.model.modelpackage
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.compat.azureml.core.webservice import ids_of, script_of
from paceline.compat.azureml.exceptions import WebserviceException
from paceline.compat.azureml.policy import SubmissionNotes
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline import Workspace
    from paceline.compat.azureml.core.model import InferenceConfig

__all__ = ["ModelPackage"]


class ModelPackage:
    """A folder with a Dockerfile, models and a script.

    `state` is always "Succeeded". `location` is the folder or, after `pull` has built the image, the image's name.
    `package_build_log_uri` always has the value None.
    """

    def __init__(self, workspace: Workspace, folder: Path, name: str) -> None:
        self.workspace, self.name, self.state = workspace, name, "Succeeded"
        self.environment: object = None
        self.package_build_log_uri: str | None = None
        self._folder, self.location = folder, str(folder)

    def wait_for_creation(self, show_output: bool = False) -> None:
        """Return immediately: the folder is complete."""
        if show_output:
            print(f"Succeeded\nPackage creation Succeeded: {self._folder}")

    def get_logs(self, **others: object) -> str:
        """Return the README of the package."""
        return (self._folder / "README.md").read_text(encoding="utf-8")

    def save(self, output_directory: str) -> None:
        """Copy the folder.

        Raises:
            WebserviceException: The target exists.
        """
        target = Path(output_directory)
        if target.is_dir() and any(target.iterdir()):
            raise WebserviceException(f"{output_directory!r} is not empty. Name another folder.")
        shutil.copytree(self._folder, target, dirs_exist_ok=True)

    def pull(self) -> str:
        """Build the image with podman or docker, and return its name.

        Raises:
            WebserviceException: No engine answers, or the build fails.
        """
        from paceline.containers import find_engine

        try:
            engine = find_engine()
        except PacelineError as error:
            raise WebserviceException(f"{error} package.save(folder) writes the build folder.") from error
        if not engine.keeps_containers:
            raise WebserviceException(
                f"{engine} can't build a Dockerfile. package.save(folder) writes it for podman or docker."
            )
        words = [engine.path, "build", "-t", self.name, str(self._folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise WebserviceException(f"the image {self.name} can't be built: {(done.stderr or done.stdout)[-2000:]}")
        self.location = self.name
        return self.name

    def serialize(self) -> dict[str, object]:
        return {"state": self.state, "location": self.location}


def package(
    workspace: Workspace, models: Sequence[object], inference_config: InferenceConfig | None, *, image_name: str | None
) -> ModelPackage:
    """Write the folder of a ModelPackage below the workspace, and return the package.

    Raises:
        WebserviceException: The model or script does not exist, or the environment can't be built on other machines.
    """
    notes, named = SubmissionNotes(), ids_of(models)
    given = script_of(inference_config, notes)
    name = (image_name or str(named[0]).partition(":")[0]).lower()
    folder = Path(workspace.path) / "azureml" / "packages" / f"{name.replace('/', '-')}-{uuid.uuid4().hex[:8]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        workspace.package(named, folder, name=name.rpartition("/")[2], **given)
    except PacelineError as error:
        raise WebserviceException(str(error)) from error
    notes.show()
    return ModelPackage(workspace, folder, name)
