"""`azureml.tensorboard`: TensorBoard for the logs of runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.compat.azureml.exceptions import UserErrorException, sdk_errors

if TYPE_CHECKING:
    from paceline.compat.azureml.core.run import Run

__all__ = ["Tensorboard", "export_to_tensorboard"]

_START_S = 30.0


class Tensorboard:
    """A TensorBoard server that follows the `logs/` of runs.

    Args:
        runs: A run, or several.
        local_root: Folder for links to the runs. None means a temporary folder.
        port: Port on this machine.

    Raises:
        UserErrorException: TensorBoard is not installed.
    """

    def __init__(
        self,
        runs: Run | list[Run] | tuple[Run, ...],
        local_root: str | None = None,
        port: int = 6006,
        use_display_name: bool = False,
    ) -> None:
        self._runs = [*runs] if isinstance(runs, (list, tuple)) else [runs]
        self._is_ours = local_root is None
        self._root = Path(local_root or tempfile.mkdtemp(prefix="paceline-tensorboard-")).absolute()
        self._port, self._by_name = port, use_display_name
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, start_browser: bool = False) -> str:
        """Start the server, and print and return its URL."""
        program = Path(sys.executable).with_name("tensorboard")
        found = str(program) if program.exists() else shutil.which("tensorboard")
        if found is None:
            raise UserErrorException("TensorBoard is not installed: pip install tensorboard.")
        self._root.mkdir(parents=True, exist_ok=True)
        for run in self._runs:
            link = self._root / (run.display_name if self._by_name else run.id)
            if not link.is_symlink():
                # Link to the run's whole folder, so that TensorBoard also finds later logs and logs in the folder `outputs`.
                link.symlink_to(run.folder.path.absolute(), target_is_directory=True)
        self._process = subprocess.Popen(
            [found, "--logdir", str(self._root), "--port", str(self._port), "--host", "127.0.0.1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        url = f"http://localhost:{self._port}/"
        self._wait(url)
        print(url)
        return url

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
        if self._is_ours:
            shutil.rmtree(self._root, ignore_errors=True)

    def _wait(self, url: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise UserErrorException(
                    f"TensorBoard exited with {self._process.returncode}. Try another port= than {self._port}."
                )
            try:
                urllib.request.urlopen(url, timeout=1).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
            else:
                return
        raise UserErrorException(f"TensorBoard does not answer at {url} within {_START_S:g} s.")


@sdk_errors
def export_to_tensorboard(
    run_data: Run | list[Run] | tuple[Run, ...], logsdir: str, logger: object = None, recursive: bool = True
) -> None:
    """Write the runs' logged numbers to event files, one folder per run.

    `recursive` also writes the numbers of the runs' children.

    Raises:
        UserErrorException: The package that writes these files is not installed.
    """
    from paceline.trackers.export import to_tensorboard

    for run in run_data if isinstance(run_data, (list, tuple)) else [run_data]:
        for one in [run, *(run.get_children(recursive=True) if recursive else ())]:
            one.record()  # reading the record of a remote run also fetches its files
            to_tensorboard([one.folder], Path(logsdir))
