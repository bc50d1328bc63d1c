"""One word, one meaning: no two public classes of the package have one name."""

from __future__ import annotations

from tests.sources import SOURCE, read

#: One for torch and one for TensorFlow each, by names that Horovod, or the Keras side that takes either, goes by.
OF_BOTH = {"Accumulator", "Compression", "FP16Compressor"}
#: Here each name is the Azure SDK's, whatever Paceline calls by it; within it, too, it has one meaning.
OF_THE_SDK = SOURCE / "compat" / "azureml"


def test_no_two_classes_have_one_name() -> None:
    found: dict[tuple[str, bool], list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        of_the_sdk = path.is_relative_to(OF_THE_SDK)
        for head in read(path.read_bytes()).classes:
            if head.is_outer and not head.name.startswith("_"):
                found.setdefault((head.name, of_the_sdk), []).append(str(path))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert {name for name, _ in twice} == OF_BOTH, twice
