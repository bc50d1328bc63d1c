"""What `paceline check` asks of a script's workers, and where they leave what came of it (`compared`). Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

VARIABLE = "PACELINE_CHECK"
#: In the run's outputs.
FOLDER, VALUES, OUTCOME = "check", "values.pt", "outcome.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsAsked:
    """What `paceline check` asks of a run, as JSON in a variable.

    against: where the run of one process has left its values; None: this is that run.
    folder: where this one leaves what came of it. precision: "float64", or "own" for the script's.
    """

    folder: Path
    steps: int
    precision: str
    against: Path | None = None

    @classmethod
    def from_environment(cls) -> StepsAsked | None:
        """What this process was asked; None outside of a comparison."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        given = json.loads(text)
        against = given.get("against")
        return cls(
            folder=Path(os.environ["PACELINE_OUTPUT_DIR"]) / FOLDER,
            steps=given["steps"],
            precision=given["precision"],
            against=None if against is None else Path(against),
        )
