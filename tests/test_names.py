"""One word, one meaning: no two public classes of the package have one name."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline

#: One for torch and one for TensorFlow each, by names that Horovod, or the Keras side that takes either, goes by.
OF_BOTH = {"Accumulator", "Compression", "FP16Compressor"}
#: Paceline's, and those with the spellings of another library.
OF_THE_SDK = {"Experiment", "OfflineRun", "Run"}


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(Path(paceline.__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert set(twice) == OF_BOTH | OF_THE_SDK, twice
