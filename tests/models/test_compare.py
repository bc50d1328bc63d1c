"""Versions side by side, from their records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.models.compare import compare, facts, metrics, signature
from paceline.models.record import ModelFile, ModelRecord


def version(number: int, size: int = 10, **run: Any) -> ModelRecord:
    file = ModelFile(name="weights.pt", size_bytes=size, sha256=f"{number}" * 64)
    return ModelRecord(name="digits", version=number, top="weights.pt", is_folder=False, files=(file,), run=run)  # type: ignore[arg-type]


def test_comparison_of_model_versions_lists_differing_metrics_parameters_files_and_packages() -> None:
    first = version(
        1,
        metrics={"accuracy": {"last": 0.5}},
        entry=["train.py"],
        arguments=["--lr", "0.1"],
        git={"commit": "abc"},
        environment={"python_version": "3.11.2", "packages": ["numpy==1.0", "torch==2.9"]},
    )
    second = version(
        2,
        metrics={"accuracy": {"last": 0.75}, "loss": {"last": 1.0}},
        entry=["train.py"],
        arguments=["--lr", "0.2"],
        git={"commit": "abc"},
        environment={"python_version": "3.11.2", "packages": ["numpy==2.0", "torch==2.9"]},
    )
    found = {(fact.part, fact.name): fact for fact in compare(Path(), [first, second])}
    different = {key: fact.values for key, fact in found.items() if fact.is_different}
    assert different == {
        ("metrics", "accuracy"): ("0.5", "0.75"),
        ("metrics", "loss"): ("", "1"),
        ("parameters", "--lr"): ("0.1", "0.2"),
        ("files", "weights.pt"): ("10 B, SHA-256 " + "1" * 12, "10 B, SHA-256 " + "2" * 12),
        ("environment", "numpy"): ("1.0", "2.0"),
    }
    assert found["code", "commit"].values == ("abc", "abc")
    assert found["environment", "torch"].to_json()["is_different"] is False
    assert compare(Path(), []) == []


@pytest.mark.parametrize(
    "run",
    [
        {"arguments": 7},
        {"git": ["commit"]},
        {"environment": {"packages": [7]}},
        {"datasets": [{"dataset": "digits"}]},
        {"topology": 3},
    ],
)
def test_lineage_with_wrong_types_raises_a_model_error(run: dict[str, Any]) -> None:
    with pytest.raises(
        ModelError, match=r"the record of digits:1 has a lineage that can't be read .* Register the files again"
    ):
        facts(Path(), version(1, **run))


def test_metrics_with_an_invalid_form_are_omitted_from_the_comparison() -> None:
    assert metrics(version(1, metrics={"loss": 3, "accuracy": {"last": 0.5}, "empty": {}})) == {
        "accuracy": "0.5",
        "empty": "-",
    }
    assert metrics(version(1, metrics=[1])) == {}


MLMODEL = """flavors: {python_function: {}}
signature:
  inputs: '[{"type": "double", "name": "x"}, {"type": "tensor", "tensor-spec": {"dtype": "float32",
    "shape": [-1, 28]}}]'
  outputs: '[{"type": "long"}]'
"""


@pytest.mark.parametrize(
    ("text", "types"),
    [
        (MLMODEL, {"input x": "double", "input 1": "float32 [-1, 28]", "output 0": "long"}),
        ("signature: null", {}),
        ("signature: {inputs: '[[', outputs: 3}", {}),
        ("[" * 5000, {}),
        ("- !!python/object/apply:os.system [true]", {}),
        ("signature: {inputs: '[7]'}", {}),
    ],
)
def test_types_of_a_model_signature_are_read_from_its_mlmodel_file(
    tmp_path: Path, text: str, types: dict[str, str]
) -> None:
    file = ModelFile(name="model/MLmodel", size_bytes=1, sha256="0" * 64)
    record = ModelRecord(name="digits", top="model", is_folder=True, files=(file,))
    assert signature(tmp_path, record) == {}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "MLmodel").write_text(text)
    assert signature(tmp_path, record) == types
