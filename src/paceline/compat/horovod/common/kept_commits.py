"""Commits of elastic state that outlive the job's processes, for the next attempt.

    <base>_<n>.of_<host>.safetensors      the last commit of the script's n-th elastic state, by each host's first rank

`horovodrun` chooses <base>, and carries the files of an ended attempt to the next attempt. In a restartable run of Paceline,
<base> is in the folder of checkpoints. Other programs write no file: a commit is a copy in memory, as in Horovod.

Each host writes a file, because any host may be lost with its file. The files are not pickles, so they hold only
numbers, texts, arrays, lists and dicts. Other values get their initial value in the next attempt, with a warning.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.types import KeptState
from paceline.errors import CheckpointError, UserError
from paceline.system import run_variables

#: Environment variable with the prefix of the paths to which workers of `horovodrun` write their commits.
VARIABLE = "HOROVODRUN_COMMITS"

_log = logging.getLogger(__name__)
_numbers = itertools.count()


def base_of(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the prefix of commits' paths, or None if commits stay in memory."""
    if base := environment.get(VARIABLE):
        return base
    folder = environment.get("PACELINE_CHECKPOINT_DIR")
    restarts = environment.get("PACELINE_MAX_RESTARTS") or environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if folder and (run_variables.MIN_NODES_VARIABLE in environment or restarts not in ("", "0")):
        return os.path.join(folder, "horovod_commit")
    return None


class KeptCommits:
    """The commits of one elastic state. `number` counts them over all attempts."""

    def __init__(self, base: str) -> None:
        self._base = Path(f"{base}_{next(_numbers)}")
        self._refused: set[str] = set()
        self.number = 0

    def load(self) -> KeptState | None:
        """Return the newest commit of earlier attempts, None without commits."""
        from paceline.checkpoint.api import CheckpointFile, decode_state

        commits: list[tuple[int, CheckpointFile]] = []
        for path in sorted(self._base.parent.glob(f"{self._base.name}.of_*.safetensors")):
            file = CheckpointFile(path)
            try:
                number = dict(file.state["of"])["number"]
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{str(path)!r} is not a commit of elastic state. Remove it.") from error
            commits.append((int(number), file))
        if not commits:
            return None
        self.number, newest = max(commits, key=lambda item: item[0])
        content = decode_state(newest.state, newest.array)
        state: KeptState = content["state"]
        return state

    def save(self, state: Mapping[str, object]) -> None:
        """Write a commit (`state`) to a file on each host's first rank."""
        self.number += 1
        if basics.local_rank() != 0:
            return
        from paceline.checkpoint.api import encode_state, write_file

        header, dense = encode_state({"number": self.number, "state": {}})[0], []
        parts: list[object] = []
        for name, value in state.items():
            inner = self._plain(name, value)
            parts.append([name, inner[0]])
            dense += inner[1]
        header["of"] = [["number", self.number], ["state", {"$": "dict", "of": parts}]]
        host = "".join(letter if letter.isalnum() else "-" for letter in os.uname().nodename)
        # Don't call fsync: a commit may follow every batch. The file must survive the end of this process, but no power cut.
        write_file(self._base.with_name(f"{self._base.name}.of_{host}.safetensors"), header, dense, durable=False)

    def _plain(self, name: str, value: object) -> tuple[object, list[Any]]:
        """Return the state's part `name` as (JSON, its arrays), without unwritable values."""
        from paceline.checkpoint.api import DenseArray, encode_state

        def arrays_of(value: object, where: str) -> tuple[object, list[Any]]:
            # Begin the names of this value's arrays with the key `where`, so that they differ from other arrays' names.
            header, arrays = encode_state({where: value})
            return header["of"][0][1], [DenseArray(name, array) for name, array in arrays.items()]

        if not isinstance(value, dict):
            return arrays_of(value, name)
        pairs: list[object] = []
        arrays: list[Any] = []
        for key, item in value.items():
            try:
                encoded, its_arrays = arrays_of(item, f"{name}.{key}")
            except UserError as error:
                if key not in self._refused:
                    self._refused.add(key)
                    _log.warning("state.%s starts anew where the job is restarted: %s", key, error)
                continue
            pairs.append([key, encoded])
            arrays += its_arrays
        return {"$": "dict", "of": pairs}, arrays
