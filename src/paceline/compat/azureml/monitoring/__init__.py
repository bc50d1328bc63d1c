"""`azureml.monitoring`: the requests and answers of a web service, as CSV."""

from __future__ import annotations

import csv
import datetime as dt
import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["ModelDataCollector"]


class ModelDataCollector:
    """A collector that appends rows to `modeldata/<model>/<designation>.csv`.

    The file is below $PACELINE_MODEL_DATA, otherwise below the working directory.
    """

    def __init__(
        self,
        model_name: str,
        designation: str = "default",
        feature_names: Iterable[str] | None = None,
        identifier: str = "default",
        workspace: str = "default",
        webservice_name: str = "default",
        model_version: str = "default",
        collection_name: str = "default",
    ) -> None:
        names = [re.sub(r"[^\w.-]", "_", str(name)) for name in (model_name, designation)]
        top = Path(os.environ.get("PACELINE_MODEL_DATA") or ".")
        self._file = top / "modeldata" / names[0] / f"{names[1]}.csv"
        self._names = list(feature_names) if feature_names is not None else None

    def collect(self, input_data: Any, user_correlation_id: str = "") -> str:
        """Append the rows of an array, list or data frame. Return their id."""
        is_frame = hasattr(input_data, "values") and not callable(input_data.values)
        rows = input_data.values if is_frame else input_data
        rows = rows.tolist() if hasattr(rows, "tolist") else list(rows)
        rows = rows if rows and isinstance(rows[0], (list, tuple)) else [rows]
        request = user_correlation_id or str(uuid.uuid4())
        self._file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self._file.exists()
        with open(self._file, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(
                    ["$aml_time", "$aml_id", *(self._names or [f"feature_{n}" for n in range(len(rows[0]))])]
                )
            now = dt.datetime.now(dt.timezone.utc).isoformat()
            writer.writerows([now, request, *row] for row in rows)
        return request

    def add_correlation_headers(self, headers: dict[str, str], correlations: dict[str, str]) -> dict[str, str]:
        """Return the HTTP headers with the ids from `collect` added."""
        return {**headers, **{f"x-ms-aml-{key}": str(value) for key, value in correlations.items()}}
