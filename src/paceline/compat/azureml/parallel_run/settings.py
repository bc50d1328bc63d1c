"""What a ParallelRunStep asks of its workers, as text that goes through a command line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ParallelRunSettings:
    """entry: the user's script, relative to the working directory. files, tables: names of the inputs.

    batch_size: files of a mini-batch, or about so many bytes of a table. timeout_s: the longest call of run(). tries: of each
    mini-batch. error_threshold: items that may fail, -1 for any number. failed_batches, failed_percent: mini-batches that may,
    alike. keys: by whose values mini-batches are made, in the place of batch_size. formats: name of an input of files -> its
    partition_format. output: name of the output, None where the step has none. file: that the rows are appended to there,
    None for none.
    """

    entry: str
    files: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    formats: dict[str, str] = dataclasses.field(default_factory=dict)
    batch_size: int
    timeout_s: float
    tries: int
    error_threshold: int
    failed_batches: int = -1
    failed_percent: float = -1.0
    output: str | None = None
    file: str | None = None
    logging_level: str = "INFO"

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: str) -> ParallelRunSettings:
        """Those that `text` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, **{name: tuple(values[name]) for name in ("files", "tables", "keys")}})
