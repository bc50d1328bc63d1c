"""One word, one meaning: no two public classes of the package have one name."""

from __future__ import annotations

import pytest

from tests.sources import SOURCE, read

#: Classes that exist for torch and for TensorFlow, because Horovod or Keras requires the same name for both.
OF_BOTH = {"Accumulator", "Compression", "FP16Compressor"}
#: Below this folder, names are those of the Azure SDK. Paceline's own API also has the names in `TAKEN_FROM_THE_SDK`.
OF_THE_SDK = SOURCE / "compat" / "azureml"
TAKEN_FROM_THE_SDK = {
    *(
        "DataReference",
        "Dataset",
        "Datastore",
        "Environment",
        "Estimator",
        "Experiment",
        "FileDataset",
        "Model",
        "OfflineRun",
    ),
    *(
        "Pipeline",
        "PipelineData",
        "PipelineParameter",
        "PipelineRun",
        "PyTorch",
        "Run",
        "SKLearn",
        "TabularDataset",
        "TensorFlow",
    ),
    "Workspace",
    # In the SDK, an `Image` is a container image.
    "Image",
}


def public_classes() -> dict[tuple[str, bool], list[str]]:
    """Return the files of each public class, by its name and whether it is below `OF_THE_SDK`."""
    files: dict[tuple[str, bool], list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for head in read(path.read_bytes()).classes:
            if head.is_outer and not head.name.startswith("_"):
                files.setdefault((head.name, path.is_relative_to(OF_THE_SDK)), []).append(str(path))
    return files


@pytest.mark.promise("public-name-two-classes-one")
def test_class_names_are_unique() -> None:
    twice = {name: places for name, places in public_classes().items() if len(places) > 1}
    assert {name for name, _ in twice} == OF_BOTH, twice


def test_only_the_listed_class_names_occur_both_in_paceline_and_in_its_azure_sdk_replacement() -> None:
    classes = public_classes()
    assert {name for name, is_sdk in classes if is_sdk and (name, False) in classes} == TAKEN_FROM_THE_SDK
