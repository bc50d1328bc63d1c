"""The process that runs the user's script, and the rank's handle on this process.

    python -m paceline.compat.azureml.parallel_run.scoring FD SETTINGS [argument ...]

FD is the descriptor of a socket for the messages between the rank and this process. Standard output remains free for
the script's own output.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.parallel_run.batches import Batch, ParallelRunSettings, content, folder_of, values_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.compat.azureml.data.file_dataset import FileDataset
    from paceline.compat.azureml.data.tabular_dataset import TabularDataset
    from paceline.compat.azureml.parallel_run.batches import Table
    from paceline.compat.azureml.parallel_run.sharing import RankRequest


class Scorer:
    """A process that runs the user's script, whose init() has succeeded.

    Raises:
        UserErrorException: The script can't be loaded, or its init() has failed.
    """

    def __init__(self, settings: ParallelRunSettings, arguments: Sequence[str]) -> None:
        self._settings = settings
        own, other = socket.socketpair()
        with other:
            module = "paceline.compat.azureml.parallel_run.scoring"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(other.fileno()), settings.text(), *arguments],
                pass_fds=(other.fileno(),),
            )
        self._link = Connection(own.detach())
        self.is_alive = True
        answer = self._answer(None)
        if answer["kind"] != "ready":
            self.end()
            raise UserErrorException(f"{settings.entry} can't be used: {answer['why']}")

    def score(self, batch: Batch) -> RankRequest:
        """Run a mini-batch and return its result. A timeout kills the process."""
        try:
            self._link.send_bytes(json.dumps(batch.fields()).encode())
            answer = self._answer(self._settings.timeout_s)
        except OSError:
            answer = self._died()
        return {**answer, "number": batch.number}

    def end(self) -> None:
        """Let the script's process call shutdown() and exit, or kill it after a while."""
        self._link.close()
        try:
            self._process.wait(self._settings.timeout_s if self.is_alive else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.is_alive = False

    def _answer(self, timeout_s: float | None) -> RankRequest:
        if not self._link.poll(timeout_s):
            self._process.kill()
            self._process.wait()
            self.is_alive = False
            return {"kind": "failed", "why": f"run() did not return within run_invocation_timeout={timeout_s:g} s"}
        try:
            answer: RankRequest = json.loads(self._link.recv_bytes())
        except (EOFError, OSError):
            return self._died()
        return answer

    def _died(self) -> RankRequest:
        self.is_alive = False
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return {"kind": "failed", "why": f"its process ended with {how}"}


def main(argv: Sequence[str]) -> None:
    link, settings = Connection(int(argv[0])), ParallelRunSettings.of_text(argv[1])

    def tell(**values: object) -> None:
        link.send_bytes(json.dumps(values).encode())

    logging.basicConfig(level=settings.logging_level, format="%(levelname)s %(name)s: %(message)s")
    try:
        script = _loaded(settings, list(argv[2:]))
        getattr(script, "init", lambda: None)()
        if not callable(getattr(script, "run", None)):
            raise UserErrorException("it does not define run(mini_batch).")
    except BaseException as error:
        traceback.print_exc()
        tell(kind="failed", why=_told(error))
        raise SystemExit(1) from None
    tell(kind="ready")
    takes_context = _takes_two(script.run)
    tables: dict[str, Table] = {}
    while True:
        try:
            values = json.loads(link.recv_bytes())
        except EOFError:
            break
        try:
            batch = Batch.of_fields(values)
            given = content(batch, settings, tables)
            more = (MiniBatchContext(batch, settings, given),) if takes_context else ()
            rows, items = _rows(script.run(given, *more))
        # Any exception, even sys.exit(), counts as a failure of this mini-batch.
        except BaseException as error:
            traceback.print_exc()
            tell(kind="failed", why=_told(error))
        else:
            tell(kind="done", rows=rows if settings.file else [], items=items)
    getattr(script, "shutdown", lambda: None)()


def _loaded(settings: ParallelRunSettings, arguments: list[str]) -> ModuleType:
    path = os.path.abspath(settings.entry)
    sys.argv = [settings.entry, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    _offer_entry_script(settings)
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "its ending was looked at"
    assert spec.loader is not None, "it is a file"
    # Register the script under its own module name, which pickled objects of its classes contain.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class MiniBatchContext:
    """The second argument of `run(mini_batch, mini_batch_context)`.

    `partition_key_value` maps the partition keys to the mini-batch's values. `minibatch_index` counts from 0.
    """

    def __init__(self, batch: Batch, settings: ParallelRunSettings, given: object) -> None:
        self.partition_key_value = values_of(batch, settings, given)
        self.minibatch_index = batch.number
        self._batch, self._given = batch, given

    @property
    def dataset(self) -> FileDataset | TabularDataset:
        from paceline.compat.azureml.core.dataset import FileDatasetFactory
        from paceline.compat.azureml.core.run import Run

        if self._batch.files:
            return FileDatasetFactory.from_files(self._given)
        found: TabularDataset = Run.get_context().input_datasets[self._batch.input]
        for key, value in self.partition_key_value.items():
            found = found.filter(found[key].is_null() if value is None else found[key] == value)
        return found

    def __repr__(self) -> str:
        return (
            f"MiniBatchContext(minibatch_index={self.minibatch_index}, partition_key_value={self.partition_key_value})"
        )


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _rows(result: Any) -> tuple[list[str], int]:
    """Return the result of `run` as lines, and its number of items."""
    if hasattr(result, "to_csv"):
        # Write a data frame in the format of Azure's service: with spaces between columns, and without a header.
        return result.to_csv(sep=" ", header=False, index=False).splitlines(), len(result)
    if isinstance(result, (str, bytes, dict)) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        raise UserErrorException(f"run() returned a {type(result).__name__}; it must be a list or a DataFrame.")
    return [str(one) for one in result], len(result)


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _offer_entry_script(settings: ParallelRunSettings) -> None:
    """Let the script import `azureml_user.parallel_run.EntryScript`, which has a logger and folders."""

    class EntryScript:
        logger = logging.getLogger("entry_script")
        working_dir = os.getcwd()
        output_dir = str(folder_of(settings.output)) if settings.output else None
        log_dir = os.path.join(os.getcwd(), "logs", "user")

    EntryScript.logger.setLevel(settings.logging_level)
    package, module = ModuleType("azureml_user"), ModuleType("azureml_user.parallel_run")
    package.parallel_run, module.EntryScript = module, EntryScript  # type: ignore[attr-defined]
    package.__path__ = []
    sys.modules |= {package.__name__: package, module.__name__: module}


if __name__ == "__main__":
    main(sys.argv[1:])
